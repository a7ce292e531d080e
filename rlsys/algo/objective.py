"""Objective of a run: its plug-ins, in the order in which they act.

    plan      shaping -> selectors before advantages -> advantages -> selectors -> token weights  (sample table)
    (pack the planned rows; run the log-prob passes of `requirements.passes`, over the whole step)
    finish    table columns from the passes -> late advantages -> advantages and weights of tokens   (all parts)
    prepare   bounds and normalisers from all tokens of one optimizer update                         (its parts)
    __call__  corrections x loss terms of one packed micro-batch -> loss sum, sums for metrics
    (the update divides by `plan.denominator / minibatches`; `lr_factor` scales its learning rate)

Advantages that follow from rewards alone are known in `plan`, so that samples without a gradient are not packed;
`late` ones wait for the passes. Sequences stay whole; the result does not depend on their assignment to micro-batches
and ranks.
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
from rlsys.algo.asks import Requirements
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
from rlsys.algo.registry import make_all
from rlsys.algo.segments import group_index
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Shaping
from rlsys.config.algo import AlgoSection, CriticSection
from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup

Parameters = Callable[[], Iterable[tuple[str, Tensor]]]
"""Iterates over this rank's parameters by name, for hooks."""
DeferredSample = tuple[SampleGroup, float]
"""One deferred sample, as a group of one, and its advantage."""
DEFERRED_KEY = "replay"
"""Key of the deferred samples in the objective's state; existing checkpoints use this word."""


@dataclass
class StepPlan:
    """Trained samples of one step. Rows index `samples`; Objective.finish sets the optional fields."""

    samples: Samples  # with the column `eligible`
    weight: Tensor  # [N]
    rows: list[int]  # to be packed
    deferred: list[int]  # deferred by a selector
    updates: int = 1  # optimizer updates that share the rows
    trained: tuple[int, ...] = ()  # those of `rows` that have a gradient; known once the advantages are
    advantages: Tensor | None = None  # [N]
    reduction: Reduction | None = None

    @property
    def eligible(self) -> Tensor:
        """Mask of the samples that no selector with `before_advantages` dropped, `[N]` bool."""
        return self.samples.column("eligible")

    @property
    def denominator(self) -> float:
        """Divisor of the step's loss sum.

        Raises:
            ValueError: it is not known before Objective.finish.
        """
        if self.reduction is None:
            raise ValueError("the denominator is known after Objective.finish")
        return self.reduction.denominator


class Objective:
    """Owner of the trainer's plug-ins and, between `prepare` and the end of an update, of their update statistics."""

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
        self._totals: dict[int, Tensor] = {}  # of losses, over samples of several sequences

        deferring = [s for s in self.selectors if s.defers]
        if self.advantage.of_turns and (conflicts := [*self.shaping, *deferring]):
            raise UserError(
                f"algo.advantage = {type(self.advantage).__name__} uses the rewards of turns, which "
                f"{type(conflicts[0]).__name__} does not support; remove one of them"
            )
        self._deferred: DeferredSamples[DeferredSample] | None = deferring[0].store() if deferring else None

    # -- one train step -----------------------------------------------------------------------------------------

    def plan(self, samples: Samples) -> StepPlan:
        """Return the plan of a step: the rows to pack. It is equal on every rank, because the table is."""
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
        """Store the samples that a selector deferred, with their tokens, and return those due for an extra update.

        Call it after `finish`, if `finish` is called.

        Args:
            plan: the plan of the step.
            groups: the groups of the step.
            step: number of the train step.
            load: loads the tokens of a sample into memory, because the rollout process deletes them earlier.
        """
        if self._deferred is None:
            return []
        samples = [(g, s) for g in groups for s in g.samples]
        draws = sample_draws(
            plan.samples
        )  # the oldest may expire: the order must not depend on when groups finished
        for row in sorted(plan.deferred, key=draws.__getitem__):
            assert plan.advantages is not None
            group, sample = samples[row]
            self._deferred.add(step, [(replace(group, samples=[load(sample)]), float(plan.advantages[row]))])
        return self._deferred.take(step)

    def plan_deferred(self, samples: Samples, advantages: Tensor) -> StepPlan:
        """Plan all of these samples, with the advantages that they had in their own groups."""
        all_rows = torch.ones(len(samples), dtype=torch.bool)
        reduction = self.reducer(samples.lengths, advantages != 0)
        table = replace(samples, eligible=all_rows)
        rows = list(range(len(samples)))
        plan = StepPlan(table, all_rows.float(), rows, [], advantages=advantages, reduction=reduction)
        self._set_trained(plan)
        return plan

    def _set_trained(self, plan: StepPlan) -> None:
        """Set the rows that have a gradient, as far as weights and advantages of samples determine it."""
        if plan.advantages is None:
            return
        acts = self._acts_on(plan.advantages, plan.samples.reward) | self.advantage.changes_tokens()
        trained = (acts & (plan.weight != 0).to(acts.device)).tolist()
        plan.trained = tuple(r for r in plan.rows if trained[r])

    def _acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return the samples `[N]` or tokens `[T]` at which some term has a gradient, bool."""
        return torch.stack([term.acts_on(advantages, rewards) for term in self.losses]).any(0)

    def trains(self, parts: Sequence[Batch], reduce: Reduce = single_rank) -> bool:
        """Return whether any token of an update, over all ranks, can have a gradient. Call it after `finish`.

        An update without such a token must be skipped: the optimizer's momentum alone would move the weights. Clips
        and corrections in the loss may still remove all gradients; the loss's sum `effective` is then 0.
        """
        acting = [self._acts_on(part.signal("advantages"), part.signal("rewards")) for part in parts]
        counts = [
            (part.counted_tokens & acts).double().sum() for part, acts in zip(parts, acting, strict=True)
        ]
        return bool(reduce(torch.stack(counts).sum()))

    def _score(self, plan: StepPlan) -> None:
        """Set the advantages of eligible samples, then the weights of selectors, then the denominator."""
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
        for selector in (s for s in self.selectors if not s.before_advantages):
            present, weight = plan.weight != 0, torch.zeros_like(plan.weight)
            if present.any():
                weights = selector(samples.take(present), advantages[present])
                weight[present] = weights.to(weight)
            share = selector.denominator_share(weight, mass, samples.step)
            denominator *= share
            if share != 1:  # a mean over the selected samples: the next selector's share refers to them
                mass = mass * (weight != 0).to(mass)
            if selector.defers:
                deferred = (plan.weight != 0) & (weight == 0) & (advantages != 0)
                plan.deferred += deferred.nonzero().flatten().tolist()
            plan.weight = plan.weight * weight
        plan.reduction = Reduction(factors, denominator or 1.0)  # 0 if nothing is selected

    def finish(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce = single_rank) -> None:
        """Set advantages and weights of the tokens of all parts of the step, after the log-prob passes.

        `parts`, at least one, are this rank's packed sequences, each of the planned rows on exactly one rank.
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
        self._spread(plan, parts, reduce)
        weighted = [self._weight_tokens(s, plan, parts, reduce) for s in self.selectors]
        if any(weighted) and self.advantage.changes_tokens():  # a mean over tokens, whose number has changed
            self._spread(plan, parts, reduce)

    def _spread(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> None:
        """Set the advantages of tokens."""
        assert plan.advantages is not None
        tokens = self.advantage.per_token(plan.advantages, plan.samples, parts, reduce)
        for part, advantages in zip(parts, tokens, strict=True):
            part.advantages = advantages

    @staticmethod
    def _weight_tokens(selector: Selector, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> bool:
        """Apply a selector's token weights; return whether it has any."""
        weights = selector.per_token(parts, plan.samples, reduce)
        for part, weight in zip(parts, weights or [], strict=weights is not None):
            part.weight = part.signal("weight") * weight
        return weights is not None

    def _with_columns(self, samples: Samples, parts: Sequence[Batch], reduce: Reduce) -> Samples:
        """Return the table with the columns that depend on the trainer's log-probs."""
        rows = [part.rows for part in parts]
        columns: dict[str, Any] = {}

        def column(values: Iterable[Tensor]) -> Tensor:
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
        """Compute the update statistics before each optimizer update, with all its parts, if `requirements.prepares`.

        split_samples: samples have more than one sequence, and `requirements.whole_samples`: then it always runs, and
        `current` is set.
        """
        self._update_stats, self._totals = {}, {}
        anchored_plugins: list[tuple[AnyAnchor, Sequence[UpdatePlugin]]] = [(self.anchor, self.losses)]
        anchored_plugins += [(anchor, self.corrections) for anchor in self._correction_anchors.values()]
        for anchor, plugins in anchored_plugins:
            current_logps = [part.mu if part.current is None else part.current for part in parts]
            anchors = [
                self.anchor_of(part, logp, anchor) for part, logp in zip(parts, current_logps, strict=True)
            ]
            for plugin in plugins:
                split = split_samples and plugin.whole_samples
                if isinstance(plugin, Loss) and split:
                    views = [
                        View(p, p.masked(p.signal("current")), a) for p, a in zip(parts, anchors, strict=True)
                    ]
                    sums = [v.batch.per_sequence(plugin.sample_values(v)) for v in views]
                    groups = parts[0].groups
                    assert groups is not None, "finish sets it"
                    self._totals[id(plugin)] = table_sum(sums, [p.rows for p in parts], len(groups), reduce)
                if plugin.prepares or (split and not isinstance(plugin, Loss)):
                    self._update_stats[id(plugin), anchor] = plugin.prepare(parts, anchors, reduce)

    def anchor_of(self, batch: Batch, logp: Tensor, name: AnyAnchor | None = None) -> Tensor:
        """Return the anchor of ratios, `[T]`, detached; any number where masked. logp: of the current weights."""
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
            )  # 0 up to an age of 1: see `algo.anchor`
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
        """Return the loss sum of one micro-batch and sums for metrics.

        Args:
            logp: log-probs of the batch's tokens under the current weights, `[T]`, with gradient.
            batch: the micro-batch of `T` tokens.
            entropy: entropy of the policy at each token, `[T]`, with gradient. Optional, as are the next two: None
                if no term of the loss and no metric reads it.
            values: outputs of the value head on the policy's trunk, `[T]`, with gradient.
            divergence: divergence from the teacher at each token, `[T]`, with gradient.

        Returns:
            The loss, a scalar with gradient, and sums by metric name, detached.

        Raises:
            ValueError: `logp` has another shape than the batch's tokens.
        """
        if logp.shape != batch.mask.shape:
            raise ValueError(
                f"logp has shape {tuple(logp.shape)}, the batch's tokens {tuple(batch.mask.shape)}"
            )
        anchor = batch.masked(self.anchor_of(batch, logp))
        view = View(batch, batch.masked(logp), anchor, entropy, values, divergence)
        share = batch.signal("weight")
        acting = batch.signal("advantages"), batch.signal("rewards")
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
            scale = share * weight * keep
            total = total + batch.masked(torch.where(scale != 0, loss * scale, torch.zeros_like(loss))).sum()
            clips = keep & term_figures.pop("clipped", torch.zeros_like(keep))
            clipped = clipped | clips
            effective = effective | ((scale != 0) & ~clips & term.acts_on(*acting))
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
            corrections: those of the terms of the policy, at least one.
            clipped: `[T]` bool, whether a term clips the token.
            effective: `[T]` bool, whether a term gives the token a gradient.
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
        """Combine all corrections of this anchor's exp(anchor - mu)."""
        anchor = view.anchor if name == self.anchor else self.anchor_of(view.batch, view.logp, name)
        corrected_view = View(view.batch, view.logp, view.batch.masked(anchor))
        weight, keep = torch.ones_like(view.anchor), view.keep
        for correction in self.corrections:
            factor, accepted = correction(corrected_view, self._update_stats.get((id(correction), name)))
            weight, keep = weight * factor.detach(), keep & accepted
        return Correction(weight, keep)

    def critic_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return loss and sums of the terms of a separate critic. values `[T]` with gradient."""
        zeros, is_counted = torch.zeros_like(values), batch.counted_tokens
        view, weight = View(batch, zeros, zeros, values=values), batch.signal("weight")
        total, sums = values.new_zeros(()), {"tokens": is_counted.to(values).sum()}
        for term in (t for t in self.losses if t.critic):
            loss, term_figures = term(view, self._update_stats.get((id(term), self.anchor)))
            total = total + batch.masked(torch.where(weight != 0, loss * weight, zeros)).sum()
            sums |= {
                name: torch.where(is_counted, v.detach(), zeros).sum() for name, v in term_figures.items()
            }
        return total, sums

    # -- around the optimizer -----------------------------------------------------------------------------------

    def lr_factor(self, plan: StepPlan, rows: Sequence[int]) -> float:
        """Return the factor of the learning rate of an update on these rows."""
        size = float(plan.eligible.sum()) / plan.updates
        rows = [row for row in rows if plan.weight[row] != 0]
        return math.prod(hook.lr_factor(plan.samples, rows, size) for hook in self.hooks)

    def start(self, parameters: Parameters) -> None:
        """Run the hooks before the first pass of a train step, with this rank's parameters."""
        for hook in self.hooks:
            hook.start(list(parameters()))

    def after_step(self, parameters: Parameters, metrics: dict[str, float]) -> None:
        """Run the hooks after each optimizer update, with this rank's parameters and the update's metrics."""
        for hook in self.hooks:
            hook.after_step(list(parameters()), metrics["active_share"])
        for plugin in self._observing:
            plugin.observe(metrics)

    def after_version(self, parameters: Parameters, active_share: float) -> None:
        """Run the hooks after the last update of a step, with this rank's parameters and the step's
        `active_share`."""
        for hook in self.hooks:
            hook.after_version(list(parameters()), active_share)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every plug-in that has one, by its index; the checkpoint stores it."""
        states = {key: state for key, plugin in self._keyed_plugins() if (state := plugin.state_dict())}
        return (
            states
            if self._deferred is None
            else {**states, DEFERRED_KEY: self._deferred.state_dict(_encode_deferred)}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, plugin in self._keyed_plugins():
            if key in state:
                plugin.load_state_dict(state[key])
        if self._deferred is not None and DEFERRED_KEY in state:
            self._deferred.load_state_dict(state[DEFERRED_KEY], _decode_deferred)

    def average(self) -> dict[str, Tensor]:
        """Return the averaged weights of this rank by name, for `anchor: ewma`; empty before `start`."""
        return {name: t for hook in self.hooks for name, t in hook.average().items()}

    def reference(self) -> dict[str, Tensor]:
        """Return the reference's weights of this rank by name, if a hook moves them; else empty."""
        return {name: t for hook in self.hooks for name, t in hook.reference().items()}

    def average_totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the hooks' state tensors of the size of the weights, by hook prefix and parameter name.

        The checkpoint shards them over ranks like the weights.
        """
        named_parameters = list(parameters)
        return {hook.prefix: totals for hook in self.hooks if (totals := hook.totals(named_parameters))}

    def load_average_totals(self, totals: dict[str, dict[str, Tensor]]) -> None:
        for hook in self.hooks:
            hook.load_totals(totals.get(hook.prefix, {}))

    def _keyed_plugins(self) -> list[tuple[str, Plugin]]:
        return [(f"{i}.{type(plugin).__name__}", plugin) for i, plugin in enumerate(self.plugins)]


def _select_correction(ratio: Tensor, by_ratio: Mapping[bool, Correction]) -> Correction:
    """Select the correction of each token `[T]` by whether it has a ratio."""
    if len(by_ratio) == 1:
        return next(iter(by_ratio.values()))
    weight = torch.where(ratio, by_ratio[True].weight, by_ratio[False].weight)
    return Correction(weight, torch.where(ratio, by_ratio[True].keep, by_ratio[False].keep))


def _encode_deferred(item: DeferredSample) -> Any:
    """Convert a deferred sample to JSON values: arrays become lists."""
    return msgspec.to_builtins(item, enc_hook=lambda values: values.tolist())


def _decode_deferred(item: Any) -> DeferredSample:
    """Convert JSON values to a deferred sample: a list of integers becomes token ids, any other log-probs."""
    return msgspec.convert(
        item, DeferredSample, dec_hook=lambda _, v: token_ids(v) if isinstance(v[0], int) else log_probs(v)
    )
