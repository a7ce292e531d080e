"""Assignment of sequences to micro-batches: bins of bounded size, balanced over data-parallel ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import TypeVar

from rlsys.trainer.prefixes import Prefixes

T = TypeVar("T")


def plan_bins(
    prefixes: Prefixes,
    token_budget: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    multiple: int = 1,
    crossover: float = math.inf,
) -> list[list[int]]:
    """Return the indices of the sequences of each of this rank's micro-batches. See `pack`.

    Sequences in one bin compute their common tokens once; sequences in several bins are balanced better. The result
    is the plan with the smallest sum, over rounds, of the cost of the most expensive bin.
    """
    round_size = dp_size * multiple
    plans = [
        _fill_rounds(prefixes, units, round_size, token_budget, crossover)
        for units in prefixes.candidates(token_budget, round_size)
    ]
    bins = min(plans, key=lambda p: (sum(prefixes.cost(b, crossover) for b in p[::dp_size]), len(p)))
    rounds = [bins[i : i + dp_size] for i in range(0, len(bins), dp_size)]
    return [rank_bins[dp_rank if k % 2 == 0 else dp_size - 1 - dp_rank] for k, rank_bins in enumerate(rounds)]


def _fill_rounds(
    prefixes: Prefixes, units: Sequence[Sequence[int]], round_size: int, token_budget: int, crossover: float
) -> list[list[int]]:
    """Return the bins of the fewest rounds that hold all units, the most expensive bin first."""
    sizes = [prefixes.computed(unit) for unit in units]
    costs = [prefixes.cost(unit, crossover) for unit in units]
    packed = _smallest(
        lambda rounds: fill(sizes, costs, rounds * round_size, token_budget),
        max(1, -(-sum(sizes) // (token_budget * round_size))),
    )
    bins = [[i for unit in members for i in units[unit]] for members in packed]
    return sorted(bins, key=lambda b: -prefixes.cost(b, crossover))


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
