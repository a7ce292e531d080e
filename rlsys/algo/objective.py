"""The algorithm of a run: its plug-ins, in the one order in which they act.

    plan      shaping -> `before` selectors -> advantages -> selectors -> what each token counts     (sample table)
    (pack the planned rows; run the log-prob passes that `asks.passes` names, over the whole step)
    finish    table columns from the passes -> late advantages -> advantages and weights of tokens   (all parts)
    prepare   bounds and normalisers from all tokens of one optimizer update                         (its parts)
    __call__  corrections x loss terms of one packed micro-batch -> loss sum, sums for metrics
    (the update divides by `plan.denominator / minibatches`; `lr_factor` scales its learning rate)

Advantages that follow from rewards alone are known in `plan`, so that samples without a gradient are not packed;
`late` ones wait for the passes. Sequences stay whole; how they are cut into micro-batches and spread over ranks does
not change the result.
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
from rlsys.algo.asks import Asks
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.corrections import Correction, CorrectionPlugin
from rlsys.algo.draws import sample_draws, sample_keys
from rlsys.algo.figures import mismatch_sums
from rlsys.algo.hooks import Hook
from rlsys.algo.kl import KL_KINDS, kl_estimate
from rlsys.algo.losses import Figures, Loss, Preparing, Sums, View
from rlsys.algo.methods.deferred_samples import PutOff
from rlsys.algo.methods.optimal_token_baseline import score_norm
from rlsys.algo.plugin import Plugin
from rlsys.algo.reducers import Reducer, Reduction
from rlsys.algo.reduction import Reduce, alone, table_sum
from rlsys.algo.registry import make_all
from rlsys.algo.segments import group_index
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Shaping
from rlsys.config.algo import AlgoSection, CriticSection
from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup

Parameters = Callable[[], Iterable[tuple[str, Tensor]]]
"""This rank's parameters by name, for hooks that look at them."""
Later = tuple[SampleGroup, float]
"""One sample that was put off, as a group of one, and its advantage."""
PUT_OFF = "replay"
"""Key of what was put off in the objective's state; older checkpoints know it by this word."""


@dataclass
class StepPlan:
    """What is trained in one step. Rows are rows of `samples`; the optional fields are set by Objective.finish."""

    samples: Samples  # with the column `counted`
    weight: Tensor  # [N]
    rows: list[int]  # to be packed
    deferred: list[int]  # put off by a selector that defers
    updates: int = 1  # optimizer updates that share the rows
    trained: tuple[int, ...] = ()  # those of `rows` that have a gradient; known once the advantages are
    advantages: Tensor | None = None  # [N]
    reduction: Reduction | None = None

    @property
    def counted(self) -> Tensor:
        """`[N]` bool: not dropped by a `before` selector."""
        return self.samples.column("counted")

    @property
    def denominator(self) -> float:
        """What the step's loss sum is divided by. Raises ValueError before it is known."""
        if self.reduction is None:
            raise ValueError("the denominator is known after Objective.finish")
        return self.reduction.denominator


class Objective:
    """Owns the plug-ins of the trainer and, between prepare and the end of an update, what they prepared."""

    def __init__(self, section: AlgoSection) -> None:
        made = make_all(section)
        self.shaping: list[Shaping] = made["shaping"]
        self.advantage: Advantage = made["advantage"][0]
        self.selectors: list[Selector] = made["selectors"]
        self.corrections: list[CorrectionPlugin] = made["corrections"]
        self.losses: list[Loss] = made["loss"]
        self.reducer: Reducer = made["reducer"][0]
        self.hooks: list[Hook] = made["hooks"]
        anchored = any(term.ratio or term.reads_anchor for term in self.losses)
        self.anchor: AnyAnchor = section.anchor if anchored else "current"
        ratios = frozenset[bool]().union(*(term.ratios() for term in self.losses))
        self._correction_anchors: dict[bool, AnyAnchor] = {
            ratio: self.anchor if ratio else "current" for ratio in sorted(ratios if self.corrections else ())
        }
        self.critic: CriticSection | None = section.critic
        self.asks = Asks.of(
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
        self._prepared: dict[tuple[int, AnyAnchor], Any] = {}
        self._totals: dict[int, Tensor] = {}  # of losses, over samples of several sequences

        putting_off = [s for s in self.selectors if s.defers]
        if self.advantage.of_turns and (others := [*self.shaping, *putting_off]):
            raise UserError(
                f"algo.advantage = {type(self.advantage).__name__} looks at the rewards of turns, which "
                f"{type(others[0]).__name__} does not change or keep; remove one of them"
            )
        self._put_off: PutOff[Later] | None = putting_off[0].store() if putting_off else None

    # -- one train step -----------------------------------------------------------------------------------------

    def plan(self, samples: Samples) -> StepPlan:
        """Choose what is packed. Equal on every rank, because the table is."""
        counted = torch.ones(len(samples.rewards), dtype=torch.bool, device=samples.rewards.device)
        for selector in (s for s in self.selectors if s.before):
            counted[counted.clone()] = selector(samples.take(counted), None) > 0
        plan = StepPlan(replace(samples, counted=counted), counted.float(), [], [])
        if not self.asks.late:
            self._score(plan)
        trained = plan.weight != 0
        if plan.advantages is not None and self.asks.skips_zero:
            trained = trained & (plan.advantages != 0)
        plan.rows = trained.nonzero().flatten().tolist()
        self._set_trained(plan)
        plan.updates = max(1, min(self._minibatches, len(plan.rows)))
        return plan

    def put_off(
        self,
        plan: StepPlan,
        groups: Sequence[SampleGroup],
        step: int,
        loaded: Callable[[Sample], Sample] = lambda sample: sample,
    ) -> list[Later]:
        """Store what a selector deferred, with its tokens (`loaded` gives them): nobody keeps them elsewhere for so
        long. What is due for an extra update now. After `finish`, if that was called.
        """
        if self._put_off is None:
            return []
        samples = [(g, s) for g in groups for s in g.samples]
        draws = sample_draws(plan.samples)  # what waits longest may expire: no group's for finishing last
        for row in sorted(plan.deferred, key=draws.__getitem__):
            assert plan.advantages is not None
            group, sample = samples[row]
            self._put_off.put(step, [(replace(group, samples=[loaded(sample)]), float(plan.advantages[row]))])
        return self._put_off.take(step)

    def plan_again(self, samples: Samples, advantages: Tensor) -> StepPlan:
        """All of these samples, with the advantages that they had in their own groups."""
        every = torch.ones(len(samples), dtype=torch.bool)
        reduction = self.reducer(samples.lengths, advantages != 0)
        table = replace(samples, counted=every)
        rows = list(range(len(samples)))
        plan = StepPlan(table, every.float(), rows, [], advantages=advantages, reduction=reduction)
        self._set_trained(plan)
        return plan

    def _set_trained(self, plan: StepPlan) -> None:
        """The rows that have a gradient, as far as weights and advantages of samples tell."""
        if plan.advantages is None:
            return
        acts = self._acts_on(plan.advantages, plan.samples.reward) | self.advantage.changes_tokens()
        trained = (acts & (plan.weight != 0).to(acts.device)).tolist()
        plan.trained = tuple(r for r in plan.rows if trained[r])

    def _acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return the samples `[N]` or tokens `[T]` at which some term has a gradient, bool."""
        return torch.stack([term.acts_on(advantages, rewards) for term in self.losses]).any(0)

    def trains(self, parts: Sequence[Batch], reduce: Reduce = alone) -> bool:
        """Whether a token of an update, of all its parts on all ranks, has a gradient. Without one, the optimizer
        would move the weights by its momentum alone. After `finish`."""
        acting = [self._acts_on(part.signal("advantages"), part.signal("rewards")) for part in parts]
        counts = [
            (part.counted_tokens & acts).double().sum() for part, acts in zip(parts, acting, strict=True)
        ]
        return bool(reduce(torch.stack(counts).sum()))

    def _score(self, plan: StepPlan) -> None:
        """Advantages of the counted samples, weights of selectors, the denominator: in this order."""
        samples = plan.samples
        for shape in self.shaping:
            samples = replace(samples, rewards=shape(samples))
        counted = plan.counted
        advantages = torch.zeros_like(samples.reward)
        advantages[counted] = self.advantage(samples.take(counted))
        factor, denominator = self.reducer(samples.lengths[counted], (advantages != 0)[counted])
        factors = torch.zeros(len(samples.rewards), device=factor.device).masked_scatter(
            counted.to(factor.device), factor
        )
        mass = self.reducer.mass(samples.lengths, advantages != 0).to(factors) * counted.to(factors)
        plan.advantages = advantages
        for selector in (s for s in self.selectors if not s.before):
            present, weight = plan.weight != 0, torch.zeros_like(plan.weight)
            if present.any():
                chosen = selector(samples.take(present), advantages[present])
                weight[present] = chosen.to(weight)
            share = selector.denominator_share(weight, mass, samples.step)
            denominator *= share
            if share != 1:  # a mean over what is kept: the next selector's share is of that
                mass = mass * (weight != 0).to(mass)
            if selector.defers:
                put_off = (plan.weight != 0) & (weight == 0) & (advantages != 0)
                plan.deferred += put_off.nonzero().flatten().tolist()
            plan.weight = plan.weight * weight
        plan.reduction = Reduction(factors, denominator or 1.0)  # of nothing that is kept: 0

    def finish(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce = alone) -> None:
        """After the log-prob passes: advantages and weights of the tokens of all parts of the step.

        `parts`, at least one, are this rank's packed sequences, each of the planned rows on exactly one rank.
        """
        self._prepared, self._totals = {}, {}
        plan.samples = self._with_columns(plan.samples, parts, reduce)
        if plan.advantages is None:
            self._score(plan)
        assert plan.advantages is not None and plan.reduction is not None
        self._set_trained(plan)
        plan.samples = replace(plan.samples, kept=plan.weight != 0)
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
        chosen = [self._choose_tokens(s, plan, parts, reduce) for s in self.selectors]
        if any(chosen) and self.advantage.changes_tokens():  # a mean over tokens, which are fewer now
            self._spread(plan, parts, reduce)

    def _spread(self, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> None:
        """The advantages of tokens."""
        assert plan.advantages is not None
        tokens = self.advantage.per_token(plan.advantages, plan.samples, parts, reduce)
        for part, advantages in zip(parts, tokens, strict=True):
            part.advantages = advantages

    @staticmethod
    def _choose_tokens(selector: Selector, plan: StepPlan, parts: Sequence[Batch], reduce: Reduce) -> bool:
        """Weights of a selector's tokens; whether it gives any."""
        weights = selector.per_token(parts, plan.samples, reduce)
        for part, weight in zip(parts, weights or [], strict=weights is not None):
            part.weight = part.signal("weight") * weight
        return weights is not None

    def _with_columns(self, samples: Samples, parts: Sequence[Batch], reduce: Reduce) -> Samples:
        """The table with what only the trainer's log-probs can tell."""
        rows = [part.rows for part in parts]
        columns: dict[str, Any] = {}

        def column(values: Iterable[Tensor]) -> Tensor:
            sums = [part.per_sequence(v) for part, v in zip(parts, values, strict=True)]
            return table_sum(sums, rows, len(samples), reduce).to(samples.rewards.device)

        wanted = self._columns
        if "old" in wanted:
            columns["log_weight"] = column(part.signal("old") - part.mu for part in parts)
        if "sum_pi_squared" in wanted:
            columns["score_norm"] = column(score_norm(part) for part in parts)
        if {"old", "ref"} <= wanted:
            kinds = [
                column(kl_estimate(part.signal("old"), part.signal("ref"), kind) for part in parts)
                for kind in KL_KINDS
            ]
            columns["kl"] = torch.stack(kinds, 1)
        return replace(samples, **columns)

    def prepare(self, parts: Sequence[Batch], reduce: Reduce = alone, *, several: bool = False) -> None:
        """Before each optimizer update, with all its parts, where `asks.prepares`.

        several: samples have more than one sequence, and `asks.whole_samples`: then always, and `now` is filled.
        """
        self._prepared, self._totals = {}, {}
        wanted: list[tuple[AnyAnchor, Sequence[Preparing]]] = [(self.anchor, self.losses)]
        wanted += [(anchor, self.corrections) for anchor in self._correction_anchors.values()]
        for anchor, plugins in wanted:
            known = [part.mu if part.now is None else part.now for part in parts]
            of = [self.anchor_of(part, now, anchor) for part, now in zip(parts, known, strict=True)]
            for plugin in plugins:
                whole = several and plugin.whole_samples
                if isinstance(plugin, Loss) and whole:
                    views = [View(p, p.masked(p.signal("now")), a) for p, a in zip(parts, of, strict=True)]
                    sums = [v.batch.per_sequence(plugin.sample_values(v)) for v in views]
                    groups = parts[0].groups
                    assert groups is not None, "finish sets it"
                    self._totals[id(plugin)] = table_sum(sums, [p.rows for p in parts], len(groups), reduce)
                if plugin.prepares or (whole and not isinstance(plugin, Loss)):
                    self._prepared[id(plugin), anchor] = plugin.prepare(parts, of, reduce)

    def anchor_of(self, batch: Batch, logp: Tensor, name: AnyAnchor | None = None) -> Tensor:
        """What ratios are taken against, `[T]`, detached; any number where masked. logp: of the current weights."""
        current, name = logp.detach(), name or self.anchor
        if name == "current":
            anchor = current
        elif name == "ewma":
            anchor = batch.signal("ewma")
        elif name in ("old", "behaviour"):
            anchor = current if batch.old_is_current else batch.signal("old")
            if name == "behaviour":
                stored = batch.signal("behaviour")
                anchor = torch.where(stored.isnan(), anchor, stored)
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
        """Loss sum of one micro-batch and sums for metrics. All but `batch` are `[T]`, with gradient."""
        if logp.shape != batch.mask.shape:
            raise ValueError(
                f"logp has shape {tuple(logp.shape)}, the batch's tokens {tuple(batch.mask.shape)}"
            )
        anchor = batch.masked(self.anchor_of(batch, logp))
        view = View(batch, batch.masked(logp), anchor, entropy, values, divergence)
        share, none = batch.signal("weight"), Correction(torch.ones_like(view.anchor), view.keep)
        corrected = {ratio: self._corrected(view, of) for ratio, of in self._correction_anchors.items()}
        total, clipped = logp.new_zeros(()), torch.zeros_like(view.keep)
        of_terms: list[Correction] = []
        figures: Figures = {"tokens": torch.ones_like(view.anchor)}
        for term in self.losses:
            if term.critic and self.critic is not None:
                continue
            totals = self._totals.get(id(term))
            of_term = view if totals is None else replace(view, totals=totals)
            loss, found = term(of_term, self._prepared.get((id(term), self.anchor)))
            weight, keep = _at(term.has_ratio(view), corrected) if corrected and term.policy else none
            of_terms += [Correction(weight, keep)] if term.policy else []
            scale = share * weight * keep
            total = total + batch.masked(torch.where(scale != 0, loss * scale, torch.zeros_like(loss))).sum()
            clipped = clipped | (keep & found.pop("clipped", clipped))
            figures |= found
        figures["weight"] = of_terms[0].weight if of_terms else none.weight
        kept = torch.stack([c.keep for c in of_terms]).any(0) if of_terms else view.keep
        figures["entropy"] = torch.zeros_like(weight) if entropy is None else entropy
        if self.anchor == "behaviour":
            figures["anchor_missing"] = (
                batch.signal("behaviour").isnan() & (batch.versions != batch.version)
            ).to(weight)
        counted, nothing = batch.counted_tokens, torch.zeros_like(weight)
        sums = {name: torch.where(counted, v.detach(), nothing).sum() for name, v in figures.items()}
        rejected, active = view.keep & ~kept, batch.active
        sums |= {"active": active.sum(), "active_lost": (active & (clipped | rejected)).sum()}
        return total, sums | mismatch_sums(logp, batch, clipped, rejected)

    def _corrected(self, view: View, name: AnyAnchor) -> Correction:
        """All corrections together, of this anchor's exp(anchor - mu)."""
        anchor = view.anchor if name == self.anchor else self.anchor_of(view.batch, view.logp, name)
        of = View(view.batch, view.logp, view.batch.masked(anchor))
        weight, keep = torch.ones_like(view.anchor), view.keep
        for correction in self.corrections:
            factor, kept = correction(of, self._prepared.get((id(correction), name)))
            weight, keep = weight * factor.detach(), keep & kept
        return Correction(weight, keep)

    def critic_loss(self, values: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """The same of the terms of a critic that is a model of its own. values `[T]` with gradient."""
        nothing, counted = torch.zeros_like(values), batch.counted_tokens
        view, weight = View(batch, nothing, nothing, values=values), batch.signal("weight")
        total, sums = values.new_zeros(()), {"tokens": counted.to(values).sum()}
        for term in (t for t in self.losses if t.critic):
            loss, found = term(view, self._prepared.get((id(term), self.anchor)))
            total = total + batch.masked(torch.where(weight != 0, loss * weight, nothing)).sum()
            sums |= {name: torch.where(counted, v.detach(), nothing).sum() for name, v in found.items()}
        return total, sums

    # -- around the optimizer -----------------------------------------------------------------------------------

    def lr_factor(self, plan: StepPlan, rows: Sequence[int]) -> float:
        """Factor of the learning rate of an update on these rows."""
        size = float(plan.counted.sum()) / plan.updates
        rows = [row for row in rows if plan.weight[row] != 0]
        return math.prod(hook.lr_factor(plan.samples, rows, size) for hook in self.hooks)

    def start(self, parameters: Parameters) -> None:
        """Before the first pass of a train step, with this rank's parameters."""
        for hook in self.hooks:
            hook.start(list(parameters()))

    def after_step(self, parameters: Parameters, metrics: dict[str, float]) -> None:
        """After each optimizer update, with this rank's parameters and the update's metrics."""
        for hook in self.hooks:
            hook.after_step(list(parameters()), metrics["active_share"])
        for plugin in self._observing:
            plugin.observe(metrics)

    def after_version(self, parameters: Parameters, active_share: float) -> None:
        """After the last update of a train step, with this rank's parameters and the step's `active_share`."""
        for hook in self.hooks:
            hook.after_version(list(parameters()), active_share)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of every plug-in that has one, by its place; the checkpoint keeps it."""
        states = {key: state for key, plugin in self._named() if (state := plugin.state_dict())}
        return states if self._put_off is None else {**states, PUT_OFF: self._put_off.state_dict(_to_lists)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, plugin in self._named():
            if key in state:
                plugin.load_state_dict(state[key])
        if self._put_off is not None and PUT_OFF in state:
            self._put_off.load_state_dict(state[PUT_OFF], _from_lists)

    def average(self) -> dict[str, Tensor]:
        """The averaged weights of this rank by name, for `anchor: ewma`; empty before `start`."""
        return {name: t for hook in self.hooks for name, t in hook.average().items()}

    def reference(self) -> dict[str, Tensor]:
        """The reference's weights of this rank by name, where a hook moves them; else empty."""
        return {name: t for hook in self.hooks for name, t in hook.reference().items()}

    def average_totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """State of hooks that is as large as the weights, by their prefixes; the checkpoint cuts it over ranks like
        these."""
        named = list(parameters)
        return {hook.prefix: totals for hook in self.hooks if (totals := hook.totals(named))}

    def load_average_totals(self, totals: dict[str, dict[str, Tensor]]) -> None:
        for hook in self.hooks:
            hook.load_totals(totals.get(hook.prefix, {}))

    def _named(self) -> list[tuple[str, Plugin]]:
        return [(f"{i}.{type(plugin).__name__}", plugin) for i, plugin in enumerate(self.plugins)]


def _at(ratio: Tensor, of: Mapping[bool, Correction]) -> Correction:
    """Of each token `[T]`, the correction for its ratio."""
    if len(of) == 1:
        return next(iter(of.values()))
    weight = torch.where(ratio, of[True].weight, of[False].weight)
    return Correction(weight, torch.where(ratio, of[True].keep, of[False].keep))


def _to_lists(item: Later) -> Any:
    """As a checkpoint keeps it: `array` is no type of JSON."""
    return msgspec.to_builtins(item, enc_hook=lambda values: values.tolist())


def _from_lists(item: Any) -> Later:
    """Ids are whole numbers there, log-probs are not."""
    return msgspec.convert(
        item, Later, dec_hook=lambda _, v: token_ids(v) if isinstance(v[0], int) else log_probs(v)
    )
