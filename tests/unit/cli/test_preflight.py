"""A config that passes the preflight starts; what would stop a run at its first prompt or step is told before."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.algo.batch import Samples
from rlsys.algo.losses import View
from rlsys.cli import main
from rlsys.cli.preflight import check_start
from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Sample
from rlsys.rewards import make_scores
from rlsys.rewards.workers import RewardWorkers

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
SHIPPED = sorted(p for p in CONFIGS.rglob("*.yaml") if p.name != "base.yaml")  # which is no config by itself
EXPERIMENTS = [p for p in SHIPPED if p.parent.name == "experiments"]


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward's own process takes two seconds to start: here it scores where the test runs."""

    @asynccontextmanager
    async def scores(self: RewardWorkers) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        scorers = make_scores(Config.model_validate_json(self._config))

        async def ask(prompt: Prompt, response_text: str) -> Any:
            return [score(prompt, response_text) for score in scorers]

        yield ask

    monkeypatch.setattr(RewardWorkers, "scores", scores)


def with_tokenizer(config: Config, folder: Path) -> Config:
    """A model folder of config.json alone, with the quickstart's tokenizer beside it; one that is made by the user
    (quickstart_sft.yaml says how) is the quickstart's."""
    model, quickstart = config.model.path, CONFIGS / "models/quickstart-moe"
    if not (model / "tokenizer.json").is_file():
        source = model if model.exists() else quickstart
        for file in (source / "config.json", *quickstart.glob("*token*"), quickstart / "chat_template.jinja"):
            shutil.copy(file, folder)
        model = folder
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_config_starts(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    notes = check_start(with_tokenizer(load_config(path, ["eval.prompts=8"]), tmp_path))
    assert not [line for line in notes if line.startswith("NOT CHECKED")]


def broken_source(config: Config, tokenizer: object) -> object:
    raise KeyError("rows")


def endless_reward(config: Config) -> Callable[[Prompt, str], float]:
    return lambda prompt, text: prompt.entry["no such key"]


async def slimes_generate(args: Config, sample: object, sampling_params: object) -> object:
    return sample


def idle(config: Config, tokenizer: object, speak: object) -> Callable[..., Awaitable[None]]:
    async def generate(sample: Sample, prompt: Prompt) -> None:
        pass

    return generate


def wrong_shape(samples: Samples) -> torch.Tensor:
    return samples.reward[:-1]


def needs_more(view: View, prepared: object) -> object:
    """A loss that does not say what it needs."""
    return view.batch.signal("ref"), {}


def no_number(samples: Samples) -> torch.Tensor:
    return samples.reward * torch.nan


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.source=reasoning_gym", "data.params={name: gsm_symbolic}"], r"^data.params.\w+: "),
        (
            ["data.source=reasoning_gym", "data.params={task: gsm_symbolik}"],
            "^data.params: reasoning-gym task 'gsm_symbolik'",
        ),
        (
            [f"data.source={__name__}:broken_source"],
            rf"^data.source = '{__name__}:broken_source': KeyError: 'rows' \(tests/unit/cli/test_preflight.py:\d+\)$",
        ),
        (["data.reward=exact_answr"], "^data.reward = 'exact_answr': unknown name; did you mean exact_answer"),
        (
            [f"data.reward={__name__}:endless_reward"],
            "^data.reward = .*: no reward for the response <answer>0</answer> to prompt 0: reward raised Key",
        ),
        (
            [f"rollout.generator={__name__}:slimes_generate"],
            "^rollout.generator: the function returned without requesting a turn of the model$",
        ),
        (
            [f"rollout.generator={__name__}:idle"],
            "^rollout.generator = .*: the status of its first response is parked",
        ),
        (
            ["rollout.generator=calculator", "rollout.generator_params={max_turns: three}"],
            r"^rollout.generator = 'calculator': TypeError: .* \(tools.py:\d+\)$",
        ),
        (
            ["engine.max_total_tokens=100", "rollout.max_response_tokens=64",
             "data.params={short: [64, 64], long: [64, 64]}"],
            "^data.source = 'chain_sum_tail': no engine accepts prompt 0: the prompt has 132 tokens; expected at",
        ),
        (
            [f"algo.advantage={__name__}:wrong_shape"],
            r"^algo fails on a made-up step: RuntimeError: shape mismatch",
        ),
        (
            [f"algo.loss=[clip, {__name__}:needs_more]"],
            r"^algo \(needs_more\) fails on a made-up step: ValueError: the batch has no 'ref', .* \(batch.py:",
        ),
        ([f"algo.advantage={__name__}:no_number"], "^algo: on a made-up step the loss is nan"),
        (
            ["data.reward=answer_and_format", "algo.advantage={name: gdpo, weights: [1, 2, 3]}"],
            "algo.advantage.weights",
        ),
    ],
)  # fmt: skip
def test_preflight_rejects_configs_that_would_fail_at_the_first_step(
    overrides: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    with pytest.raises(UserError, match=told) as caught:
        check_start(load_config(QUICKSTART, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("same_process")
def test_a_record_without_the_answer_required_by_the_reward_is_named(tmp_path: Path) -> None:
    """Before: `KeyError: 'answer'`. data.keys.answer, which the message names, mends it."""
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "solution": i + 1}) + "\n" for i in range(40)))
    data = ["data.source=jsonl", f"data.params.path={rows}", "data.reward=exact_answer", "eval.prompts=2"]
    with pytest.raises(UserError) as caught:
        check_start(load_config(QUICKSTART, data))
    message = str(caught.value)
    assert re.search(
        rf"{rows}:\d+ has no answer; its keys: prompt, solution \(data\.keys\.answer=KEY", message
    ), message
    check_start(load_config(QUICKSTART, [*data, "data.keys.answer=solution"]))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_explain_accepts_a_model_folder_with_only_config_json(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    assert main.main(["explain", str(path)]) == 0
    folder = load_config(path).model.path
    assert f"NOT CHECKED: {folder} has no tokenizer.json: the first prompt" in capsys.readouterr().out


def test_preflight_checks_params_and_weights_without_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    path, folder = EXPERIMENTS[0], load_config(EXPERIMENTS[0]).model.path
    assert main.main(["explain", str(path), "data.params={name: gsm_symbolic}"]) == 2
    assert capsys.readouterr().err.startswith("rlsys: error: data.params.name: unknown key")
    assert main.main(["train", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"rlsys: error: model.path = {folder}: contains no weights")


def test_submit_checks_before_it_queues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr("rlsys.cli.cluster.submit", lambda *_: pytest.fail("it was queued"))
    assert main.main(["submit", str(QUICKSTART), f"rollout.generator={__name__}:idle"]) == 2
    assert "rollout.generator" in capsys.readouterr().err


def test_a_reward_is_scored_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the run: one that hangs is told and ended."""
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hanging.py").write_text(
        "import time\ndef reward(config):\n    return lambda prompt, text: time.sleep(600)\n"
    )
    config = load_config(QUICKSTART, ["data.reward=hanging:reward", "rollout.reward_timeout=0.2"])
    with pytest.raises(
        UserError, match=r"prompt 0: reward took longer than rollout\.reward_timeout = 0\.2 s"
    ):
        check_start(config)
