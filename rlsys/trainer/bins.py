"""Assignment of sequences to micro-batches: bins of bounded size, balanced over data-parallel ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import TypeVar

from rlsys.convert.prefixes import computed, cost
from rlsys.trainer.prefixes import Prefixes

T = TypeVar("T")


def plan_bins(
    lengths: Sequence[int],
    token_budget: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    multiple: int = 1,
    crossover: float = math.inf,
    prefixes: Prefixes | None = None,
) -> list[list[int]]:
    """Return the indices of the sequences of each of this rank's micro-batches. See `pack`.

    Sequences in one bin compute their common tokens once; sequences in several bins are balanced better. The result
    is the plan with the smallest sum, over rounds, of the cost of the most expensive bin.
    """
    round_size = dp_size * multiple

    def members_of(indices: Sequence[int]) -> list[tuple[int, int]]:
        return [(lengths[i], 0) for i in indices] if prefixes is None else prefixes.of_bin(indices)

    def cost_of(indices: Sequence[int]) -> float:
        return cost(members_of(indices), crossover)

    def bins_of(units: list[list[int]]) -> list[list[int]]:
        sizes = [int(computed(members_of(unit))) for unit in units]
        costs = [cost_of(unit) for unit in units]

        def fill_rounds(rounds: int) -> list[list[int]] | None:
            return fill(sizes, costs, rounds * round_size, token_budget)

        packed = _smallest(fill_rounds, max(1, -(-sum(sizes) // (token_budget * round_size))))
        return sorted(([i for u in b for i in units[u]] for b in packed), key=lambda b: -cost_of(b))

    single_units = [[i] for i in range(len(lengths))]
    has_prefixes = prefixes is not None and prefixes.any
    ways = (
        prefixes.candidates(token_budget, round_size)
        if prefixes is not None and has_prefixes
        else [single_units]
    )
    plans = [bins_of(units) for units in ways]
    bins = min(plans, key=lambda p: (sum(map(cost_of, p[::dp_size])), len(p)))
    rounds_of_bins = [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]
    return [
        rank_bins[dp_rank if k % 2 == 0 else dp_size - 1 - dp_rank]
        for k, rank_bins in enumerate(rounds_of_bins)
    ]


def _smallest(find: Callable[[int], T | None], least: int) -> T:
    """Return the result of `find` for the smallest number from `least` on with a result.

    Every larger number must have one, too. The search doubles its steps and then bisects, since each call of `find`
    is slow for tens of thousands of sequences.
    """
    step, below, result = 1, least - 1, find(at := least)
    while result is None:
        below, at, step = at, at + step, 2 * step
        result = find(at)
    while at - below > 1:
        middle = (at + below) // 2
        if (fewer := find(middle)) is None:
            below = middle
        else:
            at, result = middle, fewer
    return result


def fill(lengths: Sequence[int], costs: Sequence[float], bins: int, budget: int) -> list[list[int]] | None:
    """Assign units to `bins` bins of at most `budget` tokens; None if a unit fits into no bin."""
    out: list[list[int]] = [[] for _ in range(bins)]
    tokens, cost = [0] * bins, [0.0] * bins
    fitting = [(0.0, b) for b in range(bins)]
    full: list[tuple[int, int]] = []  # by tokens: bins without room for the current lengths
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while full and full[0][0] + lengths[i] <= budget:
            b = heappop(full)[1]
            heappush(fitting, (cost[b], b))
        while fitting and out[b := fitting[0][1]] and tokens[b] + lengths[i] > budget:
            heappush(full, (tokens[b], heappop(fitting)[1]))
        if not fitting:
            return None
        b = fitting[0][1]
        out[b].append(i)
        tokens[b] += lengths[i]
        cost[b] += costs[i]
        heapreplace(fitting, (cost[b], b))
    return out
