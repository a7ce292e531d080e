"""Assignment of the tensors of a weight update to the ranks that hash them, if all ranks gather all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapreplace

from rlsys.convert.config import HFConfig
from rlsys.convert.table import engine_name_of, entries, slots

PENDING_BYTES = 64 * 2**20
"""Size of the batch of tensors on a GPU that one kernel hashes."""


@dataclass(frozen=True)
class HashShares:
    """Assignment of tensors to ranks.

    Attributes:
        hasher: name of a tensor in the folder, experts stacked as there -> the rank that hashes it.
        elements: numbers that each rank hashes.
    """

    hasher: dict[str, int]
    elements: list[int]


def hash_shares(hf: HFConfig, ranks: int, *, experts_together: bool) -> HashShares:
    """Assign tensors to ranks in the order of the name table, each to the rank with the fewest elements so far.

    So the tensors of one bucket are distributed over the ranks.

    Args:
        experts_together: whether one rank hashes all experts of a layer: SHA-256 needs it, a GPU's digest is a sum.
    """
    units: dict[Hashable, list[str]] = {}
    sizes: Counter[Hashable] = Counter()
    stacks = slots(hf)
    for entry in entries(hf):
        for name in entry.hf:
            stack = stacks.get(name)
            key: Hashable = stack.name if stack else engine_name_of(entry, hf)
            if not stack and not experts_together and entry.expert is not None:
                key = key, entry.expert
            units.setdefault(key, []).append(stack.name if stack else name)
        sizes[key] += entry.elements
    hasher: dict[str, int] = {}
    loads, least = [0] * ranks, [(0, rank) for rank in range(ranks)]
    for key, names in units.items():
        _, rank = least[0]
        loads[rank] += sizes[key]
        heapreplace(least, (loads[rank], rank))
        hasher |= dict.fromkeys(names, rank)
    return HashShares(hasher, loads)
