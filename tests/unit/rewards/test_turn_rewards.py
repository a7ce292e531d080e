"""Rewards of turns from a reward function: through the scorer into the sample, or its reason."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from rlsys.core.types import Prompt
from rlsys.rewards.results import InvalidReward, RewardResult, join_rewards, parse_reward
from rlsys.worker.scoring import Scorer
from tests.helpers.responses import sample_of

PROMPT = Prompt(0, "", [1], {})


def test_turn_rewards_are_parsed_from_a_list_beside_the_score() -> None:
    mark = parse_reward({"score": 1, "turn_rewards": [0.25, 0.75], "length": 3})
    assert (mark.reward, mark.turns, mark.metrics) == (1.0, [0.25, 0.75], {"length": 3.0})
    assert parse_reward({"score": 1}).turns is None
    with pytest.raises(InvalidReward, match="expected a finite number"):
        parse_reward({"score": 1, "turn_rewards": [0.25, "much"]})


def test_joined_rewards_take_turn_rewards_from_the_first_that_has_them() -> None:
    joined = join_rewards(["a", "b"], [1, 0.5], [RewardResult(1.0), RewardResult(2.0, turns=[1.0, 1.0])])
    assert (joined.reward, joined.turns) == (2.0, [1.0, 1.0])


async def test_the_scorer_hands_them_on() -> None:
    async def reward(prompt: Prompt, text: str) -> RewardResult:
        return parse_reward({"score": len(text), "turn_rewards": [1, 2]})

    scorer = Scorer(lambda: nullcontext(reward), lambda ids: "x" * len(ids), 5.0)
    verdict = await scorer.score(PROMPT, sample_of([5, 6, 7]))
    assert (verdict.reward, verdict.turns, verdict.reason) == (3.0, [1.0, 2.0], None)
