"""One made-up train step with every signal there is, cut into parts in any way: what the algorithm tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.losses import Sums
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import Reduce, alone
from rlsys.algo_section import AlgoSection

DOUBLE = torch.float64
PASSED = ("old", "now", "ewma", "ref", "entropy", "values")
"""Fields of a part that come out of forward passes."""


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
    values = {name: torch.tensor(v, dtype=DOUBLE) for name, v in fields.items()}
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
    """`groups` groups of `size` samples: prompts of 2 tokens, responses of 1 to 9, weights of versions 4 to 7."""

    seed: int = 0
    groups: int = 4
    size: int = 5
    scale: float = 0.3
    samples: Samples = field(init=False)
    sequences: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def randn(n: int) -> Tensor:
            return torch.randn(n, generator=g, dtype=DOUBLE)

        count = self.groups * self.size
        lengths = torch.randint(1, 10, (count,), generator=g)
        self.sequences = [self._sequence(int(n), randn, g) for n in lengths]
        won = torch.rand(count, generator=g, dtype=DOUBLE)
        self.samples = Samples(
            rewards=(won > 0.5).to(DOUBLE),
            group_ids=torch.arange(count) // self.size,
            lengths=lengths,
            step=3,
            prompt_index=torch.arange(count) // self.size + 100,
            answers=torch.randint(0, 3, (count,), generator=g),
            log_likelihood=randn(count),
            tool_penalty=torch.rand(count, generator=g, dtype=DOUBLE),
            transferred=torch.rand(count, generator=g) > 0.7,
        )

    def _sequence(self, n: int, randn: Callable[[int], Tensor], g: torch.Generator) -> dict[str, Tensor]:
        mu = -randn(n + 2).abs() - 0.1
        old = mu + self.scale * randn(n + 2)
        now = old + self.scale * randn(n + 2)
        versions = torch.sort(torch.randint(4, 8, (n + 2,), generator=g)).values
        behaviour = torch.where(versions < 5, torch.full_like(mu, torch.nan), old + 0.1 * randn(n + 2))
        return {
            "mask": torch.cat([torch.zeros(2, dtype=DOUBLE), torch.ones(n, dtype=DOUBLE)]),
            "mu": mu, "old": old, "now": now, "ewma": now - 0.1, "ref": old + 0.2 * randn(n + 2),
            "behaviour": behaviour, "versions": versions,
            "entropy": randn(n + 2).abs(), "values": randn(n + 2), "logp": now + 0.02 * randn(n + 2),
        }  # fmt: skip

    def part(self, rows: Sequence[int]) -> Batch:
        picked = [self.sequences[r] for r in rows]
        fields = {k: torch.cat([s[k] for s in picked]) for k in picked[0] if k != "logp"}
        lengths = [len(s["mask"]) for s in picked]
        return Batch(
            tokens=torch.zeros(sum(lengths), dtype=torch.long),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            rows=torch.tensor(list(rows)),
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
    reduce: Reduce = alone,
    share: Share = all_of_it,
) -> Outcome:
    """One update. `cut`: rows to train -> rows of each of this rank's parts. `share`: see Share."""
    objective = Objective(algo)
    plan = objective.plan(world.samples)
    split = cut(plan.rows)
    parts = [world.part(rows) for rows in split]
    for part in parts:
        for name in PASSED:
            setattr(part, name, share(part, part.signal(name)))
    objective.finish(plan, parts, reduce)
    objective.prepare(parts, reduce)
    gradients: dict[int, Tensor] = {}
    loss, sums = torch.zeros((), dtype=DOUBLE), {}
    for rows, part in zip(split, parts, strict=True):
        leaves = {
            r: {k: world.sequences[r][k].clone().requires_grad_() for k in ("logp", "entropy", "values")}
            for r in rows
        }
        current = {k: torch.cat([leaves[r][k] for r in rows]) for k in ("logp", "entropy", "values")}
        total, more = objective(**{k: share(part, v) for k, v in current.items()}, batch=part)
        (total / plan.denominator).backward()
        loss = loss + total.detach() / plan.denominator
        sums = {k: v + sums.get(k, 0) for k, v in more.items()}
        for r in rows:
            found = [leaves[r][k].grad for k in ("logp", "entropy", "values")]
            gradients[r] = torch.stack(
                [torch.zeros_like(leaves[r]["logp"]) if f is None else f for f in found]
            )
    names = sorted(sums)
    summed = dict(zip(names, (reduce(sums[n].double()) for n in names), strict=True))
    return Outcome(
        loss=float(reduce(loss)),
        gradients=gradients,
        sums=summed,
        metrics=objective.metrics(summed),
        denominator=plan.denominator,
        lr_factor=objective.lr_factor(plan, plan.rows),
        rows=plan.rows,
    )


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
