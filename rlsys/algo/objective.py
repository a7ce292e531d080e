"""Objective of a run: its plug-ins, in the order in which they act.

    plan      selectors before advantages -> shaping -> advantages -> selectors         (sample table)
    (the trainer packs the planned rows and runs the passes of `requirements.passes` over the whole step)
    finish    table columns from the passes -> late advantages -> advantages and weights of tokens   (all parts)
    prepare   bounds and normalisers from all tokens of one optimizer update           (parts of the update)
    __call__  corrections and loss terms of one micro-batch -> sum of the loss, sums for metrics
    (the update divides by `plan.denominator / minibatches`; `lr_factor` scales its learning rate)

If advantages depend on rewards alone, `plan` computes them, so that samples without a gradient are not packed;
otherwise `finish` does. Sequences are not divided, and the result does not depend on their assignment to
micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage
from rlsys.algo.anchors import AnyAnchor
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.corrections import Correction, CorrectionPlugin
from rlsys.algo.draws import sample_draws, sample_keys
from rlsys.algo.figures import mismatch_sums
from rlsys.algo.hooks import Hook
from rlsys.algo.kl import KL_KINDS, kl_estimate
from rlsys.algo.losses import Figures, Loss, Sums, UpdatePlugin, View
from rlsys.algo.methods.deferred_samples import DeferredSamples
from rlsys.algo.methods.optimal_token_baseline import score_norm
from rlsys.algo.plugin import Plugin
from rlsys.algo.reducers import Reducer, Reduction
from rlsys.algo.reduction import Reduce, single_rank, table_sum
from rlsys.algo.registry import make_all, name_of
from rlsys.algo.requirements import Requirements
from rlsys.algo.segments import group_index
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Shaping
from rlsys.config.algo import AlgoSection, CriticSection
from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup

Parameters = Callable[[], Iterable[tuple[str, Tensor]]]
"""Function that returns this rank's parameters with their names, for hooks."""
DeferredSample = tuple[SampleGroup, float]
"""A deferred sample, in a group of its own, and its advantage."""
DEFERRED_KEY = "replay"
"""Key of the deferred samples in the objective's state; existing checkpoints use this word."""


@dataclass
class StepPlan:
    """Trained samples of one step. Rows are indices into the sample table.

    Attributes:
        samples: The sample table, with the column `eligible`.
        weight: Weight of each sample from the selectors, `[N]`; 0 if it is dropped.
        rows: Rows to pack.
        deferred: Rows that a selector deferred.
        updates: Number of optimizer updates over which `rows` are distributed.
        trained: Members of `rows` that have a gradient; empty before the advantages are set.
        advantages: Advantage of each sample, `[N]`; None before Objective.finish if they need a log-prob pass.
        reduction: Factors and denominator of the loss; None as for `advantages`.
    """

    samples: Samples
    weight: Tensor
    rows: list[int]
    deferred: list[int]
    updates: int = 1
    trained: tuple[int, ...] = ()
    advantages: Tensor | None = None
    reduction: Reduction | None = None

    @property
    def eligible(self) -> Tensor:
        """Mask of the samples that no selector with `before_advantages` dropped, `[N]` bool."""
        return self.samples.column("eligible")

    @property
    def denominator(self) -> float:
        """Divisor of the step's loss sum.

        Raises:
            ValueError: the advantages, which determine it, are not set.
        """
        if self.reduction is None:
            raise ValueError("StepPlan.denominator is not set; expected a call of Objective.finish first")
        return self.reduction.denominator


class Objective:
    """The trainer's plug-ins, and their statistics of the current optimizer update (`prepare`)."""

    def __init__(self, section: AlgoSection) -> None:
        plugins = make_all(section)
        self.shaping: list[Shaping] = plugins["shaping"]
        self.advantage: Advantage = plugins["advantage"][0]
        self.selectors: list[Selector] = plugins["selectors"]
        self.corrections: list[CorrectionPlugin] = plugins["corrections"]
        self.losses: list[Loss] = plugins["loss"]
        self.reducer: Reducer = plugins["reducer"][0]
        self.hooks: list[Hook] = plugins["hooks"]
        anchored = any(term.ratio or term.reads_anchor for term in self.losses)
        self.anchor: AnyAnchor = section.anchor if anchored else "current"
        ratios = frozenset[bool]().union(*(term.ratios() for term in self.losses))
        self._correction_anchors: dict[bool, AnyAnchor] = {
            ratio: self.anchor if ratio else "current" for ratio in sorted(ratios if self.corrections else ())
        }
        self.critic: CriticSection | None = section.critic
        self.requirements = Requirements.of(
            self.anchor, self.shaping, self.advantage, self.selectors, self.corrections, self.losses, self.reducer,
            self.hooks, frozenset(self._correction_anchors.values()), own_critic=section.critic is not None,
        )  # fmt: skip
        self.plugins: list[Plugin] = [
            *self.shaping, self.advantage, *self.selectors,
            *self.corrections, *self.losses, self.reducer, *self.hooks,
        ]  # fmt: skip
        self._observing = [p for p in self.plugins if p.observes]
        self._columns = frozenset[str]().union(*(p.needs() for p in self.plugins))
        self._minibatches = section.minibatches
        self._update_stats: dict[tuple[int, AnyAnchor], Any] = {}
        self._totals: dict[int, Tensor] = {}  # id of a loss -> View.totals

        deferring = [s for s in self.selectors if s.defers]
        if self.advantage.of_turns and (conflicts := [*self.shaping, *deferring]):
            raise UserError(
                f"algo.advantage = {name_of(self.advantage)} uses the rewards of turns, which "
                f"{name_of(conflicts[0])} does not support; remove one of them"
            )
        self._deferred: DeferredSamples[DeferredSample] | None = deferring[0].store() if deferring else None

    # -- one train step -----------------------------------------------------------------------------------------

    def plan(self, samples: Samples) -> StepPlan:
        """Return the plan of a step. Every rank has the same sample table, and thus the same plan."""
        eligible = torch.ones(len(samples.rewards), dtype=torch.bool, device=samples.rewards.device)
        for selector in (s for s in self.selectors if s.before_advantages):
            eligible[eligible.clone()] = selector(samples.take(eligible), None) > 0
        plan = StepPlan(replace(samples, eligible=eligible), eligible.float(), [], [])
        if not self.requirements.late:
            self._score(plan)
        trained = plan.weight != 0
        if plan.advantages is not None and self.requirements.skips_zero:
            trained = trained & (plan.advantages != 0)
        plan.rows = trained.nonzero().flatten().tolist()
        self._set_trained(plan)
        plan.updates = max(1, min(self._minibatches, len(plan.rows)))
        return plan

    def defer(
        self,
        plan: StepPlan,
        groups: Sequence[SampleGroup],
        step: int,
        load: Callable[[Sample], Sample] = lambda sample: sample,
    ) -> list[DeferredSample]:
        """Store the samples that a selector deferred in this step; return the samples for an extra update now.

        Call it after `finish`, if `finish` is called.

        Args:
            plan: the plan of the step.
            groups: the groups of the step.
            step: number of the train step.
            load: returns a sample with its tokens in memory; the rollout process may delete them from disk before the
                extra update.
        """
        if self._deferred is None:
            return []
        samples = [(g, s) for g in groups for s in g.samples]
        # The store drops its oldest samples, so their order must not depend on when groups finished.
        draws = sample_draws(plan.samples)
        for row in sorted(plan.deferred, key=draws.__getitem__):
            assert plan.advantages is not None
            group, sample = samples[row]
            self._deferred.add(step, [(replace(group, samples=[load(sample)]), float(plan.advantages[row]))])
        return self._deferred.take(step)

    def plan_deferred(self, samples: Samples, advantages: Tensor) -> StepPlan:
        """Return the plan of an extra update on deferred samples.

        Args:
            samples: table of the deferred samples, `[N]`.
            advantages: advantages that the samples had in their own groups, `[N]`.
        """
        all_rows = torch.ones(len(samples), dtype=torch.bool)
        reduction = self.reducer(samples.lengths, advantages != 0)
        table = replace(samples, eligible=all_rows)
        rows = list(range(len(samples)))
        plan = StepPlan(table, all_rows.float(), rows, [], advantages=advantages, reduction=reduction)
        self._set_trained(plan)
        return plan

    def _set_trained(self, plan: StepPlan) -> None:
        """Set `plan.trained`, if the advantages are known."""
        if plan.advantages is None:
            return
        has_gradient = self._acts_on(plan.advantages, plan.samples.reward) | self.advantage.changes_tokens()
        is_trained = (has_gradient & (plan.weight != 0).to(has_gradient.device)).tolist()
        plan.trained = tuple(r for r in plan.rows if is_trained[r])

    def _acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return the mask of the samples or tokens that can have a gradient of a term, `[N]` or `[T]` bool."""
        return torch.stack([term.acts_on(advantages, rewards) for term in self.losses]).any(0)

    def trains(self, parts: Sequence[Batch], reduce: Reduce = single_rank) -> bool:
        """Return whether any token of an update, on any rank, can have a gradient. Call it after `finish`.

        The trainer must skip an update without such a token, because the optimizer's momentum alone would change the
        weights. If clips and corrections remove all gradients, the sum `effective` of `__call__` is 0.

        Args:
            parts: micro-batches of the update on this rank.
            reduce: sum over ranks.
        """
        counts = []
        for part in parts:
            has_gradient = self._acts_on(part.signal("advantages"), part.signal("rewards"))
            counts.append((part.counted_tokens & has_gradient).double().sum())
        return bool(reduce(torch.stack(counts).sum()))

    def _score(self, plan: StepPlan) -> None:
        """Set the plan's advantages, then its weights from the selectors, then its reduction."""
        samples = plan.samples
        for shape in self.shaping:
            samples = replace(samples, rewards=shape(samples))
        eligible = plan.eligible
        advantages = torch.zeros_like(samples.reward)
        advantages[eligible] = self.advantage(samples.take(eligible))
        factor, denominator = self.reducer(samples.lengths[eligible], (advantages != 0)[eligible])
        factors = torch.zeros(len(samples.rewards), device=factor.device).masked_scatter(
            eligible.to(factor.device), factor
        )
        mass = self.reducer.mass(samples.lengths, advantages != 0).to(factors) * eligible.to(factors)
        plan.advantages = advantages
        denominator = self._select(plan, samples, advantages, mass, denominator)
        plan.reduction = Reduction(factors, denominator or 1.0)  # 0 if nothing is selected

    def _select(
        self, plan: StepPlan, samples: Samples, advantages: Tensor, mass: Tensor, denominator: float
    ) -> float:
        """Multiply the plan's weights by those of the selectors, and add the rows that selectors defer.

        Args:
            plan: the plan.
            samples: the sample table with shaped rewards.
            advantages: advantages of the samples, `[N]`.
            mass: contribution of each sample to the denominator, `[N]`.
            denominator: denominator before the selection.

        Returns:
            The denominator after the selection.
        """
        for selector in (s for s in self.selectors if not s.before_advantages):
            present = plan.weight != 0
            weight = torch.zeros_like(plan.weight)
            if present.any():
                weights = selector(samples.take(present), advantages[present])
                weight[present] = weights.to(weight)
            share = selector.denominator_share(weight, mass, samples.step)
            denominator *= share
            if share != 1:  # the loss is a mean over the selected samples, which the next share refers to
                mass = mass * (weight != 0).to(mass)
            if selector.defers:
                deferred = present & (weight == 0) & (advantages != 0)
                plan.deferred += deferred.nonzero().flatten().tolist()
            plan.weight = plan.weight * weight
        return denominator

    def finish(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce = single_rank) -> None:
        """Set the fields of the step's batches that the loss reads, after the log-prob passes.

        Args:
            plan: the plan of the step; its late advantages are set.
            parts: this rank's packed batches, at least one. Each sequence of the planned rows is on exactly one rank.
            reduce: sum over ranks.
        """
        self._update_stats, self._totals = {}, {}
        plan.samples = self._with_columns(plan.samples, parts, reduce)
        if plan.advantages is None:
            self._score(plan)
        assert plan.advantages is not None and plan.reduction is not None
        self._set_trained(plan)
        plan.samples = replace(plan.samples, selected=plan.weight != 0)
        denominator = plan.denominator / plan.updates
        groups, keys = group_index(plan.samples.group_ids)[0], sample_keys(plan.samples)
        for part in parts:
            part.rewards, part.groups = part.expand(plan.samples.reward), groups
            part.sample_lengths, part.sample_keys = plan.samples.lengths, keys
            part.denominator = denominator
            part.weight = part.masked(part.expand(plan.weight * plan.reduction.factor.to(plan.weight.device)))
            shifts = [s for c in self.corrections if (s := c.shift(part, plan.samples)) is not None]
            part.shift = part.masked(torch.stack(shifts).sum(0)) if shifts else None
        self._set_token_advantages(plan, parts, reduce)
        has_token_weights = [self._weight_tokens(s, plan, parts, reduce) for s in self.selectors]
        # Statistics of token advantages are over the counted tokens, which token weights may have changed.
        if any(has_token_weights) and self.advantage.changes_tokens():
            self._set_token_advantages(plan, parts, reduce)

    def _set_token_advantages(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> None:
        """Set the advantages of the tokens of all batches."""
        assert plan.advantages is not None
        tokens = self.advantage.per_token(plan.advantages, plan.samples, parts, reduce)
        for part, advantages in zip(parts, tokens, strict=True):
            part.advantages = advantages

    @staticmethod
    def _weight_tokens(selector: Selector, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> bool:
        """Multiply the weights of tokens by those of a selector; return whether the selector has token weights."""
        weights = selector.per_token(parts, plan.samples, reduce)
        for part, weight in zip(parts, weights or [], strict=weights is not None):
            part.weight = part.signal("weight") * weight
        return weights is not None

    def _with_columns(self, samples: Samples, parts: Sequence[Batch], reduce: Reduce) -> Samples:
        """Return the table with the required columns that are sums over the tokens of the passes."""
        rows = [part.rows for part in parts]
        columns: dict[str, Any] = {}

        def column(values: Iterable[Tensor]) -> Tensor:
            """Sum `values`, `[T]` for each part, over the tokens of each sample, `[N]`."""
            sums = [part.per_sequence(v) for part, v in zip(parts, values, strict=True)]
            return table_sum(sums, rows, len(samples), reduce).to(samples.rewards.device)

        signals = self._columns
        if "old" in signals:
            columns["log_weight"] = column(part.signal("old") - part.mu for part in parts)
        if "sum_pi_squared" in signals:
            columns["score_norm"] = column(score_norm(part) for part in parts)
        if {"old", "ref"} <= signals:
            kinds = [
                column(kl_estimate(part.signal("old"), part.signal("ref"), kind) for part in parts)
                for kind in KL_KINDS
            ]
            columns["kl"] = torch.stack(kinds, 1)
        return replace(samples, **columns)

    def prepare(
        self, parts: Sequence[Batch], reduce: Reduce = single_rank, *, split_samples: bool = False
    ) -> None:
        """Compute the plug-ins' statistics of an optimizer update. Call it before the update's first `__call__`.

        The call is required if `requirements.prepares` or `split_samples`.

        Args:
            parts: micro-batches of the update on this rank.
            reduce: sum over ranks.
            split_samples: whether `requirements.whole_samples` holds and a sample has several sequences. The field
                `current` of all parts must then be set.
        """
        self._update_stats, self._totals = {}, {}
        current_logps = [part.mu if part.current is None else part.current for part in parts]
        anchored_plugins: list[tuple[AnyAnchor, Sequence[UpdatePlugin]]] = [(self.anchor, self.losses)]
        anchored_plugins += [(anchor, self.corrections) for anchor in self._correction_anchors.values()]
        for anchor, plugins in anchored_plugins:
            anchors = [
                self.anchor_of(part, logp, anchor) for part, logp in zip(parts, current_logps, strict=True)
            ]
            for plugin in plugins:
                aggregates = split_samples and plugin.whole_samples
                if aggregates and isinstance(plugin, Loss):
                    self._totals[id(plugin)] = _sample_totals(plugin, parts, anchors, reduce)
                if plugin.prepares or (aggregates and not isinstance(plugin, Loss)):
                    self._update_stats[id(plugin), anchor] = plugin.prepare(parts, anchors, reduce)

    def anchor_of(self, batch: Batch, logp: Tensor, name: AnyAnchor | None = None) -> Tensor:
        """Return the log-probs of an anchor, `[T]`, detached, plus the batch's shift; undefined where masked.

        Args:
            batch: a packed batch.
            logp: log-probs of the current weights, `[T]`.
            name: the anchor; None for `algo.anchor`.
        """
        current, name = logp.detach(), name or self.anchor
        if name == "current":
            anchor = current
        elif name == "ewma":
            anchor = batch.signal("ewma")
        elif name in ("old", "behaviour"):
            anchor = current if batch.old_is_current else batch.signal("old")
            if name == "behaviour":
                behaviour = batch.signal("behaviour")
                anchor = torch.where(behaviour.isnan(), anchor, behaviour)
        elif name == "interpolated":
            age = (batch.version - batch.versions).clamp(min=1).to(batch.mu.dtype)
            anchor = batch.mu + (age - 1) / age * (
                current - batch.mu
            )  # see `algo.anchor` (rlsys/config/algo.py)
        else:
            anchor = batch.mu
        return anchor if batch.shift is None else anchor + batch.shift

    def __call__(
        self,
        logp: Tensor,
        batch: Batch,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> tuple[Tensor, Sums]:
        """Return the loss of one micro-batch, as a sum over tokens, and sums for metrics.

        Args:
            logp: log-probs of the current weights, `[T]`, with gradient.
            batch: the micro-batch.
            entropy: entropy of the policy, `[T]`, with gradient; None if no loss term and no metric reads it.
            values: outputs of the value head on the policy's trunk, `[T]`, with gradient; None if no term reads them.
            divergence: divergence from the teacher, `[T]`, with gradient; None if no term reads it.

        Returns:
            The loss, a scalar with gradient, and sums by metric name, detached.

        Raises:
            ValueError: `logp` has another shape than the batch's tokens.
        """
        if logp.shape != batch.mask.shape:
            raise ValueError(
                f"logp has shape {tuple(logp.shape)}; expected {tuple(batch.mask.shape)}, that of the batch's tokens"
            )
        anchor = batch.masked(self.anchor_of(batch, logp))
        view = View(batch, batch.masked(logp), anchor, entropy, values, divergence)
        token_weight = batch.signal("weight")
        advantages, rewards = batch.signal("advantages"), batch.signal("rewards")
        no_correction = Correction(torch.ones_like(view.anchor), view.keep)
        corrected = {
            ratio: self._corrected(view, anchor_name)
            for ratio, anchor_name in self._correction_anchors.items()
        }
        total = logp.new_zeros(())
        clipped = torch.zeros_like(view.keep)
        effective = torch.zeros_like(view.keep)
        corrections: list[Correction] = []
        figures: Figures = {"tokens": torch.ones_like(view.anchor)}
        for term in self.losses:
            if term.critic and self.critic is not None:
                continue
            totals = self._totals.get(id(term))
            term_view = view if totals is None else replace(view, totals=totals)
            loss, term_figures = term(term_view, self._update_stats.get((id(term), self.anchor)))
            weight, keep = (
                _select_correction(term.has_ratio(view), corrected)
                if corrected and term.policy
                else no_correction
            )
            corrections += [Correction(weight, keep)] if term.policy else []
            scale = token_weight * weight * keep
            total = total + batch.masked(torch.where(scale != 0, loss * scale, torch.zeros_like(loss))).sum()
            clips = keep & term_figures.pop("clipped", torch.zeros_like(keep))
            clipped = clipped | clips
            effective = effective | ((scale != 0) & ~clips & term.acts_on(advantages, rewards))
            figures |= term_figures
        corrections = corrections or [no_correction]
        return total, self._metric_sums(view, figures, corrections, clipped, effective)

    def _metric_sums(
        self, view: View, figures: Figures, corrections: list[Correction], clipped: Tensor, effective: Tensor
    ) -> Sums:
        """Return the sums for the metrics of a micro-batch.

        Args:
            view: the micro-batch under the current policy.
            figures: metrics of each token, `[T]`, by name.
            corrections: corrections of the policy losses, at least one.
            clipped: whether a term clips the token, `[T]` bool.
            effective: whether a term gives the token a gradient, `[T]` bool.
        """
        batch = view.batch
        weight = corrections[0].weight
        figures = {
            **figures,
            "weight": weight,
            "entropy": torch.zeros_like(weight) if view.entropy is None else view.entropy,
        }
        if self.anchor == "behaviour":
            is_missing = batch.signal("behaviour").isnan() & (batch.versions != batch.version)
            figures["anchor_missing"] = is_missing.to(weight)
        is_counted = batch.counted_tokens
        zeros = torch.zeros_like(weight)
        sums = {name: torch.where(is_counted, v.detach(), zeros).sum() for name, v in figures.items()}
        rejected = view.keep & ~torch.stack([c.keep for c in corrections]).any(0)
        sums["active"] = batch.active.sum()
        sums["active_lost"] = (batch.active & (clipped | rejected)).sum()
        sums["effective"] = effective.sum()
        return sums | mismatch_sums(view.logp, batch, clipped, rejected)

    def _corrected(self, view: View, name: AnyAnchor) -> Correction:
        """Return the combination of all corrections, where rho is relative to the anchor `name`."""
        anchor = view.anchor if name == self.anchor else self.anchor_of(view.batch, view.logp, name)
        corrected_view = View(view.batch, view.logp, view.batch.masked(anchor))
        weight, keep = torch.ones_like(view.anchor), view.keep
        for correction in self.corrections:
            factor, accepted = correction(corrected_view, self._update_stats.get((id(correction), name)))
            weight, keep = weight * factor.detach(), keep & accepted
        return Correction(weight, keep)

    def critic_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the loss of a separate critic, as a sum over tokens, and sums for metrics.

        Args:
            values: outputs of the critic, `[T]`, with gradient.
            batch: the micro-batch.
        """
        zeros = torch.zeros_like(values)
        view = View(batch, zeros, zeros, values=values)
        weight, is_counted = batch.signal("weight"), batch.counted_tokens
        total = values.new_zeros(())
        sums = {"tokens": is_counted.to(values).sum()}
        for term in (t for t in self.losses if t.critic):
            loss, term_figures = term(view, self._update_stats.get((id(term), self.anchor)))
            total = total + batch.masked(torch.where(weight != 0, loss * weight, zeros)).sum()
            sums |= {
                name: torch.where(is_counted, v.detach(), zeros).sum() for name, v in term_figures.items()
            }
        return total, sums

    # -- around the optimizer -----------------------------------------------------------------------------------

    def lr_factor(self, plan: StepPlan, rows: Sequence[int]) -> float:
        """Return the factor of the learning rate of an update that trains these rows: the product over the hooks."""
        size = float(plan.eligible.sum()) / plan.updates
        rows = [row for row in rows if plan.weight[row] != 0]
        return math.prod(hook.lr_factor(plan.samples, rows, size) for hook in self.hooks)

    def start(self, parameters: Parameters) -> None:
        """Call `start` of the hooks, before the first pass of a train step."""
        for hook in self.hooks:
            hook.start(list(parameters()))

    def after_step(self, parameters: Parameters, metrics: dict[str, float]) -> None:
        """Call `after_step` of the hooks and `observe` of the plug-ins, after an optimizer update.

        Args:
            parameters: this rank's parameters.
            metrics: metrics of the update.
        """
        for hook in self.hooks:
            hook.after_step(list(parameters()), metrics["active_share"])
        for plugin in self._observing:
            plugin.observe(metrics)

    def after_version(self, parameters: Parameters, active_share: float) -> None:
        """Call `after_version` of the hooks, after the last update of a train step."""
        for hook in self.hooks:
            hook.after_version(list(parameters()), active_share)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the plug-ins by index and class name, for the checkpoint."""
        states = {key: state for key, plugin in self._keyed_plugins() if (state := plugin.state_dict())}
        if self._deferred is not None:
            states[DEFERRED_KEY] = self._deferred.state_dict(_encode_deferred)
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of a checkpoint. A plug-in without an entry keeps its initial state."""
        for key, plugin in self._keyed_plugins():
            if key in state:
                plugin.load_state_dict(state[key])
        if self._deferred is not None and DEFERRED_KEY in state:
            self._deferred.load_state_dict(state[DEFERRED_KEY], _decode_deferred)

    def average(self) -> dict[str, Tensor]:
        """Return this rank's averaged weights by name, for `anchor: ewma`; empty without such a hook."""
        return {name: t for hook in self.hooks for name, t in hook.average().items()}

    def reference(self) -> dict[str, Tensor]:
        """Return this rank's weights of the reference model by name; empty if no hook updates them."""
        return {name: t for hook in self.hooks for name, t in hook.reference().items()}

    def average_totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the hooks' state tensors, one for each parameter, by prefix of the hook and name of the parameter.

        The checkpoint stores them in the same layout as the weights.
        """
        named_parameters = list(parameters)
        return {hook.prefix: totals for hook in self.hooks if (totals := hook.totals(named_parameters))}

    def load_average_totals(self, totals: dict[str, dict[str, Tensor]]) -> None:
        """Restore the `average_totals` of a checkpoint."""
        for hook in self.hooks:
            hook.load_totals(totals.get(hook.prefix, {}))

    def _keyed_plugins(self) -> list[tuple[str, Plugin]]:
        """Return the plug-ins with their keys in the state."""
        return [(f"{i}.{type(plugin).__name__}", plugin) for i, plugin in enumerate(self.plugins)]


def _select_correction(ratio: Tensor, by_ratio: Mapping[bool, Correction]) -> Correction:
    """Return for each token the correction of tokens with a ratio or of those without.

    Args:
        ratio: whether the token's loss has a ratio, `[T]` bool.
        by_ratio: the two corrections, or the only one that occurs.
    """
    if len(by_ratio) == 1:
        return next(iter(by_ratio.values()))
    weight = torch.where(ratio, by_ratio[True].weight, by_ratio[False].weight)
    return Correction(weight, torch.where(ratio, by_ratio[True].keep, by_ratio[False].keep))


def _sample_totals(loss: Loss, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Tensor:
    """Return the sum of the loss's `sample_values` over all sequences of each sample, `[N]`."""
    views = [View(p, p.masked(p.signal("current")), a) for p, a in zip(parts, anchors, strict=True)]
    sums = [view.batch.per_sequence(loss.sample_values(view)) for view in views]
    groups = parts[0].groups
    assert groups is not None, "finish sets it"
    return table_sum(sums, [p.rows for p in parts], len(groups), reduce)


def _encode_deferred(item: DeferredSample) -> Any:
    """Convert a deferred sample to JSON values; arrays become lists."""
    return msgspec.to_builtins(item, enc_hook=lambda values: values.tolist())


def _decode_deferred(item: Any) -> DeferredSample:
    """Convert JSON values to a deferred sample: a list of integers becomes token ids, any other log-probs."""
    return msgspec.convert(
        item, DeferredSample, dec_hook=lambda _, v: token_ids(v) if isinstance(v[0], int) else log_probs(v)
    )
