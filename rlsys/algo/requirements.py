"""Requirements of an algorithm on a train step. They follow from the plug-ins, so they are equal in every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlsys.algo.advantages import Advantage
from rlsys.algo.anchors import ANCHOR_NEEDS, CURRENT, MOVING, PASSES, AnyAnchor
from rlsys.algo.corrections import CorrectionPlugin
from rlsys.algo.hooks import Hook
from rlsys.algo.losses import Loss, UpdatePlugin
from rlsys.algo.plugin import Plugin
from rlsys.algo.reducers import Reducer
from rlsys.algo.registry import name_of
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Shaping


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Requirements of an objective on the trainer.

    Attributes:
        needs: Names of the required signals (rlsys.algo.plugin.NEEDS).
        passes: Required signals that forward passes of the trainer provide.
        scored: Members of `passes` whose fields of Batch must be set before `Objective.finish`; the field `current`
            must be set before `Objective.prepare`.
        current: Signals that one forward pass of the policy provides; excludes `values` if the critic is a separate
            model.
        late: Whether advantages depend on a member of `passes`.
        prepares: Whether a loss or a correction reads all tokens of an update before its backward pass
            (Objective.prepare).
        whole_samples: Whether a loss or a correction aggregates over all sequences of a sample. If a sample has
            several sequences, the trainer must then set `Batch.current` and call `Objective.prepare`.
        skips_zero: Whether samples with advantage 0 need not be packed, because they have no gradient and no plug-in
            reads their tokens.
        looks_ahead: For each plug-in that needs the current log-probs before the loss is called, a phrase with the
            reason. If there is none, the first update of a step needs no separate pass for `old`: it is the detached
            result of the training pass (`Batch.old_is_current`).
        needs_whole_step: Class names of the plug-ins that read all samples of a step before a backward pass. If there
            is none, the backward pass of finished groups can start before the step's other groups are complete.
    """

    needs: frozenset[str]
    passes: frozenset[str]
    scored: frozenset[str]
    current: frozenset[str]
    late: bool
    prepares: bool
    whole_samples: bool
    skips_zero: bool
    looks_ahead: tuple[str, ...]
    needs_whole_step: tuple[str, ...]

    @classmethod
    def of(
        cls,
        anchor: AnyAnchor,
        shaping: Sequence[Shaping],
        advantage: Advantage,
        selectors: Sequence[Selector],
        corrections: Sequence[CorrectionPlugin],
        losses: Sequence[Loss],
        reducer: Reducer,
        hooks: Sequence[Hook],
        correction_anchors: frozenset[AnyAnchor],
        *,
        own_critic: bool,
    ) -> Requirements:
        """Derive the requirements from the plug-ins of an objective.

        Args:
            anchor: anchor of the losses.
            shaping: reward shaping.
            advantage: advantage estimator.
            selectors: selectors of samples and tokens.
            corrections: corrections of the tokens' weights in the loss.
            losses: terms of the loss.
            reducer: aggregation of the tokens' losses.
            hooks: hooks around an optimizer update.
            correction_anchors: anchors of the corrections.
            own_critic: whether the critic is a separate model.
        """
        plugins: list[Plugin] = [
            *shaping, advantage, *selectors, *corrections, *losses, reducer, *hooks
        ]  # fmt: skip
        anchor_needs = _anchor_needs(anchor, losses, corrections, correction_anchors)
        needs = anchor_needs.union(*(p.needs() for p in plugins))
        passes = needs & PASSES
        current = frozenset(CURRENT - ({"values"} if own_critic else set()))
        has_late_advantages = any(p.needs() & PASSES for p in (*shaping, advantage))
        preparing = [p for p in (*losses, *corrections) if p.prepares]
        whole_step = _whole_step_plugins(shaping, advantage, [*selectors, *preparing, *hooks], reducer)
        return cls(
            needs=needs,
            passes=passes,
            scored=passes & anchor_needs.union(*(p.needs_before() for p in plugins)),
            current=current,
            late=has_late_advantages,
            prepares=bool(preparing),
            whole_samples=any(p.whole_samples for p in (*losses, *corrections)),
            skips_zero=_skips_zero(plugins, advantage, losses, has_late_advantages),
            looks_ahead=tuple(_look_ahead_reasons(plugins, current, anchor_needs)),
            needs_whole_step=tuple(name_of(p) for p in whole_step),
        )


def _anchor_needs(
    anchor: AnyAnchor,
    losses: Sequence[Loss],
    corrections: Sequence[CorrectionPlugin],
    correction_anchors: frozenset[AnyAnchor],
) -> frozenset[str]:
    """Return the signals that the anchors need.

    An anchor that depends on the current weights needs `current` if a plug-in reads it before the loss is called.

    Args:
        anchor: anchor of the losses.
        losses: terms of the loss.
        corrections: corrections of the tokens' weights in the loss.
        correction_anchors: anchors of the corrections.
    """
    needs_current_for_anchor = (anchor in MOVING and any(p.prepares for p in losses)) or (
        correction_anchors & MOVING and any(p.prepares for p in corrections)
    )
    return ANCHOR_NEEDS[anchor] | ({"current"} if needs_current_for_anchor else frozenset())


def _whole_step_plugins(
    shaping: Sequence[Shaping], advantage: Advantage, unconditional: Sequence[Plugin], reducer: Reducer
) -> list[Plugin]:
    """Return the plug-ins that read all samples of a step before a backward pass.

    Args:
        shaping: reward shaping; these plug-ins read a whole step if they need a forward pass of the trainer.
        advantage: advantage estimator.
        unconditional: plug-ins that always read a whole step.
        reducer: aggregation of the tokens' losses.
    """
    plugins: list[Plugin] = [*(p for p in shaping if p.needs() & PASSES), *unconditional]
    if not advantage.group_local or advantage.changes_tokens() or advantage.needs() & PASSES:
        plugins.insert(0, advantage)
    if not reducer.sample_local:
        plugins.append(reducer)
    return plugins


def _skips_zero(
    plugins: Sequence[Plugin], advantage: Advantage, losses: Sequence[Loss], has_late_advantages: bool
) -> bool:
    """Return whether samples with advantage 0 need not be packed.

    They need not if the advantage of each token is known before packing, all loss terms are proportional to it, and
    no plug-in reads these samples.

    Args:
        plugins: all plug-ins of the objective.
        advantage: advantage estimator.
        losses: terms of the loss.
        has_late_advantages: whether advantages depend on a forward pass of the trainer.
    """
    return (
        not has_late_advantages
        and not advantage.changes_tokens()
        and all(term.policy for term in losses)
        and not any(plugin.every_sample for plugin in plugins)
    )


def _look_ahead_reasons(
    plugins: Sequence[Plugin], current: frozenset[str], anchor_needs: frozenset[str]
) -> Iterator[str]:
    """Yield a phrase for each plug-in that needs signals in `current` before the loss is called."""
    for plugin in plugins:
        if signals := sorted(plugin.needs_before() & current):
            yield f"{name_of(plugin)} needs {' and '.join(signals)} before the loss"
        elif anchor_needs & current and isinstance(plugin, UpdatePlugin) and plugin.prepares:
            yield f"{name_of(plugin)} needs a whole update before its backward pass"
