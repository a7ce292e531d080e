"""Checks and warnings for settings of an algorithm that have no effect; a description of a step's forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from rlsys.algo.registry import name_of
from rlsys.algo.requirements import Requirements
from rlsys.config import Config
from rlsys.core.errors import UserError


def check(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that no loss term is without effect because its ratio is 1.

    Args:
        config: config of the run.
        plugins: plug-ins of the config by field of the section `algo`.

    Raises:
        UserError: a term has no effect.
    """
    if config.algo.anchor != "old" or config.algo.minibatches * config.algo.epochs > 1:
        return
    for i, term in enumerate(plugins["loss"]):
        if isinstance(term, M2PO | Bapo):
            raise UserError(
                f"algo.loss[{i}] ({name_of(term)}) bounds exp(logp - anchor), which is 1 for every "
                "token with algo.anchor = 'old' and algo.minibatches = 1: use algo.anchor = mu, behaviour or ewma, "
                "or more minibatches or epochs"
            )


def warnings(config: Config, plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a line for each setting that has no effect. Args: see `check`."""
    return [
        *_anchor_warnings(config, plugins["loss"]),
        *_replay_warnings(config),
        *_loss_warnings(plugins["loss"], plugins["corrections"]),
        *_advantage_warnings(plugins),
        *_correction_warnings(plugins["corrections"]),
        *_policy_loss_warnings(plugins),
        *_critic_warnings(config),
        *_exact_token_warnings(plugins["corrections"]),
    ]


def _anchor_warnings(config: Config, losses: Sequence[Loss]) -> Iterator[str]:
    """Yield a line for each loss term whose ratio is always 1, and for an anchor that no loss term uses."""
    algo = config.algo
    if algo.anchor == "old" and algo.minibatches * algo.epochs == 1:
        for i, term in enumerate(losses):
            if term.policy and _uses_anchor(term):
                yield (
                    f"algo.loss[{i}] ({name_of(term)}): with algo.anchor = 'old' and algo.minibatches = 1 its "
                    "ratio exp(logp - anchor) is 1 for every token, so bounds on it have no effect; use more "
                    "minibatches or epochs"
                )
    if algo.anchor != "mu" and not any(map(_uses_anchor, losses)):
        yield (
            f"algo.anchor = {algo.anchor!r} is unused: no term of algo.loss has a ratio, so corrections use "
            "exp(logp - mu)"
        )


def _uses_anchor(term: Loss) -> bool:
    """Return whether a loss term reads logp - anchor."""
    return term.ratio or term.reads_anchor


def _replay_warnings(config: Config) -> Iterator[str]:
    """Yield a line if the trainer's router replay has no effect."""
    if config.trainer.replay == "trainer" and config.algo.minibatches * config.algo.epochs == 1:
        yield (
            "trainer.replay = 'trainer' with algo.minibatches = 1: the scoring pass has no effect, because the "
            "training pass chooses the same experts; use engine, off or more minibatches"
        )


def _loss_warnings(losses: Sequence[Loss], corrections: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each loss term without a gradient, or whose weight a correction applies again."""
    weighting = [correction for correction in corrections if correction.weighs]
    for i, term in enumerate(losses):
        label = f"algo.loss[{i}] ({name_of(term)})"
        if isinstance(term, Kl) and term.kind == "k1" and term.gradient == "estimate":
            yield (
                f"{label}: the expected gradient of k1 is 0 for any weight; use gradient: ratio or k2, or another "
                "kind"
            )
        if isinstance(term, Vespo) and weighting:
            yield (
                f"{label}: its weight contains the whole ratio to mu, and algo.corrections ({_names(weighting)}) "
                "apply part of it again; use algo.anchor = mu and no correction"
            )
        widths = [getattr(term, name, None) for name in ("clip_low", "clip_high")]
        if widths == [0, 0]:
            yield (
                f"{label}: clip_low = clip_high = 0 remove the gradient of every token with a ratio other than 1; "
                "use larger values"
            )


def _advantage_warnings(plugins: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield a line for each reducer or selector that does not fit the advantage estimator."""
    (advantage,), (reducer,) = plugins["advantage"], plugins["reducer"]
    if isinstance(advantage, McGrpo) and reducer.over == "active":
        yield (
            "algo.reducer.over = 'active' compensates for the median sample's advantage of 0, which algo.advantage "
            "(mc_grpo) already does; use all"
        )
    for i, selector in enumerate(plugins["selectors"]):
        if isinstance(selector, D3S) and not advantage.of_samples:
            yield (
                f"algo.selectors[{i}] (d3s) selects samples by their advantages, but algo.advantage "
                f"({name_of(advantage)}) computes advantages of tokens only, so d3s uses the rewards"
            )


def _correction_warnings(corrections: Sequence[Any]) -> Iterator[str]:
    """Yield a line if several corrections multiply by the same factor."""
    weighting = [correction for correction in corrections if correction.weighs]
    if len(weighting) > 1:
        yield f"algo.corrections ({_names(weighting)}) multiply by exp(anchor - mu) more than once; name one"


def _policy_loss_warnings(plugins: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield a line for plug-ins that have an effect only on a policy loss, if there is none."""
    if any(term.policy for term in plugins["loss"]):
        return
    selecting = [
        plugin
        for plugin in (*plugins["planners"], *plugins["selectors"])
        if isinstance(plugin, Dapo | Dars | Xrpo | D3S | GrpoRoc | RoRecomp)
    ]
    if unused := [*selecting, *plugins["corrections"]]:
        yield (
            f"no term of algo.loss ({_names(plugins['loss'])}) trains on rewards, so {_names(unused)} has no effect; "
            "remove it"
        )


def _critic_warnings(config: Config) -> Iterator[str]:
    """Yield a line if the whole run only trains the critic."""
    critic = config.algo.critic
    if critic is not None and critic.warmup_steps >= config.trainer.steps:
        yield (
            f"algo.critic.warmup_steps = {critic.warmup_steps}: expected less than trainer.steps = "
            f"{config.trainer.steps}; otherwise the policy is not trained"
        )


def _names(plugins: Iterable[Any]) -> str:
    """Return the names of plug-ins, separated by commas."""
    return ", ".join(name_of(plugin) for plugin in plugins)


def _exact_token_warnings(corrections: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each correction that changes tokens whose anchor and mu differ by at most 1e-6."""
    mu = -torch.ones(6, dtype=torch.float64)
    anchor = mu + 1e-6 * torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0, 1.0])
    ones = torch.ones_like(mu)
    batch = Batch(
        tokens=torch.zeros(6, dtype=torch.long), cu_seqlens=torch.tensor([0, 1, 2, 3, 6]), rows=torch.arange(4),
        mask=ones, mu=mu, versions=torch.zeros(6, dtype=torch.long), advantages=ones, weight=ones,
        groups=torch.arange(4),
    )  # fmt: skip
    for i, correction in enumerate(corrections):
        update_stats = correction.prepare([batch], [anchor], single_rank) if correction.prepares else None
        weight, keep = correction(View(batch, anchor, anchor), update_stats)
        label = f"algo.corrections[{i}] ({name_of(correction)})"
        if not keep.all():
            yield f"{label} rejects tokens on which engine and trainer agree; widen its bounds"
        elif bool(((weight - 1).abs() > 1e-3).any()):
            yield (
                f"{label} multiplies tokens on which engine and trainer agree by {float(weight[0]):.3g}; expected 1"
            )


ZERO_OR_ONE = ("reasoning_gym", "exact_answer", "math", "regex", "json_schema")
"""Built-in rewards whose value is always 0 or 1."""


def reward_scale_notes(config: Config, plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a line for each plug-in that assumes a scale of the reward, if `data.reward` may return any number.

    Such plug-ins distinguish successes from failures, or expect rewards of at least 0.
    """
    reward = config.data.reward
    if len(reward) == 1 and reward[0].weight == 1 and reward[0].name in ZERO_OR_ONE:
        return []
    messages = []
    for field, field_plugins in plugins.items():
        for i, plugin in enumerate(field_plugins):
            label = f"algo.{field}[{i}] ({name_of(plugin)})"
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
    """Return a phrase for each forward pass of a train step other than the training passes."""
    requirements = Objective(config.algo).requirements
    passes = [*_policy_passes(config, requirements), *_other_passes(config, requirements)]
    return passes or ["none"]


def _policy_passes(config: Config, requirements: Requirements) -> Iterator[str]:
    """Yield a phrase for each scoring pass of the policy."""
    if "behaviour" in requirements.passes:
        yield "the interrupted tokens, before the weights that sampled them change"
    if config.trainer.replay == "trainer":
        yield "the whole step, since trainer.replay = trainer replays its experts"
    elif requirements.scored & requirements.current:
        yield _scoring_pass(config, requirements.looks_ahead)
    updates = config.algo.minibatches * config.algo.epochs
    if "current" in requirements.passes and updates > 1:
        yield f"each of {updates - 1} mini-batches once more, just before its update"


def _scoring_pass(config: Config, reasons: Sequence[str]) -> str:
    """Return the part of a step that the scoring pass before the first update covers.

    Args:
        config: config of the run.
        reasons: why plug-ins need log-probs before the loss is called; empty if none does.
    """
    count = config.algo.minibatches
    if reasons:
        return f"the whole step, since {'; '.join(reasons)}"
    if config.algo.epochs > 1:
        return f"the whole step, since its samples are repeated in each of {config.algo.epochs} epochs"
    if count > 1:
        return f"the step's {count} mini-batches except the first, whose training pass provides `old`"
    return "none for `old`, which the training pass provides"


def _other_passes(config: Config, requirements: Requirements) -> Iterator[str]:
    """Yield a phrase for each pass of weights other than the policy's."""
    if "ref" in requirements.passes:
        yield "the whole step with the reference's weights"
    if "ewma" in requirements.passes:
        yield "the whole step with the averaged weights"
    if "divergence" not in requirements.passes:
        return
    teacher = config.algo.teacher
    if teacher is not None and teacher.engine is not None:
        yield "none of the teacher: an engine scores each response"
        return
    teachers = len(set(teacher.folders.values())) if teacher is not None else 1
    yield f"the whole step with {f'each of {teachers} teachers' if teachers > 1 else 'the teacher'}"
