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
    """Assign sequences to the micro-batches of this rank.

    Sequences in the same bin compute their common tokens once; sequences in several bins are balanced better. Of the
    groupings in Prefixes.candidates, this function chooses the one with the smallest cost: the sum, over rounds, of
    the cost of the most expensive bin.

    Args:
        prefixes: Lengths and common tokens of all sequences.
        token_budget: Maximum number of computed tokens per bin; a longer sequence gets a separate bin.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        multiple: The number of bins per rank is a multiple of it.
        crossover: Length of a sequence whose attention costs as much as everything else (rlsys.convert.flops).

    Returns:
        The indices of the sequences in each micro-batch; a micro-batch without sequences has an empty list.
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
    """Distribute units over the fewest rounds of `round_size` bins.

    Returns:
        The indices of the sequences in each bin, the most expensive bin first.
    """
    sizes = [prefixes.computed(unit) for unit in units]
    costs = [prefixes.cost(unit, crossover) for unit in units]
    units_of_bins = _first_result(
        lambda rounds: fill(sizes, costs, rounds * round_size, token_budget),
        max(1, -(-sum(sizes) // (token_budget * round_size))),
    )
    bins = [[i for unit in members for i in units[unit]] for members in units_of_bins]
    return sorted(bins, key=lambda b: -prefixes.cost(b, crossover))


def _first_result(find: Callable[[int], T | None], least: int) -> T:
    """Return `find(n)` for the smallest n, at least `least`, for which it is not None.

    `find` must have a result for every larger number, too. Each call is slow for tens of thousands of sequences, so
    the search doubles its step until it finds a result, and then bisects.
    """
    below = least - 1
    n, step = least, 1
    result = find(n)
    while result is None:
        below = n
        n, step = n + step, 2 * step
        result = find(n)
    while n - below > 1:
        middle = (n + below) // 2
        middle_result = find(middle)
        if middle_result is None:
            below = middle
        else:
            n, result = middle, middle_result
    return result


def fill(lengths: Sequence[int], costs: Sequence[float], bins: int, budget: int) -> list[list[int]] | None:
    """Assign each unit, the longest first, to the cheapest bin that it fits into.

    Args:
        lengths: Number of tokens of each unit. A unit longer than `budget` fits into an empty bin only.
        costs: Cost of each unit.
        bins: Number of bins.
        budget: Maximum number of tokens per bin.

    Returns:
        The indices of the units in each bin; None if a unit fits into no bin.
    """
    members: list[list[int]] = [[] for _ in range(bins)]
    tokens, cost = [0] * bins, [0.0] * bins
    # Heap of (cost, bin).
    candidates = [(0.0, b) for b in range(bins)]
    # Heap of (tokens, bin): bins that units of the current length do not fit into.
    full: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while full and full[0][0] + lengths[i] <= budget:
            b = heappop(full)[1]
            heappush(candidates, (cost[b], b))
        while candidates and members[b := candidates[0][1]] and tokens[b] + lengths[i] > budget:
            heappush(full, (tokens[b], heappop(candidates)[1]))
        if not candidates:
            return None
        b = candidates[0][1]
        members[b].append(i)
        tokens[b] += lengths[i]
        cost[b] += costs[i]
        heapreplace(candidates, (cost[b], b))
    return members
