"""The processes that `rlsys eval` and `rlsys try` start."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsys.cli.project import show
from rlsys.cli.project_template import write_starter
from rlsys.config import Config, load_config
from rlsys.config.data import RewardSpec
from rlsys.core.errors import RunError
from rlsys.core.identity import ANONYMOUS
from rlsys.core.run_files import PROGRESS_FILE
from rlsys.core.types import Prompt
from rlsys.data import Tokenizer, build_source
from rlsys.evaluation import evaluation, tryout
from rlsys.evaluation.results import EvalResult
from rlsys.worker.scoring import Verdict
from tests.helpers.http_engine import HttpEngine
from tests.helpers.responses import sample_of


@pytest.mark.parametrize(
    ("given", "missing"), [([], "--config, --engine"), (["--config", "c.yaml"], "--engine")], ids=str
)
def test_missing_arguments_are_named(
    given: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluation", *given])
    with pytest.raises(SystemExit) as exit_info:
        evaluation.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"the following arguments are required: {missing}")


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    http_engine = HttpEngine()
    yield await http_engine.start()
    await http_engine.stop()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_starter(tmp_path / "mine")
    sizes = ["rollout.max_response_tokens=8", "eval.prompts=3", "rollout.reward_concurrency=1"]
    return load_config(tmp_path / "mine" / "config.yaml", [f"run.dir={tmp_path}", *sizes])


async def test_an_evaluation_and_a_try_sample_and_score_identically(engine: str, config: Config) -> None:
    """The engine's answers are cut off at 8 tokens and wrong."""
    result = await evaluation.evaluate(config, {engine: ANONYMOUS})
    assert result == EvalResult(accuracy=0, prompts=3, mean_length=8, truncated=3, constant=1 / 3, reward=0)
    progress = (config.run.dir / PROGRESS_FILE).read_text()
    assert progress == "24 tokens generated, 0 responses in flight"
    entries = await tryout.try_out(config, {engine: ANONYMOUS})
    assert [len(entry["samples"]) for entry in entries] == [tryout.SAMPLES] * tryout.PROMPTS
    source = build_source(config, Tokenizer(config.model.path))
    assert [entry["tokens"] for entry in entries] == [len(source.train(i).ids) for i in range(tryout.PROMPTS)]
    for entry in entries:
        for sample in entry["samples"]:
            assert (sample["tokens"], sample["status"], sample["reward"]) == (8, "truncated", 0)


async def test_a_try_shows_the_prompt_that_the_model_read(
    engine: str, config: Config, tmp_path: Path
) -> None:
    """An agent's or an environment's own one, not the row's."""
    (tmp_path / "own.py").write_text(
        "def own(config, tokenizer, speak):\n"
        "    async def generate(sample, prompt):\n"
        "        said = 'last' if sample.index == 3 else 'mine'\n"
        "        sample.prompt_ids, sample.own_prompt = tokenizer.encode(said), True\n"
        "        await speak(sample)\n"
        "    return generate\n"
    )
    rollout_config = config.rollout.model_copy(update={"generator": f"{tmp_path}/own.py:own"})
    (first, *_) = await tryout.try_out(
        config.model_copy(update={"rollout": rollout_config}), {engine: ANONYMOUS}
    )
    assert (first["prompt"], first["tokens"]) == ("mine", len(Tokenizer(config.model.path).encode("mine")))
    assert [sample.get("prompt") for sample in first["samples"]] == [None, None, None, "last"]
    show([first], Console(file=(page := io.StringIO())))
    assert "mine" in page.getvalue() and "to last" in page.getvalue()


def test_the_commonest_answer_and_the_best_constant_one() -> None:
    assert evaluation.most_common_fraction(["4", "4", "5", None]) == 0.5
    assert evaluation.most_common_fraction(["4", None, None]) is None, "most are not known"
    answers: list[Any] = [" A  b ", "a B", 7, 7.5, None, [1], {"x": 1}]
    references = [evaluation.reference_answer(Prompt(0, "", [], {"answer": a})) for a in answers]
    assert references == ["a b", "a b", "7", "7.5", None, None, None]
    assert evaluation.reference_answer(Prompt(0, "", [], {})) is None


async def test_a_reward_that_fails_is_a_reason_and_no_reward(
    engine: str, config: Config, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def reward(config):\n    return lambda prompt, text: 1 / 0\n")
    failing_config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"reward": [RewardSpec(name=f"{tmp_path}/mine.py:reward")]})
        }
    )
    (first, *_) = await tryout.try_out(failing_config, {engine: ANONYMOUS})
    assert {sample["reward"] for sample in first["samples"]} == {None}
    assert "ZeroDivisionError" in first["samples"][0]["reason"]
    with pytest.raises(
        RunError, match=r"no response got a reward; reason for the first one: .*ZeroDivisionError"
    ):
        await evaluation.evaluate(failing_config, {engine: ANONYMOUS})


def test_the_best_constant_answer_is_measured_on_the_prompts_of_the_accuracy() -> None:
    """Of four prompts, the third was not judged."""
    items = [(sample_of(), Prompt(i, "", [1], {"answer": a})) for i, a in enumerate(["7", "7", "7", "8"])]
    verdicts = [Verdict(1.0, right=True), Verdict(0.0), Verdict(reason="it raised"), Verdict(1.0, right=True)]
    result = evaluation.judge(items, verdicts, 4)
    assert (result.prompts, result.left_out) == (3, 1)
    assert result.accuracy == result.constant == pytest.approx(2 / 3)
