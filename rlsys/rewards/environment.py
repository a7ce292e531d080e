"""The rewards `environment` and `agent`: the reward that the run's environment or agent reports.

reward         config                                          value
agent          rollout.generator: agent                        the reward that the agent reported
environment    rollout.generator: environment or replayed      the sum of the turn rewards
environment    data.source: environment                        the rubric of the verifiers environment
"""

from __future__ import annotations

import math
from typing import Any

from rlsys.config import Config
from rlsys.config.data import RewardSpec
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.environment import load_environment
from rlsys.rewards.results import SCORE, TURNS
from rlsys.rewards.signatures import Score, adapt, is_async


def agent(config: Config) -> Score:
    """Score a response with the reward that the agent reported.

    Raises:
        UserError: the run has no agents.
    """
    if config.rollout.generator != "agent":
        raise UserError(
            f"data.reward = 'agent' with rollout.generator = {config.rollout.generator!r}: expected "
            "rollout.generator = 'agent'"
        )
    return lambda prompt, text: math.fsum(prompt.entry[TURNS])


def environment(config: Config) -> Score:
    """Score a response with the sum of its turn rewards, or with the weighted sum of the rubric's functions.

    The value of each function of a rubric is also recorded as a metric.

    Raises:
        UserError: the run has no environment, or the environment has no rubric with functions.
    """
    if config.rollout.generator in ("environment", "replayed"):
        return lambda prompt, text: math.fsum(prompt.entry[TURNS])
    if config.data.source != "environment":
        raise UserError(
            f"data.reward = 'environment' with rollout.generator = {config.rollout.generator!r} and data.source = "
            f"{config.data.source!r}: expected rollout.generator = environment or replayed, or data.source = "
            "environment"
        )
    return _rubric_score(config, load_environment(config.data.params))


def _rubric_score(config: Config, verifiers_environment: Any) -> Score:
    """Return the weighted sum of the functions of a verifiers environment's rubric, with the values as metrics.

    Raises:
        UserError: the environment has no rubric with functions.
    """
    rubric = getattr(verifiers_environment, "rubric", None)
    functions = _first(rubric, "funcs", "reward_funcs")
    weights = _first(rubric, "weights", "reward_weights") or [1.0] * len(functions)
    if not functions:
        raise UserError(
            f"data.reward = 'environment': {type(verifiers_environment).__name__} has no rubric with functions; "
            "expected one with at least one reward function"
        )
    parser = getattr(rubric, "parser", None) or getattr(verifiers_environment, "parser", None)
    names = [getattr(f, "__name__", f"function_{i}") for i, f in enumerate(functions)]
    scores = [
        adapt("data.reward", f, RewardSpec(name=name, signature="verifiers"), config, parser=parser)
        for f, name in zip(functions, names, strict=True)
    ]

    def total(values: list[Any]) -> dict[str, float]:
        parts = dict(zip(names, map(float, values), strict=True))
        return {SCORE: sum(w * v for w, v in zip(weights, parts.values(), strict=True)), **parts}

    if not any(map(is_async, scores)):
        return lambda prompt, response: total([score(prompt, response) for score in scores])

    async def async_score(prompt: Prompt, response: Response) -> dict[str, float]:
        values = [score(prompt, response) for score in scores]
        return total([await v if is_async(s) else v for s, v in zip(scores, values, strict=True)])

    return async_score


def _first(rubric: Any, *names: str) -> list[Any]:
    """Return the first non-empty attribute of a rubric among `names`; empty if there is none.

    The name of an attribute depends on the version of verifiers.
    """
    return next((list(functions) for name in names if (functions := getattr(rubric, name, None))), [])
