"""Which settings would change nothing, and which log-prob passes a step makes. Told before the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.algo.losses import Loss
from rlsys.algo.methods.bapo import Bapo
from rlsys.algo.methods.m2po import M2PO
from rlsys.algo.methods.maxrl import MaxRL
from rlsys.algo.objective import Objective
from rlsys.config import Config
from rlsys.core.errors import UserError


def check(config: Config, made: Mapping[str, Sequence[Any]]) -> None:
    """Raises UserError where a plug-in's whole purpose is lost."""
    if config.algo.anchor != "old" or config.algo.minibatches * config.algo.epochs > 1:
        return
    for i, term in enumerate(made["loss"]):
        if isinstance(term, M2PO | Bapo):
            raise UserError(
                f"algo.loss[{i}] ({type(term).__name__}) makes bounds for exp(logp - anchor), which is 1 for every "
                "token with algo.anchor = 'old' and algo.minibatches = 1: use algo.anchor = mu, behaviour or ewma, "
                "or more minibatches or epochs"
            )


def _anchored(term: Loss) -> bool:
    return term.ratio or term.reads_anchor


def lines(config: Config, made: Mapping[str, Sequence[Any]]) -> list[str]:
    """What acts, but not in every part; one line each."""
    algo, found = config.algo, []
    with_ratio = [(i, term) for i, term in enumerate(made["loss"]) if term.policy and _anchored(term)]
    if algo.anchor == "old" and algo.minibatches * algo.epochs == 1:
        found += [
            f"algo.loss[{i}] ({type(term).__name__}): with algo.anchor = 'old' and algo.minibatches = 1 its ratio "
            "exp(logp - anchor) is 1 for every token, so that no bound on it acts; it does with more minibatches or "
            "epochs"
            for i, term in with_ratio
        ]
    if algo.anchor != "mu" and not any(map(_anchored, made["loss"])):
        found.append(
            f"algo.anchor = {algo.anchor!r} is not looked at: no term of algo.loss has a ratio, and corrections take "
            "exp(logp - mu) then"
        )
    if config.trainer.replay == "trainer" and algo.minibatches * algo.epochs == 1:
        found.append(
            "trainer.replay = 'trainer' with algo.minibatches = 1: the same weights choose the same experts twice, "
            "and the scoring pass buys nothing; use engine, off or more minibatches"
        )
    return found


ZERO_OR_ONE = ("reasoning_gym", "exact_answer", "math", "regex", "json_schema")
"""Built-in rewards that give nothing else."""


def of_other_rewards(config: Config, made: Mapping[str, Sequence[Any]]) -> list[str]:
    """Plug-ins that tell successes from failures, or want no negative reward, beside a reward that may be any number;
    one line each."""
    reward = config.data.reward
    if len(reward) == 1 and reward[0].weight == 1 and reward[0].name in ZERO_OR_ONE:
        return []
    found = []
    for field, plugins in made.items():
        for i, plugin in enumerate(plugins):
            what = f"algo.{field}[{i}] ({type(plugin).__name__})"
            if isinstance(correct := getattr(plugin, "correct", None), float):
                found.append(
                    f"{what} counts a reward above its parameter correct = {correct:g} as a success; see that this "
                    f"fits data.reward = {config.data.reward_name}"
                )
            if isinstance(plugin, MaxRL):
                found.append(
                    f"{what} wants rewards from 0 up: a group whose mean is not above 0 teaches nothing"
                )
    return found


def describe_passes(config: Config) -> list[str]:
    """The forward passes of a train step beside those of training; `none` for none."""
    objective, count = Objective(config.algo), config.algo.minibatches
    updates = count * config.algo.epochs
    found = []
    if "behaviour" in objective.asks.passes:
        found.append("what was interrupted, before the weights change that sampled it")
    if config.trainer.replay == "trainer":
        found.append("the whole step, since trainer.replay = trainer replays its experts")
    elif objective.asks.scored & objective.asks.current and (why := objective.asks.looks_ahead):
        found.append(f"the whole step, since {'; '.join(why)}")
    elif objective.asks.scored & objective.asks.current and config.algo.epochs > 1:
        found.append(f"the whole step, since its samples come again in each of {config.algo.epochs} epochs")
    elif objective.asks.scored & objective.asks.current and count > 1:
        found.append(
            f"of a step's {count} mini-batches all but the first, whose `old` is its training pass's own"
        )
    elif objective.asks.scored & objective.asks.current:
        found.append("none for `old`: it is the training pass's own")
    if "now" in objective.asks.passes and updates > 1:
        found.append(f"each of {updates - 1} mini-batches once more, just before its update")
    found += [
        f"the whole step with {weights}"
        for name, weights in (("ref", "the reference's weights"), ("ewma", "the averaged weights"))
        if name in objective.asks.passes
    ]
    if "divergence" in objective.asks.passes:
        teacher = config.algo.teacher
        teachers = len(set(teacher.folders.values())) if teacher is not None else 1
        if teacher is not None and teacher.engine is not None:
            found.append("none of the teacher: an engine is asked about each response")
        else:
            found.append(
                f"the whole step with {f'each of {teachers} teachers' if teachers > 1 else 'the teacher'}"
            )
    return found or ["none"]
