"""Which samples and tokens are trained, with which weight. Dropping never changes the denominator, except `before`.

Shapes: N samples of the step, T tokens. What a selector decides, it decides from the table that every rank has, or
from sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.methods.put_off import PutOff
from rlsys.algo.plugin import Plugin
from rlsys.algo.reduction import Reduce, threshold
from rlsys.algo.segments import groups_of
from rlsys.config.section import Fraction

Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Selector(Plugin):
    """Weights of samples and tokens; 0 drops."""

    before: ClassVar[bool] = False
    """Before the advantages: dropped samples were never there, for baselines and denominators too."""
    defers: ClassVar[bool] = False
    """Dropped samples are kept for a later extra update (see rlsys.algo.methods.put_off)."""

    def store(self) -> PutOff[Any]:
        """Of a selector that defers: where to."""
        raise NotImplementedError

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        """Weight of each sample, `[N]`. `advantages` `[N]` is None before they are known."""
        return torch.ones(len(samples), device=samples.rewards.device)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        """Share of the denominator that is left: `weight` `[N]` of samples, `mass` `[N]`: what each counts in it."""
        return 1.0

    def size_of(self, group: int) -> int | None:
        """Of a `before` selector: samples left of a group of so many; None when that depends on the group."""
        return None

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        """Weight of each token, `[T]` per packed batch of this rank; None for all of them."""
        return None


def widest_subset(values: Tensor, count: int) -> Tensor:
    """The `count` of N values with the largest variance, `[N]` bool: some of the smallest and some of the largest.

    Sorted, it is always a prefix and a suffix, so all `count` + 1 candidates are compared in O(N log N).
    """
    n = len(values)
    if count >= n:
        return torch.ones(n, dtype=torch.bool, device=values.device)
    ordered, order = values.double().sort(stable=True)
    zero = ordered.new_zeros(1)
    sums, squares = torch.cat([zero, ordered.cumsum(0)]), torch.cat([zero, (ordered**2).cumsum(0)])
    head = torch.arange(count + 1, device=values.device)
    tail = n - (count - head)
    total, total2 = sums[head] + sums[n] - sums[tail], squares[head] + squares[n] - squares[tail]
    best = int((total2 / count - (total / count) ** 2).argmax())
    keep = torch.zeros(n, dtype=torch.bool, device=values.device)
    keep[order[:best]] = True
    keep[order[n - (count - best) :]] = True
    return keep


class D3S(Selector):
    """Train on the samples whose advantages vary most, and on their most informative tokens; relax with time.

    Over the whole step: the subset of a share of the samples with the largest variance of advantages; then the
    share of tokens with the largest |A_t| H_t, H the entropy. Both shares grow linearly over `steps`. The paper's
    schedule was not found; these values are ours.

    The loss is the mean over what is kept: the denominator shrinks by the share of it that the kept samples have, and
    by the share of tokens. So a selection makes gradients larger, as in the paper. With `denominator: all` it makes
    them smaller, and the growing shares act like a rise of the learning rate.
    """

    paper: ClassVar[str] = "D3S: dynamic dual-level down-sampling"
    evidence: ClassVar[str] = "P"
    samples_start: Fraction = 0.5
    """Share of samples at the first step."""
    samples_end: Fraction = 1.0
    """Share of samples after `steps`."""
    tokens_start: Fraction = 0.2
    """Share of tokens at the first step."""
    tokens_end: Fraction = 1.0
    """Share of tokens after `steps`."""
    steps: Annotated[int, Field(gt=0)] = 100
    """Train steps over which the shares grow."""
    denominator: Literal["kept", "all"] = "kept"
    """What the loss is a mean over: the samples and tokens that are kept, or all of the step."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) if min(self.tokens_start, self.tokens_end) < 1 else frozenset()

    def _share(self, start: float, end: float, step: int) -> float:
        return start + (end - start) * min(1.0, step / self.steps)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        if advantages is None:
            raise ValueError("d3s needs the advantages of samples; it cannot be used with this estimator")
        count = max(1, round(self._share(self.samples_start, self.samples_end, samples.step) * len(samples)))
        return widest_subset(advantages, count).to(advantages)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        kept = float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
        return kept * self._share(self.tokens_start, self.tokens_end, step)

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        share = self._share(self.tokens_start, self.tokens_end, samples.step)
        if share >= 1:
            return None
        scores = [
            part.masked(part.signal("advantages").abs() * part.signal("entropy").detach()) for part in parts
        ]
        positive = [s[(s > 0) & (p.signal("weight") != 0)] for s, p in zip(scores, parts, strict=True)]
        device = positive[0].device if positive else torch.device("cpu")
        found = torch.tensor([float(sum(len(v) for v in positive)), 0.0], dtype=torch.float64, device=device)
        wanted = share * float(samples.lengths[samples.column("kept")].sum())
        dropped = max(0.0, float(reduce(found)[0]) - wanted)
        largest = _largest(positive, reduce)

        def holds(edges: Tensor, counts: Tensor, _sums: Tensor) -> Tensor:
            return counts <= dropped

        cut = threshold(positive, holds, 0.0, largest, reduce)
        return [(s > cut).to(s) for s in scores]


class OverlongFilter(Selector):
    """Do not train responses that were cut off at the longest length: nobody knows how they would have ended.

    Their rewards stay in the baselines of their groups. Denominators count them, as ROLL's and, over sequences, TRL's
    do; with `denominator: kept` the loss is the mean over the others, as TRL's is over tokens.
    """

    paper: ClassVar[str] = "DAPO, section 3.4: overlong filtering"
    evidence: ClassVar[str] = "R"
    denominator: Literal["kept", "all"] = "all"
    """What the loss is a mean over: the responses that ended, or all of the step."""

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        return (~samples.column("truncated").bool()).to(samples.rewards)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        mass = mass.double()
        return float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())


def _largest(values: Sequence[Tensor], reduce: Reduce) -> float:
    """A power of two that no value of any rank exceeds, from sums alone."""
    powers = torch.arange(-30, 31, dtype=torch.float64)
    over = torch.zeros(len(powers), dtype=torch.float64)
    for value in values:
        over += (
            (value.double().cpu()[:, None] > 2.0 ** powers[None, :]).double().sum(0) if len(value) else 0.0
        )
    device = values[0].device if values else torch.device("cpu")
    free = (reduce(over.to(device)).cpu() == 0).nonzero()
    return float(2.0 ** powers[int(free[0])]) if len(free) else 2.0**31


class GrpoRoc(Selector):
    """Resample on correct: of an oversampled group keep half, all kinds of failures but only the cleanest successes.

    Keeps the group's proportion of successes (at least `least` of each where there are so many). Failures are drawn
    at random; successes are those with the lowest penalty: the share of failed tool calls (0.5 without a call) plus
    min((answers - 1) / turns, 1), or 1 without an answer; or the length, where there are no tools. Baselines are of
    the kept samples. Plan twice the group: `planners: [grpo_roc]`.
    """

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    before: ClassVar[bool] = True
    keep: Fraction = 0.5
    """Share of each group that is trained."""
    least: Annotated[int, Field(ge=0)] = 2
    """Smallest number of successes and of failures kept, where a group has them."""
    penalty: Literal["tools", "length"] = "tools"
    """What ranks the successes."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    seed: Seed = 0
    """Of the draw among failures."""

    def needs(self) -> frozenset[str]:
        return frozenset({"tool_penalty"}) if self.penalty == "tools" else frozenset()

    def size_of(self, group: int) -> int:
        return max(1, round(self.keep * group))

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        penalty = (
            samples.lengths.double() if self.penalty == "length" else samples.column("tool_penalty").double()
        )
        success = (samples.reward > self.correct).cpu()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + samples.step)
        draw = torch.rand(len(samples), generator=generator, dtype=torch.float64)
        rank = torch.where(success, penalty.cpu(), draw)
        out = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            won, lost = members[success[members]], members[~success[members]]
            total = self.size_of(len(members))
            good = self._successes(len(won), len(lost), total)
            for chosen, count in ((won, good), (lost, total - good)):
                out[chosen[torch.argsort(rank[chosen], stable=True)[:count]]] = 1.0
        return out.to(samples.rewards.device)

    def _successes(self, won: int, lost: int, total: int) -> int:
        """How many successes stay among `total`."""
        wanted = round(total * won / (won + lost))
        floor, ceiling = min(self.least, won), total - min(self.least, lost)
        wanted = max(min(wanted, ceiling), floor)
        return min(max(wanted, total - lost), won)


class Lens(Selector):
    """Successes of a cleaned prompt stand for failures of the prompt itself, where cleaning helped.

    Of a group with samples that were drawn from a cleaned prompt: when a larger share of these succeeds than of the
    group's own, k = min(their successes, own failures) of the successes replace k failures, and the group keeps its
    size; else all own samples stay. What else was drawn from the cleaned prompt drops out. Use it with
    `planners: [lens]` and `corrections: [lens]`.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    before: ClassVar[bool] = True
    correct: float = 0.5
    """A sample is a success when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success = (samples.reward > self.correct).cpu()
        transferred = samples.column("transferred").bool().cpu()
        out = (~transferred).float()
        for members in groups_of(samples.group_ids.cpu()):
            own, drawn = members[~transferred[members]], members[transferred[members]]
            won, lost = drawn[success[drawn]], own[~success[own]]
            if len(won) * len(own) > (len(own) - len(lost)) * len(drawn):
                k = min(len(won), len(lost))
                out[won[:k]], out[lost[:k]] = 1.0, 0.0
        return out.to(samples.rewards.device)


class Thin(Selector):
    """Train a random share of each group's votes; all of them voted."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    before: ClassVar[bool] = True
    keep: Fraction = 0.5
    """Share of each group that is trained."""
    seed: Seed = 0
    """Of the draw."""

    def size_of(self, group: int) -> int:
        return max(1, round(self.keep * group))

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + samples.step)
        draw = torch.rand(len(samples), generator=generator, dtype=torch.float64)
        out = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            out[members[torch.argsort(draw[members])[: self.size_of(len(members))]]] = 1.0
        return out.to(samples.rewards.device)


class RoRecomp(Selector):
    """Of each group train the short correct and the long wrong responses now; the rest later, in an extra update.

    Baselines are those of the whole group. The share alpha is cut from each end: the shortest of the correct, the
    longest of the wrong. What is left goes to a first-in-first-out store (rlsys.algo.methods.put_off). The paper's
    values of alpha, of the store's size and of its schedule were not found; these are ours.
    """

    paper: ClassVar[str] = "RoRecomp: rollout response recomposition"
    evidence: ClassVar[str] = "N"
    defers: ClassVar[bool] = True
    alpha: Fraction = 0.75
    """Share of the correct (shortest) and of the wrong (longest) responses trained at once."""
    capacity: Annotated[int, Field(gt=0)] = 256
    """Stored samples that make an extra update."""
    max_age: Annotated[int, Field(ge=0)] = 4
    """Train steps after which a stored sample is dropped."""
    correct: float = 0.5
    """A response is correct when its reward is above this."""

    def store(self) -> PutOff[Any]:
        return PutOff(self.capacity, self.max_age)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success, lengths = (samples.reward > self.correct).cpu(), samples.lengths.double().cpu()
        rank = torch.where(success, lengths, -lengths)
        out = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            for chosen in (members[success[members]], members[~success[members]]):
                count = -int(-self.alpha * len(chosen) // 1)
                out[chosen[torch.argsort(rank[chosen], stable=True)[:count]]] = 1.0
        return out.to(samples.rewards.device)
