"""Common first tokens of sequences, which a micro-batch computes once. Pure.

Sequences of a micro-batch are sorted by their tokens, so that each has most in common with its predecessor. It shares
its first k tokens with that one, and only the predecessor computes them. Responses to one prompt share the prompt,
later turns share the earlier ones, and branches of a tree share the tokens before the fork.

Each sequence computes the last common token itself, because its prediction differs. A sequence of n tokens that
shares k computes n - k tokens, each of which attends to the k shared ones and to its own predecessors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsys.convert.prefixes import computed, cost


class Prompted(Protocol):
    """A sequence, known by its prompt."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def routed_by(self) -> tuple[int, bool]:
        """Return the first weight version, and whether the engine read another prompt.

        Both determine the experts that an engine chose for the prompt.
        """

    def __len__(self) -> int: ...


def shared_tokens(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return the number of common first tokens of two sequences `[n]`, `[m]`, without the last common one."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return max(0, (int(different[0]) if len(different) else n) - 1)


def _sortable(tokens: NDArray[Any]) -> bytes:
    """Return bytes whose order is that of the tokens."""
    return tokens.astype(">u4").tobytes()


def in_order(
    sequences: Sequence[NDArray[Any]], keys: Sequence[Any], limits: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """Order the sequences of a micro-batch, and count the tokens that each shares with its predecessor.

    Args:
        sequences: Their tokens, `[n_i]` each.
        keys: Sequences with different keys share nothing. Comparable.
        limits: For each sequence the number of its first tokens that may be common with another one; None: all.
    """
    order = sorted(range(len(sequences)), key=lambda i: (keys[i], _sortable(sequences[i]), i))
    shared = [0]
    for a, b in pairwise(order):
        common = shared_tokens(sequences[a], sequences[b]) if keys[a] == keys[b] else 0
        # Up to `limit` tokens may be common; the last of them is not shared.
        shared.append(min([common, *(limit - 1 for limit in (limits[a], limits[b]) if limit is not None)]))
    return order, shared


@dataclass(frozen=True)
class Prefixes:
    """Common tokens of sequences as far as their prompts determine them, which every rank knows.

    `order`: all sequences, sorted by their prompts. `shared`: for each position in `order` the number of tokens that
    its sequence shares with the previous one. `family`: for each position the number of its family, in which all
    neighbours share tokens. `position`: position of each sequence in `order`.
    """

    lengths: Sequence[int]
    order: list[int]
    shared: list[int]
    family: list[int]
    position: list[int]

    @classmethod
    def of(cls, sequences: Sequence[Prompted], by_route: bool) -> Prefixes:
        """Find the common tokens. `by_route`: experts are replayed, so only equally routed prompts are shared."""
        tokens: dict[int, NDArray[Any]] = {}
        prompts = [s.prompt for s in sequences]  # keeps the objects alive, so that their ids stay unique
        for prompt in prompts:
            if id(prompt) not in tokens:
                tokens[id(prompt)] = np.asarray(prompt)
        sortable = {name: _sortable(value) for name, value in tokens.items()}
        keys: list[Hashable] = [s.routed_by if by_route else 0 for s in sequences]
        lengths = [len(s) for s in sequences]
        names = [id(prompt) for prompt in prompts]
        order = sorted(range(len(sequences)), key=lambda i: (keys[i], sortable[names[i]], -lengths[i], i))
        shared = [0]
        for a, b in pairwise(order):
            if keys[a] != keys[b]:
                shared.append(0)
            elif names[a] == names[b]:
                shared.append(max(0, len(prompts[a]) - 1))
            else:
                shared.append(shared_tokens(tokens[names[a]], tokens[names[b]]))
        family = np.cumsum([not k for k in shared]).tolist()
        position = [0] * len(order)
        for at, i in enumerate(order):
            position[i] = at
        return cls(lengths, order, shared, family, position)

    @classmethod
    def none(cls, lengths: Sequence[int]) -> Prefixes:
        """Return the prefixes of sequences that share nothing."""
        indices = list(range(len(lengths)))
        return cls(lengths, indices, [0] * len(indices), indices, indices)

    def computed(self, members: Sequence[int]) -> int:
        """Return the number of computed tokens of one micro-batch."""
        return int(computed(self.of_bin(members)))

    def cost(self, members: Sequence[int], crossover: float) -> float:
        """Return the cost of one micro-batch (rlsys.convert.prefixes)."""
        return cost(self.of_bin(members), crossover)

    def of_bin(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Return (length, shared tokens) of the sequences of one micro-batch."""
        positions = sorted(self.position[i] for i in members)
        out = [(self.lengths[self.order[at]], 0) for at in positions[:1]]
        for a, b in pairwise(positions):
            k = min(self.shared[a + 1 : b + 1]) if self.family[a] == self.family[b] else 0
            out.append((self.lengths[self.order[b]], k))
        return out

    def units(self, limit: int) -> list[list[int]]:
        """Return groups of neighbours that share tokens; each computes at most `limit` tokens or has one sequence."""
        out: list[list[int]] = []
        tokens = 0
        for at, i in enumerate(self.order):
            computed_tokens = self.lengths[i] - self.shared[at]
            if self.shared[at] and tokens + computed_tokens <= limit:
                out[-1].append(i)
                tokens += computed_tokens
            else:
                out.append([i])
                tokens = self.lengths[i]
        return out

    def candidates(self, token_budget: int, round_size: int) -> list[list[list[int]]]:
        """Return alternative groupings of the sequences, from the largest groups to single sequences.

        Large groups share most; small ones can be balanced better over `round_size` ranks.
        """
        if not any(self.shared):
            return [[[i] for i in range(len(self.lengths))]]
        computed_tokens = sum(self.lengths) - sum(self.shared)
        rounds = max(1, -(-computed_tokens // (token_budget * round_size)))
        even = -(-computed_tokens // (rounds * round_size))
        limits = sorted(
            {min(token_budget, n) for n in (token_budget, even, even // 2, even // 4)}, reverse=True
        )
        return [*(self.units(n) for n in limits), [[i] for i in self.order]]
