"""Parse the values of reward functions into RewardResult, and join several results into one.

value                                         result
number                                        the reward
{name: number, ...}                           the reward is the sum of the named parts
{"score": number, name: number, ...}          the reward, and metrics (verl's format)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.core.texts import valid_text
from rlsys.core.types import LARGEST_REWARD, is_reward

SCORE, RIGHT = "score", "acc"
"""Keys of verl's dictionaries: the reward itself, and whether the answer is correct."""
TURNS = "turn_rewards"
"""Key, in a dictionary with SCORE, of a list with the reward of each turn of the model."""


LONGEST_NAME, MOST_PARTS = 200, 1000
"""Largest length of a part's name in characters, and largest number of parts. Parts are stored with every sample."""


class InvalidReward(ValueError):
    """Raised for a value of a reward function that is not a finite number, or a dictionary without one."""


@dataclass(frozen=True)
class RewardResult:
    """Result of a reward function.

    Attributes:
        reward: the reward.
        parts: the named summands of the reward; None: the function returned no parts.
        right: whether an evaluation counts the response as correct; None: it does if the first part is 1 or more.
        metrics: additional values of the function, which are recorded and not trained.
        turns: the reward of each turn of the model; None: the function returned none.
    """

    reward: float
    parts: dict[str, float] | None = None
    right: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[float] | None = None


def parse_reward(value: Any, name: str = "reward") -> RewardResult:
    """Parse the value of a reward function.

    The key `acc` says whether the response is correct. Without it, the response is correct if the score, or the first
    of the named parts, is 1 or more.

    Args:
        value: value of the function.
        name: name of the function, for errors.

    Raises:
        InvalidReward: a required number is missing or not finite, or a name is invalid.
    """
    if isinstance(value, RewardResult):
        return value
    if not isinstance(value, dict):
        reward = _number(value, value, name)
        return RewardResult(reward, right=reward >= 1)
    if SCORE in value:
        reward = _number(value[SCORE], value, name)
        right = value.get(RIGHT)
        metrics = _with_text_keys(
            {k: float(v) for k, v in value.items() if k != SCORE and is_reward(v)}, name
        )
        turns = None if TURNS not in value else _turns(value[TURNS], value, name)
        return RewardResult(
            reward, right=reward >= 1 if right is None else bool(right), metrics=metrics, turns=turns
        )
    parts = _with_text_keys({k: _number(v, value, name) for k, v in value.items()}, name)
    if not parts:
        raise InvalidReward(f"{name} returned {{}}; expected a number, or a dictionary of numbers")
    return RewardResult(_number(sum(parts.values()), value, name), parts)


def _with_text_keys(values: dict[Any, float], name: str) -> dict[str, float]:
    """Return the values with keys converted to text.

    Raises:
        InvalidReward: there are too many keys, a key is too long, or two keys have the same text.
    """
    if len(values) > MOST_PARTS:
        raise InvalidReward(f"{name} returned {len(values)} parts; expected at most {MOST_PARTS}")
    parts = {valid_text(str(k)): v for k, v in values.items()}
    if len(parts) < len(values):
        raise InvalidReward(
            f"{name} returned {len(values)} keys with {len(parts)} different texts; expected a different text per key"
        )
    if (longest := max(map(len, parts), default=0)) > LONGEST_NAME:
        raise InvalidReward(f"{name} returned a key of {longest} characters; expected at most {LONGEST_NAME}")
    return parts


def _turns(value: Any, result: Any, name: str) -> list[float]:
    """Parse the rewards of turns. `result`, `name`: whole value and name of the function, for errors."""
    try:
        return [_number(v, result, name) for v in value]
    except TypeError:
        raise InvalidReward(f"{name} returned {TURNS} = {value!r:.200}; expected a list of numbers") from None


def join_rewards(
    names: Sequence[str], weights: Sequence[float], results: Sequence[RewardResult | None]
) -> RewardResult:
    """Join several rewards into one, whose parts are the weighted rewards. The first reward decides correctness.

    Args:
        names: names of the rewards.
        weights: weights of the rewards.
        results: the rewards; None: a reward does not apply to this sample, and adds nothing.

    Raises:
        InvalidReward: no reward applies.
    """
    if all(result is None for result in results):
        raise InvalidReward(f"{', '.join(names)} returned None; expected at least one reward for a sample")
    if len(results) == 1 and weights[0] == 1 and results[0] is not None:
        return results[0]
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, weight, result in zip(names, weights, results, strict=True):
        if result is None or result.parts is None:
            parts[name] = 0.0 if result is None else weight * result.reward
        else:
            parts |= {f"{name}.{part}": weight * value for part, value in result.parts.items()}
        metrics |= {} if result is None else {f"{name}.{key}": value for key, value in result.metrics.items()}
    turns = next((m.turns for m in results if m is not None and m.turns is not None), None)
    reward = _number(sum(parts.values()), parts, "the sum of data.reward")
    return RewardResult(reward, parts, right=_is_right(results[0]), metrics=metrics, turns=turns)


def _is_right(result: RewardResult | None) -> bool:
    """Return whether a result counts the response as correct."""
    if result is None or result.right is not None:
        return result is not None and bool(result.right)
    return result.parts is not None and next(iter(result.parts.values())) >= 1


def _number(value: Any, result: Any, name: str) -> float:
    """Convert a number, which may be of numpy or torch, to float. `result`, `name`: for errors, as in `_turns`.

    Raises:
        InvalidReward: the value is not a finite number, or too large.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidReward(f"{name} returned {result!r:.200}; expected a finite number") from None
    if isinstance(value, str | bytes) or not math.isfinite(number):
        raise InvalidReward(f"{name} returned {result!r:.200}; expected a finite number")
    if not is_reward(number):
        raise InvalidReward(
            f"{name} returned {result!r:.200}; expected numbers from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        )
    return number
