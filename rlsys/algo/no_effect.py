"""Checks for settings of an algorithm without an effect, and a description of a step's log-prob passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rlsys.algo.batch import Batch
from rlsys.algo.kl import Kl
from rlsys.algo.losses import Loss, View
from rlsys.algo.methods.bapo import Bapo
from rlsys.algo.methods.d3s import D3S
from rlsys.algo.methods.dapo import Dapo
from rlsys.algo.methods.dars import Dars
from rlsys.algo.methods.grpo_roc import GrpoRoc
from rlsys.algo.methods.m2po import M2PO
from rlsys.algo.methods.maxrl import MaxRL
from rlsys.algo.methods.mc_grpo import McGrpo
from rlsys.algo.methods.rorecomp import RoRecomp
from rlsys.algo.methods.vespo import Vespo
from rlsys.algo.methods.xrpo_groups import Xrpo
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from rlsys.config import Config
from rlsys.core.errors import UserError


def check(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that every loss term has an effect.

    Raises:
        UserError: a term has none.
    """
    if config.algo.anchor != "old" or config.algo.minibatches * config.algo.epochs > 1:
        return
    for i, term in enumerate(plugins["loss"]):
        if isinstance(term, M2PO | Bapo):
            raise UserError(
                f"algo.loss[{i}] ({type(term).__name__}) bounds exp(logp - anchor), which is 1 for every "
                "token with algo.anchor = 'old' and algo.minibatches = 1: use algo.anchor = mu, behaviour or ewma, "
                "or more minibatches or epochs"
            )


def _anchored(term: Loss) -> bool:
    return term.ratio or term.reads_anchor


def lines(config: Config, plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return descriptions of settings that have no effect, one line each."""
    algo, messages = config.algo, []
    with_ratio = [(i, term) for i, term in enumerate(plugins["loss"]) if term.policy and _anchored(term)]
    if algo.anchor == "old" and algo.minibatches * algo.epochs == 1:
        messages += [
            f"algo.loss[{i}] ({type(term).__name__}): with algo.anchor = 'old' and algo.minibatches = 1 its ratio "
            "exp(logp - anchor) is 1 for every token, so bounds on it have no effect; use more minibatches or epochs"
            for i, term in with_ratio
        ]
    if algo.anchor != "mu" and not any(map(_anchored, plugins["loss"])):
        messages.append(
            f"algo.anchor = {algo.anchor!r} is unused: no term of algo.loss has a ratio, and corrections then use "
            "exp(logp - mu)"
        )
    if config.trainer.replay == "trainer" and algo.minibatches * algo.epochs == 1:
        messages.append(
            "trainer.replay = 'trainer' with algo.minibatches = 1: the scoring pass has no effect, because the "
            "training pass chooses the same experts; use engine, off or more minibatches"
        )
    return messages + _contradictions(config, plugins) + _exact_tokens(plugins)


def _contradictions(config: Config, plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return descriptions of combinations of plug-ins that are valid individually but have no effect together."""
    algo, (advantage,), (reducer,) = config.algo, plugins["advantage"], plugins["reducer"]
    messages = []
    for i, term in enumerate(plugins["loss"]):
        if isinstance(term, Kl) and term.kind == "k1" and term.gradient == "estimate":
            messages.append(
                f"algo.loss[{i}] ({type(term).__name__}): the expected gradient of k1 is 0 for any weight; "
                "use gradient: ratio or k2, or another kind"
            )
        if isinstance(term, Vespo) and (names := _names(c for c in plugins["corrections"] if c.weighs)):
            messages.append(
                f"algo.loss[{i}] (Vespo): its weight contains the whole ratio to mu, and algo.corrections "
                f"({names}) apply part of it again; use algo.anchor = mu and no correction"
            )
        widths = [getattr(term, name, None) for name in ("clip_low", "clip_high")]
        if widths == [0, 0]:
            messages.append(
                f"algo.loss[{i}] ({type(term).__name__}): clip_low = clip_high = 0 remove the gradient of every "
                "token with a ratio other than 1; use larger values"
            )
    if isinstance(advantage, McGrpo) and reducer.over == "active":
        messages.append(
            "algo.reducer.over = 'active' compensates for the median sample's advantage of 0, which algo.advantage "
            "(McGrpo) already does; use all"
        )
    for i, selector in enumerate(plugins["selectors"]):
        if isinstance(selector, D3S) and not advantage.of_samples:
            messages.append(
                f"algo.selectors[{i}] (D3S) selects samples by their advantages, but algo.advantage "
                f"({type(advantage).__name__}) computes advantages of tokens only, so it uses the rewards"
            )
    if len(twice := [c for c in plugins["corrections"] if c.weighs]) > 1:
        messages.append(
            f"algo.corrections ({_names(twice)}) multiply by exp(anchor - mu) more than once; name one"
        )
    if not any(term.policy for term in plugins["loss"]):
        choosing = [
            p
            for p in (*plugins["planners"], *plugins["selectors"])
            if isinstance(p, Dapo | Dars | Xrpo | D3S | GrpoRoc | RoRecomp)
        ]
        names = _names([*choosing, *plugins["corrections"]])
        if names:
            messages.append(
                f"no term of algo.loss ({_names(plugins['loss'])}) trains on rewards, so {names} has no effect; "
                "remove it"
            )
    if algo.critic is not None and algo.critic.warmup_steps >= config.trainer.steps:
        messages.append(
            f"algo.critic.warmup_steps = {algo.critic.warmup_steps}: expected less than trainer.steps = "
            f"{config.trainer.steps}; otherwise the policy is not trained"
        )
    return messages


def _names(plugins: Iterable[Any]) -> str:
    return ", ".join(type(plugin).__name__ for plugin in plugins)


def _exact_tokens(plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return descriptions of corrections that change tokens on which engine and trainer agree to 1e-6."""
    messages = []
    mu = -torch.ones(6, dtype=torch.float64)
    anchor = mu + 1e-6 * torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0, 1.0])
    ones = torch.ones_like(mu)
    batch = Batch(
        tokens=torch.zeros(6, dtype=torch.long), cu_seqlens=torch.tensor([0, 1, 2, 3, 6]), rows=torch.arange(4),
        mask=ones, mu=mu, versions=torch.zeros(6, dtype=torch.long), advantages=ones, weight=ones,
        groups=torch.arange(4),
    )  # fmt: skip
    for i, correction in enumerate(plugins["corrections"]):
        update_stats = correction.prepare([batch], [anchor], single_rank) if correction.prepares else None
        weight, keep = correction(View(batch, anchor, anchor), update_stats)
        field = f"algo.corrections[{i}] ({type(correction).__name__})"
        if not keep.all():
            messages.append(f"{field} rejects tokens on which engine and trainer agree; widen its bounds")
        elif bool(((weight - 1).abs() > 1e-3).any()):
            messages.append(
                f"{field} multiplies tokens on which engine and trainer agree by {float(weight[0]):.3g}; expected 1"
            )
    return messages


ZERO_OR_ONE = ("reasoning_gym", "exact_answer", "math", "regex", "json_schema")
"""Built-in rewards that are always 0 or 1."""


def reward_scale_notes(config: Config, plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return notes on plug-ins that assume a scale of the reward, if the reward may be any number; one line each.

    Such plug-ins distinguish successes from failures, or expect no negative rewards.
    """
    reward = config.data.reward
    if len(reward) == 1 and reward[0].weight == 1 and reward[0].name in ZERO_OR_ONE:
        return []
    messages = []
    for field, field_plugins in plugins.items():
        for i, plugin in enumerate(field_plugins):
            label = f"algo.{field}[{i}] ({type(plugin).__name__})"
            if isinstance(correct := getattr(plugin, "correct", None), float):
                messages.append(
                    f"{label} counts a reward above its parameter correct = {correct:g} as a success; check that "
                    f"this fits data.reward = {config.data.reward_name}"
                )
            if isinstance(plugin, MaxRL):
                messages.append(
                    f"{label} expects rewards of at least 0: a group whose mean is not above 0 has no gradient"
                )
    return messages


def describe_passes(config: Config) -> list[str]:
    """Return a description of the forward passes of a train step in addition to those of training."""
    objective, count = Objective(config.algo), config.algo.minibatches
    updates = count * config.algo.epochs
    passes = []
    if "behaviour" in objective.requirements.passes:
        passes.append("the interrupted tokens, before the weights that sampled them change")
    if config.trainer.replay == "trainer":
        passes.append("the whole step, since trainer.replay = trainer replays its experts")
    elif objective.requirements.scored & objective.requirements.current and (
        reasons := objective.requirements.looks_ahead
    ):
        passes.append(f"the whole step, since {'; '.join(reasons)}")
    elif objective.requirements.scored & objective.requirements.current and config.algo.epochs > 1:
        passes.append(
            f"the whole step, since its samples are repeated in each of {config.algo.epochs} epochs"
        )
    elif objective.requirements.scored & objective.requirements.current and count > 1:
        passes.append(
            f"of a step's {count} mini-batches all but the first, whose `old` is its training pass's own"
        )
    elif objective.requirements.scored & objective.requirements.current:
        passes.append("none for `old`: it is the training pass's own")
    if "current" in objective.requirements.passes and updates > 1:
        passes.append(f"each of {updates - 1} mini-batches once more, just before its update")
    passes += [
        f"the whole step with {weights}"
        for name, weights in (("ref", "the reference's weights"), ("ewma", "the averaged weights"))
        if name in objective.requirements.passes
    ]
    if "divergence" in objective.requirements.passes:
        teacher = config.algo.teacher
        teachers = len(set(teacher.folders.values())) if teacher is not None else 1
        if teacher is not None and teacher.engine is not None:
            passes.append("none of the teacher: an engine scores each response")
        else:
            passes.append(
                f"the whole step with {f'each of {teachers} teachers' if teachers > 1 else 'the teacher'}"
            )
    return passes or ["none"]
