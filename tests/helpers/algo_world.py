"""One made-up train step with every signal there is, cut into parts in any way: what the algorithm tests share."""

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
PASSED = ("old", "current", "ewma", "ref", "entropy", "values", "sum_pi_squared")
"""Fields of a part that come out of forward passes."""
LEAVES = ("logp", "entropy", "values", "divergence")
"""What has gradients."""


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
    """Sequences without prompts, mask 1; every field is float64 `[T]`, row i is sequence i."""
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
    """`groups` groups of `size` samples with `kinds` rewards: prompts of 2 tokens, responses of 1 to 9, weights of
    versions 4 to 7."""

    seed: int = 0
    groups: int = 4
    size: int = 5
    scale: float = 0.3
    kinds: int = 1
    device: str = "cpu"
    """Where the loss is computed, as in the trainer: plans and bounds are made on the CPU."""
    graded: bool = False  # rewards between 0 and 1: with plain ones few groups have one best sample
    samples: Samples = field(init=False)
    sequences: list[dict[str, Tensor]] = field(init=False)
    """The tokens of each sample, all its sequences one behind the other."""
    spans: list[list[int]] = field(init=False)
    """The lengths of each sample's sequences."""

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def randn(n: int) -> Tensor:
            return torch.randn(n, generator=g, dtype=DOUBLE)

        count = self.groups * self.size
        lengths = torch.randint(1, 10, (count,), generator=g)
        self.sequences = [self._sequence(int(n), randn, g) for n in lengths]
        self.spans = [[len(s["mask"])] for s in self.sequences]
        won = torch.rand((count, self.kinds), generator=g, dtype=DOUBLE)
        self.samples = Samples(
            rewards=(won if self.graded else (won > 0.5).to(DOUBLE)).squeeze(1),
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
        """The groups, as the trainer takes them; a sample's id is its row."""
        rewards = self.samples.reward.tolist()
        rows = [range(g * self.size, (g + 1) * self.size) for g in range(self.groups)]
        return [
            SampleGroup(g, g, [Sample(r, g, i, [1], 0, reward=rewards[r]) for i, r in enumerate(members)])
            for g, members in enumerate(rows)
        ]

    def part(self, rows: Sequence[int]) -> Batch:
        picked = [self.sequences[r] for r in rows]
        fields = {k: torch.cat([s[k] for s in picked]) for k in picked[0] if k not in ("logp", "divergence")}
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
"""(part, values `[T]` of its tokens) -> the same values, of which a context-parallel rank computed only its share."""


def all_of_it(part: Batch, values: Tensor) -> Tensor:
    """The Share of one rank."""
    return values


def run(
    world: World,
    algo: AlgoSection,
    cut: Callable[[list[int]], list[list[int]]],
    reduce: Reduce = single_rank,
    share: Share = all_of_it,
) -> Outcome:
    """One train step: its updates, and the extra one on what was put off, if that is due.

    `cut`: rows of an update -> rows of each of this rank's parts. `share`: see Share.
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
    """What rlsys.trainer.step does, on a world; adds to `outcome`."""

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
        known: list[int],
        epochs: int = 1,
    ) -> None:
        """An update for each list of rows of the plan's table, cut into parts. `known`: their rows in the world."""
        batches = [[self.part(rows, known) for rows in cut] for cut in cuts]
        self.objective.finish(plan, [part for batch in batches for part in batch], self.reduce)
        for i, (batch, rows) in enumerate(list(zip(batches, updates, strict=True)) * epochs):
            if i:
                self.rescore(batch, known)
            if not self.objective.trains(batch, self.reduce):
                continue
            if self.objective.requirements.prepares:
                self.objective.prepare(batch, self.reduce)
            sums: Sums = {}
            for part in batch:
                part_sums = self.backward(part, plan.denominator / len(updates), known)
                sums = {k: v + sums.get(k, 0) for k, v in part_sums.items()}
            summed = {name: self.reduce(sums[name].double()) for name in sorted(sums)}
            self.outcome.loss += float(summed.pop("loss"))
            self.objective.after_step(list, loss_metrics(summed, self.objective.requirements.needs))
            self.outcome.sums = {k: v + self.outcome.sums.get(k, 0) for k, v in summed.items()}
            self.outcome.lr_factor *= self.objective.lr_factor(plan, rows)

    def part(self, rows: list[int], known: list[int]) -> Batch:
        part = self.world.part([known[r] for r in rows])
        part.rows = torch.tensor([r for r in rows for _ in self.world.spans[known[r]]])
        for name in PASSED:
            setattr(part, name, self.share(part, part.signal(name)))
        return part

    def rescore(self, batch: list[Batch], known: list[int]) -> None:
        """Other weights than at the start of the step."""
        for part in batch:
            moved = [self.world.sequences[known[r]]["logp"] + 0.1 for r in _once(part)]
            part.current = self.share(part, torch.cat(moved))

    def backward(self, part: Batch, denominator: float, known: list[int]) -> Sums:
        device = torch.device(self.world.device)
        leaves = {known[r]: _leaves(self.world.sequences[known[r]]) for r in _once(part)}
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


def _once(part: Batch) -> list[int]:
    """The rows of a part, each once."""
    return list(dict.fromkeys(part.rows.tolist()))


def _leaves(sequence: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: sequence[k].clone().requires_grad_() for k in LEAVES}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def on_ranks(count: int, work: Callable[[int, Reduce], Outcome]) -> list[Outcome]:
    """`work(rank, reduce)` on threads whose reduce adds up what all of them give at the same call."""
    barrier, box = threading.Barrier(count), [torch.zeros(())] * count
    results: list[Outcome | None] = [None] * count
    errors: list[BaseException] = []

    def reducer(rank: int) -> Reduce:
        def reduce(value: Tensor) -> Tensor:
            box[rank] = value
            barrier.wait()
            total = torch.stack([b.clone() for b in box]).sum(0)
            barrier.wait()
            return total

        return reduce

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank, reducer(rank))
        except Exception as e:  # noqa: BLE001 - told to the test's thread below
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return [r for r in results if r is not None]
