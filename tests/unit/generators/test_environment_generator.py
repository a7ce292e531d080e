"""An episode is a sample: tokens as the engine made them, untrained what the environment says, rewards by turn."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.spans import TurnReward, VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.generators.environment import EnvironmentGenerator
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.rewards import make_score
from rlsys.rollout.dry_run import dry_run
from rlsys.worker.scoring import set_turn_rewards, with_turn_rewards
from tests.helpers.responses import response_of
from tests.unit.generators.test_agent import rig_buffer

pytestmark = pytest.mark.gate  # each starts a process of the environment

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
OWN = ROOT / "tests/data/environments/own.py"
TOKENIZER = Tokenizer(MODEL)
SAID = ("3", "8", "12")
WHOLE = "3<eos><user>4<assistant><think>8<eos><user>5<assistant><think>12<eos>"


def config(budget: int = 200, **params: Any) -> Config:
    generator_params = {"connector": f"{OWN}:Sums", **params}
    return Config.model_validate(
        {
            "model": {"path": MODEL},
            "data": {"reward": "environment"},
            "rollout": {
                "generator": "environment",
                "generator_params": generator_params,
                "max_response_tokens": budget,
            },
        }
    )


class Model:
    """Says one turn after the other; `at_once`: tokens until it is interrupted."""

    def __init__(self, said: Sequence[str] = SAID, budget: int = 200, at_once: int | None = None) -> None:
        self.said, self.budget, self.at_once = [TOKENIZER.encode(t + "<eos>") for t in said], budget, at_once

    async def __call__(
        self, sample: Sample, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        start = sample.observed[-1].end if sample.observed else 0
        for token in self.said[len(sample.observed)][sample.tokens - start :]:
            if (
                self.at_once is not None
                and sample.tokens - sum(o.end - o.start for o in sample.observed) == self.at_once
            ):
                raise asyncio.CancelledError
            if sample.tokens >= self.budget:
                sample.status = Status.TRUNCATED
                return
            sample.append(Segment([token], [-0.5], [VersionSpan(1, 0, 1)]))
        sample.status = Status.FINISHED


def prompt(**task: Any) -> Prompt:
    text = TOKENIZER.apply_chat([{"role": "user", "content": "go"}])
    return Prompt(0, text, TOKENIZER.encode(text), {"terms": [3, 4, 5], **task}, "go")


async def made(
    given: Config, model: Model | None = None, sample: Sample | None = None, **task: Any
) -> Sample:
    sample = sample or Sample(5, 1, 0, prompt().ids, seed=1)
    generate = build_generator(given, TOKENIZER, model or Model())
    assert isinstance(generate, EnvironmentGenerator)
    try:
        await generate(sample, prompt(**task))
    finally:
        await generate.close()
    return sample


async def test_an_episode_is_a_sample_and_its_rewards_are_its_turns() -> None:
    s = await made(config())
    assert TOKENIZER.decode(s.prompt_ids) == "<bos><user>3<assistant><think>" and s.own_prompt
    assert (TOKENIZER.decode(s.response_ids), s.status) == (WHOLE, Status.FINISHED)
    assert [TOKENIZER.decode(s.response_ids[t.start : t.end]) for t in s.turns()] == [
        "3<eos>", "8<eos>", "12<eos>"
    ]  # fmt: skip
    assert s.turn_rewards == [TurnReward(1.0), TurnReward(0.0), TurnReward(1.0)]
    score = make_score(config())
    assert score(with_turn_rewards(prompt(), s), response_of(TOKENIZER.decode(s.response_ids))) == 2.0


async def test_after_a_restart_at_any_token_the_saved_turns_are_played_again() -> None:
    reference = await made(config())
    for tokens in (1, 2, 3, 5):
        s = Sample(5, 1, 0, prompt().ids, seed=1)
        with pytest.raises(asyncio.CancelledError):
            await made(config(), Model(at_once=tokens), s)
        assert s.sampled_tokens == tokens
        s.status = Status.PARKED
        again = await made(config(), Model(), s)
        assert (again.response_ids, again.turn_rewards, again.status) == (
            reference.response_ids, reference.turn_rewards, reference.status
        )  # fmt: skip


async def test_one_that_dies_in_the_middle_is_played_again_and_one_that_changed_censors(
    tmp_path: Path,
) -> None:
    s = await made(config(), kill_once=str(tmp_path / "killed"))
    assert TOKENIZER.decode(s.response_ids) == WHOLE
    with pytest.raises(ToolFailed, match="replay after a restart differs"):
        await made(config(), kill_once=str(tmp_path / "killed again"), fickle=True)
    with pytest.raises(ToolFailed, match="open raised ValueError: no such task"):
        await made(config(), raises=True)


async def test_a_response_at_its_token_or_turn_limit_keeps_turn_rewards() -> None:
    s = await made(config(max_turns=2))
    assert (len(s.turns()), s.turn_rewards, s.status) == (
        2, [TurnReward(1.0), TurnReward(0.0)], Status.FINISHED
    )  # fmt: skip
    full_length = len(TOKENIZER.encode(WHOLE))
    for budget in range(1, full_length + 1):
        s = await made(config(budget), Model(budget=budget))
        assert s.turn_rewards is not None and len(s.turn_rewards) == len(s.turns())
        assert (s.tokens <= budget) and (s.status is Status.FINISHED) == (budget == full_length)


def test_rewards_of_turns_are_in_the_ledger(tmp_path: Path) -> None:
    with rig_buffer(tmp_path) as buffer:
        group = buffer.issue(Prompt(0, "", [5, 6], {}), [1, 2])
        for sample in group.samples:
            sample.append(Segment([3], [-1.0], [VersionSpan(1, 0, 1)]))
        group.samples[0].turn_rewards = [TurnReward(0.5), TurnReward(-1.0, False)]
        buffer.save(group.samples)
        buffer.flush()
    with rig_buffer(tmp_path) as buffer:
        (group,) = buffer.active()
    assert [s.turn_rewards for s in group.samples] == [[TurnReward(0.5), TurnReward(-1.0, False)], None]


def test_a_reward_function_can_set_turn_rewards() -> None:
    s = Sample(5, 1, 0, [1], seed=1)
    s.append(Segment([5, 6], [-1.0, -1.0], [VersionSpan(1, 0, 2)]))
    s.observe([7])
    s.append(Segment([8], [-1.0], [VersionSpan(1, 0, 1)]))
    assert set_turn_rewards(s, [0.5]) == (
        "reward returned 1 turn_rewards, expected 2, one for each turn of the response"
    )
    assert set_turn_rewards(s, [0.5, 1.0]) is None and s.turn_rewards == [TurnReward(0.5), TurnReward(1.0)]


def test_the_environment_of_the_page_passes_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    rows = [json.dumps({"prompt": f"count from {i}", "start": i}) for i in range(400)]
    (tmp_path / "starts.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    assert dry_run(load_config(Path("count.yaml"))).rewards == ()


def test_explain_plays_one_episode_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}", "terms": [{i}, 2]}}\n' for i in range(1200)))
    base_config = config()
    section = base_config.data.model_copy(update={"source": "jsonl", "params": {"path": str(data)}})
    assert dry_run(base_config.model_copy(update={"data": section}))
    bad = base_config.model_copy(
        update={
            "rollout": base_config.rollout.model_copy(
                update={"generator_params": {"connector": f"{OWN}:Summs"}}
            ),
            "data": section,
        }
    )
    with pytest.raises(UserError, match=r"generator_params: the environment .*own.py:Summs: AttributeError"):
        dry_run(bad)
