"""The example whose model learns to call a tool: what the warm start teaches is what a rollout asks, id by id."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlsys.config import Config, load_config
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from tests.unit.generators.test_agent import Model

pytestmark = pytest.mark.gate  # an agent's process, an environment's and SGLang's parsers

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "examples/tools"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    tool_module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool_module
    spec.loader.exec_module(tool_module)
    return tool_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_folder = tmp_path_factory.mktemp("model")
    module("model").write_model(model_folder)
    return model_folder


@pytest.mark.parametrize("name", ["rl", "rl_anthropic"])
async def test_an_agent_rollout_has_the_same_tokens_as_the_warm_start(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rl_sdk's package is in no venv of ours."""
    monkeypatch.chdir(ROOT)
    tokenizer = Tokenizer(folder)
    python_override = f"rollout.generator_params.python={sys.executable}"
    config: Config = load_config(TOOLS / f"{name}.yaml", [f"model.path={folder}", python_override])
    sft = load_config(TOOLS / "sft.yaml", [f"model.path={folder}"])
    call, answer = module("traces").calls(sft, tokenizer)(0)[:2]
    responses = [tokenizer.decode(trace.response_ids) for trace in (call, answer)]
    question = tokenizer.decode(call.prompt_ids).partition("<user>")[2].partition("<assistant>")[0]
    model = Model(responses, budget=config.rollout.max_response_tokens)
    model.said = [call.response_ids, answer.response_ids]
    sample = Sample(5, 1, 0, [1], seed=1)
    generate = build_generator(config, tokenizer, model)
    await generate(sample, Prompt(0, "", [1], {"question": question}, question))
    assert sample.status is Status.FINISHED
    assert sample.prompt_ids == call.prompt_ids
    before_answer = [*sample.prompt_ids, *sample.response_ids][: len(answer.prompt_ids)]
    assert before_answer == answer.prompt_ids
    assert [*sample.prompt_ids, *sample.response_ids] == [*answer.prompt_ids, *answer.response_ids]
    assert [tokenizer.decode(sample.response_ids[o.start : o.end]) for o in sample.observed] == [
        f"<tool>{responses[1].removeprefix('<answer>').partition('<')[0]}<assistant>"
    ]


def test_the_warm_start_ends_with_guesses(folder: Path) -> None:
    tokenizer, sft = Tokenizer(folder), load_config(TOOLS / "sft.yaml", [f"model.path={folder}"])
    batch = module("traces").calls(sft, tokenizer)
    early, late = (
        [tokenizer.decode(t.response_ids).startswith("<answer>") for t in batch(step)]
        for step in (0, sft.trainer.steps - 1)
    )
    assert sum(early) == len(early) / 2 and sum(late) > 0.75 * len(late)
