"""Assignment of the tensors of a weight update to the ranks that hash them, if all ranks gather all tensors. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapreplace

from rlsys.convert.config import HFConfig
from rlsys.convert.table import engine_name_of, entries, slots

PENDING_BYTES = 64 * 2**20
"""Bytes of tensors that are collected on a GPU until one kernel hashes them."""


@dataclass(frozen=True)
class HashShares:
    """Assignment of tensors to ranks.

    Attributes:
        hasher: Rank that hashes each tensor, by the tensor's name in the folder. Experts are stacked if the folder
            stacks them.
        elements: Number of elements that each rank hashes.
    """

    hasher: dict[str, int]
    elements: list[int]


def hash_shares(hf: HFConfig, ranks: int, *, experts_together: bool) -> HashShares:
    """Assign tensors to ranks in the order of the name table, each to the rank with the fewest elements so far.

    The tensors of one bucket are therefore distributed over the ranks.

    Args:
        hf: The model's configuration.
        ranks: Number of ranks.
        experts_together: Whether one rank hashes all experts of a layer. SHA-256 requires it; a GPU's digest is a sum
            and does not.
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
    elements = [0] * ranks
    heap = [(0, rank) for rank in range(ranks)]  # (elements, rank)
    for key, names in units.items():
        _, rank = heap[0]
        elements[rank] += sizes[key]
        heapreplace(heap, (elements[rank], rank))
        hasher |= dict.fromkeys(names, rank)
    return HashShares(hasher, elements)
