"""What reward functions give, read as one mark: a number, named parts, or a score with figures beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.core.texts import valid_text
from rlsys.core.types import LARGEST_REWARD, is_reward

SCORE, RIGHT = "score", "acc"
"""Keys of verl's dictionaries: the reward itself, and whether the answer is right."""
TURNS = "turn_rewards"
"""Key of a list beside the score: what each turn of the model is worth."""


LONGEST_NAME, MOST_PARTS = 200, 1000
"""Characters of a part's name, and parts: each is a metric, and is written down with every sample."""


class NoMark(ValueError):
    """A reward function gave no finite number."""


@dataclass(frozen=True)
class Mark:
    """`parts`: what the reward is the sum of, where it is named. `right`: whether an evaluation counts the response
    as right; None: when the first part is 1 or more. `figures`: what the function says beside the reward; written
    down, never trained on."""

    reward: float
    parts: dict[str, float] | None = None
    right: bool | None = None
    figures: dict[str, float] = field(default_factory=dict)
    turns: list[float] | None = None
    """What each turn of the model is worth, where the function says it."""


def read_mark(value: Any, name: str = "reward") -> Mark:
    """Of the function `name`. A score of 1 or more is right, of named parts the first; `acc` says it otherwise.

    Raises NoMark for what is no finite number, or has none.
    """
    if isinstance(value, Mark):
        return value
    if not isinstance(value, dict):
        reward = _number(value, value, name)
        return Mark(reward, right=reward >= 1)
    if SCORE in value:
        reward = _number(value[SCORE], value, name)
        right = value.get(RIGHT)
        figures = _with_text_keys(
            {k: float(v) for k, v in value.items() if k != SCORE and is_reward(v)}, name
        )
        turns = None if TURNS not in value else _turns(value[TURNS], value, name)
        return Mark(reward, right=reward >= 1 if right is None else bool(right), figures=figures, turns=turns)
    parts = _with_text_keys({k: _number(v, value, name) for k, v in value.items()}, name)
    if not parts:
        raise NoMark(f"{name} gave {{}}, expected a number, or a dictionary of numbers")
    return Mark(_number(sum(parts.values()), value, name), parts)


def _with_text_keys(values: dict[Any, float], name: str) -> dict[str, float]:
    """Return the values with texts as keys.

    Raises:
        NoMark: too many, too long, or two that are the same text.
    """
    if len(values) > MOST_PARTS:
        raise NoMark(f"{name} gave {len(values)} parts, expected at most {MOST_PARTS}")
    parts = {valid_text(str(k)): v for k, v in values.items()}
    if len(parts) < len(values):
        raise NoMark(f"{name} gave two keys that are the same text, of {', '.join(parts)[:200]}")
    if (longest := max(map(len, parts), default=0)) > LONGEST_NAME:
        raise NoMark(f"{name} gave a key of {longest} characters, expected at most {LONGEST_NAME}")
    return parts


def _turns(value: Any, whole: Any, name: str) -> list[float]:
    try:
        return [_number(v, whole, name) for v in value]
    except TypeError:
        raise NoMark(f"{name} gave {whole!r:.200}, expected a list as {TURNS}") from None


def join_marks(names: Sequence[str], weights: Sequence[float], marks: Sequence[Mark | None]) -> Mark:
    """Several rewards as one: a part for each, times its weight. The first says what is right.

    None: that reward does not apply to this sample, and adds nothing. Raises NoMark when none applies.
    """
    if all(mark is None for mark in marks):
        raise NoMark(f"{', '.join(names)} gave None: no reward for this sample")
    if len(marks) == 1 and weights[0] == 1 and marks[0] is not None:
        return marks[0]
    parts: dict[str, float] = {}
    figures: dict[str, float] = {}
    for name, weight, mark in zip(names, weights, marks, strict=True):
        if mark is None or mark.parts is None:
            parts[name] = 0.0 if mark is None else weight * mark.reward
        else:
            parts |= {f"{name}.{part}": weight * value for part, value in mark.parts.items()}
        figures |= {} if mark is None else {f"{name}.{key}": value for key, value in mark.figures.items()}
    turns = next((m.turns for m in marks if m is not None and m.turns is not None), None)
    reward = _number(sum(parts.values()), parts, "the sum of data.reward")
    return Mark(reward, parts, right=_is_right(marks[0]), figures=figures, turns=turns)


def _is_right(mark: Mark | None) -> bool:
    if mark is None or mark.right is not None:
        return mark is not None and bool(mark.right)
    return mark.parts is not None and next(iter(mark.parts.values())) >= 1


def _number(value: Any, whole: Any, name: str) -> float:
    """Also numpy's and torch's numbers."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise NoMark(f"{name} gave {whole!r:.200}, expected a finite number") from None
    if isinstance(value, str | bytes) or not math.isfinite(number):
        raise NoMark(f"{name} gave {whole!r:.200}, expected a finite number")
    if not is_reward(number):
        raise NoMark(f"{name} gave {whole!r:.200}, expected numbers of at most {LARGEST_REWARD:g}")
    return number
