"""What an algorithm needs from a train step. Known before the first step, and the same in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.algo.advantages import Advantage
from rlsys.algo.anchors import ANCHOR_NEEDS, CURRENT, MOVING, PASSES, AnyAnchor
from rlsys.algo.corrections import CorrectionPlugin
from rlsys.algo.hooks import Hook
from rlsys.algo.losses import Loss, Preparing
from rlsys.algo.plugin import Plugin
from rlsys.algo.reducers import Reducer
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Shaping


@dataclass(frozen=True, kw_only=True)
class Asks:
    """needs: signals (rlsys.algo.plugin.NEEDS). passes: those of them that the trainer's forward passes give.

    scored: of the passes, fields of Batch that must be filled before `Objective.finish` ("now": before `prepare`).
    current: what one forward pass of the policy gives: no values, where the critic is a model of its own.
    late: advantages wait for a log-prob pass.
    prepares: a loss or a correction looks at all tokens of an update before its backward pass (Objective.prepare).
    whole_samples: a loss or a correction takes something over all sequences of a sample; where one has several, `now`
    and Objective.prepare are needed.
    skips_zero: samples of advantage 0 need not be packed: they have no gradient, and nothing looks at them.
    looks_ahead: who wants the current log-probs before the loss is called, a phrase each. If nobody does, the first
    update of a step needs no pass of its own for `old`: it is what the training pass gives, detached
    (`Batch.old_is_current`).
    needs_whole_step: class names of the plug-ins that look at all samples of a step before one goes backward. If
    there is none, finished groups may go backward early: only the denominator needs the rest, and it divides at the
    end.
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
    ) -> Asks:
        preparing = [p for p in (*losses, *corrections) if p.prepares]
        plugins: list[Plugin] = [
            *shaping, advantage, *selectors, *corrections, *losses, reducer, *hooks
        ]  # fmt: skip
        moving = (anchor in MOVING and any(p.prepares for p in losses)) or (
            correction_anchors & MOVING and any(p.prepares for p in corrections)
        )
        of_anchor = ANCHOR_NEEDS[anchor] | ({"now"} if moving else frozenset())
        needs = of_anchor.union(*(p.needs() for p in plugins))
        passes, current = needs & PASSES, CURRENT - ({"values"} if own_critic else set())
        late = any(p.needs() & PASSES for p in (*shaping, advantage))

        looks_ahead = []
        for plugin in plugins:
            if asked := sorted(plugin.needs_before() & current):
                looks_ahead.append(f"{type(plugin).__name__} needs {' and '.join(asked)} before the loss")
            elif of_anchor & current and isinstance(plugin, Preparing) and plugin.prepares:
                looks_ahead.append(
                    f"{type(plugin).__name__} looks at a whole update before its backward pass"
                )

        whole: list[Plugin] = [p for p in shaping if p.needs() & PASSES]
        whole += [*selectors, *preparing, *hooks]
        if not advantage.group_local or advantage.changes_tokens() or advantage.needs() & PASSES:
            whole.insert(0, advantage)
        if not reducer.sample_local:
            whole.append(reducer)
        only_advantages = all(term.policy and not term.every_sample for term in losses)
        return cls(
            needs=needs,
            passes=passes,
            scored=passes & of_anchor.union(*(p.needs_before() for p in plugins)),
            current=frozenset(current),
            late=late,
            prepares=bool(preparing),
            whole_samples=any(p.whole_samples for p in (*losses, *corrections)),
            skips_zero=not late
            and not advantage.changes_tokens()
            and only_advantages
            and not any(plugin.every_sample for plugin in plugins),
            looks_ahead=tuple(looks_ahead),
            needs_whole_step=tuple(type(p).__name__ for p in whole),
        )
