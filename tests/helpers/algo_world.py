"""A synthetic train step with all signals, divided into arbitrary parts, for the tests of algorithms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.figures import loss_metrics
from rlsys.algo.losses import Sums
from rlsys.algo.objective import Objective, StepPlan
from rlsys.algo.reduction import Reduce, single_rank
from rlsys.config.algo import AlgoSection
from rlsys.core.types import Sample, SampleGroup

DOUBLE = torch.float64
PASS_FIELDS = ("old", "current", "ewma", "ref", "entropy", "values", "sum_pi_squared")
"""Fields of a part that forward passes compute."""
LEAVES = ("logp", "entropy", "values", "divergence")
"""Inputs of the loss with gradients."""


def section(**fields: object) -> AlgoSection:
    return AlgoSection.model_validate(fields)


def table(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int] | None = None, **columns: Tensor
) -> Samples:
    return Samples(
        rewards=torch.tensor(rewards, dtype=DOUBLE),
        group_ids=torch.tensor(groups),
        lengths=torch.tensor(lengths if lengths is not None else [1] * len(rewards)),
        **columns,
    )


def packed(lengths: Sequence[int], mu: Sequence[float] | None = None, **fields: Sequence[float]) -> Batch:
    """Return a batch of sequences without prompts: mask 1, fields float64 `[T]`, row i is sequence i."""
    total = sum(lengths)
    values = {name: torch.tensor(v, dtype=DOUBLE) for name, v in {"rewards": [0.0] * total, **fields}.items()}
    return Batch(
        tokens=torch.zeros(total, dtype=torch.long),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        rows=torch.arange(len(lengths)),
        mask=values.pop("mask", torch.ones(total, dtype=DOUBLE)),
        mu=torch.tensor(mu if mu is not None else [0.0] * total, dtype=DOUBLE),
        versions=values.pop("versions", torch.zeros(total)).long(),
        **values,
    )


@dataclass
class World:
    """A random step: `groups` groups of `size` samples with `kinds` rewards each.

    Prompts have 2 tokens, responses 1 to 9 tokens; the weight versions are 4 to 7.
    """

    seed: int = 0
    groups: int = 4
    size: int = 5
    scale: float = 0.3
    kinds: int = 1
    device: str = "cpu"
    """Device of the loss. As in the trainer, plans and bounds are computed on the CPU."""
    graded: bool = False
    """Whether rewards are continuous in [0, 1]; binary rewards rarely have a unique best sample."""
    samples: Samples = field(init=False)
    sequences: list[dict[str, Tensor]] = field(init=False)
    """Token fields of each sample. Its sequences are concatenated."""
    spans: list[list[int]] = field(init=False)
    """Lengths of each sample's sequences."""

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def randn(n: int) -> Tensor:
            return torch.randn(n, generator=g, dtype=DOUBLE)

        count = self.groups * self.size
        lengths = torch.randint(1, 10, (count,), generator=g)
        self.sequences = [self._sequence(int(n), randn, g) for n in lengths]
        self.spans = [[len(s["mask"])] for s in self.sequences]
        scores = torch.rand((count, self.kinds), generator=g, dtype=DOUBLE)
        self.samples = Samples(
            rewards=(scores if self.graded else (scores > 0.5).to(DOUBLE)).squeeze(1),
            group_ids=torch.arange(count) // self.size,
            lengths=lengths,
            step=3,
            prompt_index=torch.arange(count) // self.size + 100,
            answers=torch.randint(0, 3, (count,), generator=g),
            log_likelihood=randn(count),
            tool_penalty=torch.rand(count, generator=g, dtype=DOUBLE),
            transferred=torch.rand(count, generator=g) > 0.8,
            truncated=torch.rand(count, generator=g) > 0.8,
            turn_counts=lengths.clamp(max=3),
            turn_rewards=torch.rand((count, 3), generator=g, dtype=DOUBLE)
            * (torch.arange(3)[None] < lengths[:, None]),
            turn_matches=torch.rand((count, 3), generator=g) > 0.3,
            index_in_group=torch.arange(count) % self.size,
            stem=torch.arange(count) % self.size - torch.randint(1, 3, (count,), generator=g),
            fork_at=torch.randint(1, 3, (count,), generator=g),
        )
        self.samples.stem.clamp_(min=-1)  # type: ignore[union-attr]

    def _sequence(self, n: int, randn: Callable[[int], Tensor], g: torch.Generator) -> dict[str, Tensor]:
        mu = -randn(n + 2).abs() - 0.1
        old = mu + self.scale * randn(n + 2)
        current = old + self.scale * randn(n + 2)
        versions = torch.sort(torch.randint(4, 8, (n + 2,), generator=g)).values
        behaviour = torch.where(versions < 5, torch.full_like(mu, torch.nan), old + 0.1 * randn(n + 2))
        return {
            "mask": torch.cat([torch.zeros(2, dtype=DOUBLE), torch.ones(n, dtype=DOUBLE)]),
            "turns": torch.tensor([-1, -1, *(min(i, 2) for i in range(n))]),
            "mu": mu, "old": old, "current": current, "ewma": current - 0.1, "ref": old + 0.2 * randn(n + 2),
            "behaviour": behaviour, "versions": versions,
            "entropy": randn(n + 2).abs(), "values": randn(n + 2),
            "sum_pi_squared": old.exp().clamp(max=1) ** 2 + 0.1, "logp": current + 0.02 * randn(n + 2),
            "divergence": (current - old).abs() + 0.1,
        }  # fmt: skip

    def records(self) -> list[SampleGroup]:
        """Return the groups as records. A sample's ID is its row."""
        rewards = self.samples.reward.tolist()
        rows = [range(g * self.size, (g + 1) * self.size) for g in range(self.groups)]
        return [
            SampleGroup(g, g, [Sample(r, g, i, [1], 0, reward=rewards[r]) for i, r in enumerate(members)])
            for g, members in enumerate(rows)
        ]

    def part(self, rows: Sequence[int]) -> Batch:
        selected = [self.sequences[r] for r in rows]
        fields = {
            k: torch.cat([s[k] for s in selected]) for k in selected[0] if k not in ("logp", "divergence")
        }
        lengths = [n for r in rows for n in self.spans[r]]
        return Batch(
            tokens=torch.zeros(sum(lengths), dtype=torch.long),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            rows=torch.tensor([r for r in rows for _ in self.spans[r]]),
            version=7,
            **fields,
        )


@dataclass
class Outcome:
    loss: float
    gradients: dict[int, Tensor]  # by row
    sums: Sums
    metrics: dict[str, float]
    denominator: float
    lr_factor: float
    rows: list[int]


Share = Callable[[Batch, Tensor], Tensor]
"""(part, values `[T]` of its tokens) -> the same values, of which a context-parallel rank computed its share only."""


def unsharded(part: Batch, values: Tensor) -> Tensor:
    """Return `values` unchanged: the Share without context parallelism."""
    return values


def run(
    world: World,
    algo: AlgoSection,
    cut: Callable[[list[int]], list[list[int]]],
    reduce: Reduce = single_rank,
    share: Share = unsharded,
) -> Outcome:
    """Run one train step, with the extra update on deferred samples if it is due.

    Args:
        world: samples of the step.
        algo: algorithm.
        cut: rows of an update -> rows of each part of this rank.
        reduce: sums a tensor over all ranks.
        share: see Share.
    """
    objective = Objective(algo)
    plan = objective.plan(world.samples)
    outcome = Outcome(0.0, {}, {}, {}, 0.0, 1.0, plan.rows)
    step = _Step(world, objective, reduce, share, outcome)
    updates = [rows for k in range(algo.minibatches) if (rows := plan.rows[k :: algo.minibatches])]
    every = list(range(len(world.sequences)))
    if plan.rows:
        step.optimise(plan, updates, [cut(rows) for rows in updates], every, algo.epochs)
    if later := objective.defer(plan, world.records(), world.samples.step):
        rows = [group.samples[0].sample_id for group, _ in later]
        advantages = torch.tensor([a for _, a in later], dtype=DOUBLE)
        again = objective.plan_deferred(world.samples.take(torch.tensor(rows)), advantages)
        step.optimise(again, [again.rows], [cut(again.rows)], rows)
        outcome.rows = outcome.rows + rows
    outcome.denominator = plan.denominator if plan.rows else 1.0
    outcome.metrics = loss_metrics(outcome.sums, objective.requirements.needs) if outcome.sums else {}
    return outcome


@dataclass
class _Step:
    """The counterpart of rlsys.trainer.step for a World. Adds the results to `outcome`."""

    world: World
    objective: Objective
    reduce: Reduce
    share: Share
    outcome: Outcome

    def optimise(
        self,
        plan: StepPlan,
        updates: list[list[int]],
        cuts: list[list[list[int]]],
        world_rows: list[int],
        epochs: int = 1,
    ) -> None:
        """Run an update for each list of rows.

        Args:
            plan: plan of the step.
            updates: rows of the plan's table for each update.
            cuts: rows of each part for each update.
            world_rows: row of the plan's table -> row of the world.
            epochs: number of passes over the updates.
        """
        batches = [[self.part(rows, world_rows) for rows in cut] for cut in cuts]
        self.objective.finish(plan, [part for batch in batches for part in batch], self.reduce)
        for i, (batch, rows) in enumerate(list(zip(batches, updates, strict=True)) * epochs):
            if i:
                self.rescore(batch, world_rows)
            if not self.objective.trains(batch, self.reduce):
                continue
            if self.objective.requirements.prepares:
                self.objective.prepare(batch, self.reduce)
            sums: Sums = {}
            for part in batch:
                part_sums = self.backward(part, plan.denominator / len(updates), world_rows)
                sums = {k: v + sums.get(k, 0) for k, v in part_sums.items()}
            summed = {name: self.reduce(sums[name].double()) for name in sorted(sums)}
            self.outcome.loss += float(summed.pop("loss"))
            self.objective.after_step(list, loss_metrics(summed, self.objective.requirements.needs))
            self.outcome.sums = {k: v + self.outcome.sums.get(k, 0) for k, v in summed.items()}
            self.outcome.lr_factor *= self.objective.lr_factor(plan, rows)

    def part(self, rows: list[int], world_rows: list[int]) -> Batch:
        part = self.world.part([world_rows[r] for r in rows])
        part.rows = torch.tensor([r for r in rows for _ in self.world.spans[world_rows[r]]])
        for name in PASS_FIELDS:
            setattr(part, name, self.share(part, part.signal(name)))
        return part

    def rescore(self, batch: list[Batch], world_rows: list[int]) -> None:
        """Recompute `current` as with weights that have changed since the start of the step."""
        for part in batch:
            shifted = [self.world.sequences[world_rows[r]]["logp"] + 0.1 for r in _unique_rows(part)]
            part.current = self.share(part, torch.cat(shifted))

    def backward(self, part: Batch, denominator: float, world_rows: list[int]) -> Sums:
        device = torch.device(self.world.device)
        leaves = {world_rows[r]: _leaves(self.world.sequences[world_rows[r]]) for r in _unique_rows(part)}
        current = {
            k: self.share(part, torch.cat([leaf[k] for leaf in leaves.values()])).to(device) for k in LEAVES
        }
        part = part.to(device)
        total, sums = self.objective(**current, batch=part)
        if self.objective.critic is not None:
            total = total + self.objective.critic_loss(current["values"], part)[0]
        (total / denominator).backward()
        self.outcome.gradients |= {
            row: torch.stack([_gradient(leaf[k]) for k in LEAVES]) for row, leaf in leaves.items()
        }
        return {k: v.cpu() for k, v in {**sums, "loss": total.detach() / denominator}.items()}


def _unique_rows(part: Batch) -> list[int]:
    """Return the distinct rows of a part."""
    return list(dict.fromkeys(part.rows.tolist()))


def _leaves(sequence: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: sequence[k].clone().requires_grad_() for k in LEAVES}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def on_ranks(count: int, work: Callable[[int, Reduce], Outcome]) -> list[Outcome]:
    """Run `work(rank, reduce)` on one thread per rank; `reduce` sums the values of all threads."""
    barrier, contributions = threading.Barrier(count), [torch.zeros(())] * count
    results: list[Outcome | None] = [None] * count
    errors: list[BaseException] = []

    def reducer(rank: int) -> Reduce:
        def reduce(value: Tensor) -> Tensor:
            contributions[rank] = value
            barrier.wait()
            total = torch.stack([b.clone() for b in contributions]).sum(0)
            barrier.wait()
            return total

        return reduce

    def run_rank(rank: int) -> None:
        try:
            results[rank] = work(rank, reducer(rank))
        except Exception as e:  # noqa: BLE001 - raised in the test's thread below
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return [r for r in results if r is not None]
