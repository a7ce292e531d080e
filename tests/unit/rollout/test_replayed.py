"""Trajectories of the data as rollouts: the model's own words while they match, patches where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from rlsys.rewards import make_score
from rlsys.worker.scoring import with_turn_rewards
from tests.helpers.responses import response_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
TOKENIZER = Tokenizer(MODEL)
STEPS = [{"observation": f"o{i}", "action": f"a{i}"} for i in range(5)]
SAID = ("a0", "no", "a2", "no", "no")


def config(budget: int = 200, **params: Any) -> Config:
    section = {"generator": "replayed", "generator_params": params, "max_response_tokens": budget}
    return Config.model_validate(
        {"model": {"path": MODEL}, "data": {"reward": "environment"}, "rollout": section}
    )


class Model:
    def __init__(self, said: Sequence[str] = SAID, at_once: int | None = None) -> None:
        self.said, self.at_once, self.turn = said, at_once, 0

    async def __call__(
        self, sample: Sample, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        start = sample.observed[-1].end if sample.observed else 0
        turn = TOKENIZER.encode(self.said[self.turn] + "<eos>")
        for token in turn[sample.tokens - start :]:
            if self.at_once == 0:
                raise asyncio.CancelledError
            self.at_once = None if self.at_once is None else self.at_once - 1
            if max_tokens is not None and sample.tokens >= max_tokens:
                sample.status = Status.TRUNCATED
                return
            sample.append(Segment([token], [-0.5], [VersionSpan(1, 0, 1)]))
        self.turn += 1
        sample.status = Status.FINISHED


def prompt(steps: object = STEPS) -> Prompt:
    return Prompt(0, "go", TOKENIZER.encode("go"), {"steps": steps}, "go", location="rows.jsonl:1")


def fresh() -> Sample:
    return Sample(5, 1, 0, prompt().ids, seed=1)


async def made(given: Config, model: Model | None = None, sample: Sample | None = None) -> Sample:
    sample = sample or fresh()
    await build_generator(given, TOKENIZER, model or Model())(sample, prompt())
    return sample


def told(sample: Sample) -> list[tuple[str, str]]:
    return [(TOKENIZER.decode(q.prompt_ids), TOKENIZER.decode(q.response_ids)) for q in sample.sequences]


FIRST = ("<bos><user>o0<assistant><think>", "a0<eos><user>o1<assistant><think>no<eos>")
SECOND = (
    "<bos><user>o0<assistant>a0<user>o1<assistant>a1<user>o2<assistant><think>",
    "a2<eos><user>o3<assistant><think>no<eos>",
)
THIRD = (
    "<bos><user>o0<assistant>a0<user>o1<assistant>a1<user>o2<assistant>a2<user>o3<assistant>a3<user>o4"
    "<assistant><think>",
    "no<eos>",
)


@pytest.mark.parametrize(
    ("patches", "turns", "sequences"),
    [
        (0, 2, [FIRST]),
        (1, 4, [FIRST, SECOND]),
        (2, 5, [FIRST, SECOND, THIRD]),
        (-1, 5, [FIRST, SECOND, THIRD]),
    ],
)
async def test_patches_give_the_authors_lengths_of_episodes(
    patches: int, turns: int, sequences: list[tuple[str, str]]
) -> None:
    """UI-S1's generator goes on after a wrong action as long as fewer than `patches` were wrong before it."""
    s = await made(config(patches=patches))
    assert told(s) == sequences and s.status is Status.FINISHED
    assert (
        s.turn_rewards is not None
        and sum(len(q.turns()) for q in s.sequences) == len(s.turn_rewards) == turns
    )
    right = [i % 2 == 0 and i < 4 for i in range(turns)]
    assert [(m.reward, m.matched) for m in s.turn_rewards] == [(r / 5, r) for r in right]
    score = make_score(config())(with_turn_rewards(prompt(), s), response_of(""))
    assert score == pytest.approx(sum(right) / 5)


async def test_after_a_restart_at_any_token_the_same_trajectory_is_walked() -> None:
    reference = await made(config(patches=-1))
    for tokens in range(sum(q.sampled_tokens for q in reference.sequences)):
        s, model = fresh(), Model(at_once=tokens)
        with pytest.raises(asyncio.CancelledError):
            await made(config(patches=-1), model, s)
        assert sum(q.sampled_tokens for q in s.sequences) == tokens
        model.at_once = None
        again = await made(config(patches=-1), model, s)
        assert (told(again), again.turn_rewards, again.status) == (
            told(reference),
            reference.turn_rewards,
            reference.status,
        )


async def test_a_response_over_budget_is_truncated_and_keeps_its_turn_rewards() -> None:
    s = await made(config(budget=4))
    assert s.status is Status.TRUNCATED and s.turn_rewards is not None
    assert len(s.turn_rewards) == sum(len(q.turns()) for q in s.sequences)


async def test_a_user_function_may_score_the_match(tmp_path: Path) -> None:
    file = tmp_path / "match.py"
    file.write_text("def match(said, action):\n    return 1.0 if said == action else 0.5\n")
    s = await made(config(patches=-1, match=f"{file}:match"))
    assert [m.reward for m in s.turn_rewards or ()] == [0.2, 0.1, 0.2, 0.1, 0.1]
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(said, action):\n    return action['x']\n")
    with pytest.raises(TypeError, match="string indices"):  # the sample's boundary censors it
        await made(config(match=f"{broken}:broken"))


async def test_a_row_without_a_trajectory_is_rejected() -> None:
    for steps, words in (
        (None, "steps = None; expected a non-empty list of steps"),
        ([{"action": "a"}], "expected an object with the texts"),
    ):
        with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{words}"):
            await build_generator(config(), TOKENIZER, Model())(fresh(), prompt(steps))
