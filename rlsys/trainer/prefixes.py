"""Common first tokens of sequences, which a micro-batch computes once. Pure.

Sequences of a micro-batch are sorted by their tokens, so that each has the most first tokens in common with its
predecessor. A sequence shares its first k tokens with its predecessor, which computes them for both. Responses to one
prompt share the prompt, later turns share the earlier turns, and branches of a tree share the tokens before the fork.

Each sequence computes the last common token itself, because the token's prediction differs. A sequence of n tokens
that shares k computes n - k tokens; each of them attends to the k shared tokens and to those computed before it.
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
    """A sequence of which every rank knows the prompt and the length."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def routed_by(self) -> tuple[int, bool]:
        """Return the values that determine which experts an engine selected for the prompt.

        They are the weight version at the start of the response, and whether the engine read another prompt.
        """

    def __len__(self) -> int: ...


def shared_tokens(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return the number of first tokens that two sequences `[n]`, `[m]` share: all common ones but the last."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return max(0, (int(different[0]) if len(different) else n) - 1)


def _sortable(tokens: NDArray[Any]) -> bytes:
    """Encode tokens as bytes whose lexicographic order is that of the tokens."""
    return tokens.astype(">u4").tobytes()


def order_sequences(
    sequences: Sequence[NDArray[Any]], keys: Sequence[Any], limits: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """Order the sequences of a micro-batch, and count the tokens that each shares with its predecessor.

    Args:
        sequences: Token ids of each sequence, `[n_i]`.
        keys: Comparable key of each sequence. Sequences with different keys share no tokens.
        limits: Number of first tokens of each sequence that may be common with another sequence; None: all.

    Returns:
        The indices of the sequences in their new order, and the number of shared tokens at each position.
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
    """Tokens that sequences share according to their prompts alone, which every rank knows.

    Attributes:
        lengths: Number of tokens of each sequence.
        order: Indices of the sequences, sorted by prompt.
        shared: For each position in `order`, the number of tokens that the sequence shares with the previous one.
        family: For each position in `order`, the number of the sequence's family. Within a family, every sequence but
            the first shares tokens with the previous one.
        position: Position of each sequence in `order`.
    """

    lengths: Sequence[int]
    order: list[int]
    shared: list[int]
    family: list[int]
    position: list[int]

    @classmethod
    def of(cls, sequences: Sequence[Prompted], by_route: bool) -> Prefixes:
        """Find the shared tokens.

        Args:
            sequences: The sequences.
            by_route: Whether prompts share tokens only if `routed_by` is equal, as replay of experts requires.
        """
        tokens: dict[int, NDArray[Any]] = {}
        prompts = [s.prompt for s in sequences]  # keeps the objects alive, so that their ids stay unique
        for prompt in prompts:
            if id(prompt) not in tokens:
                tokens[id(prompt)] = np.asarray(prompt)
        sortable = {object_id: _sortable(value) for object_id, value in tokens.items()}
        keys: list[Hashable] = [s.routed_by if by_route else 0 for s in sequences]
        lengths = [len(s) for s in sequences]
        object_ids = [id(prompt) for prompt in prompts]
        order = sorted(
            range(len(sequences)), key=lambda i: (keys[i], sortable[object_ids[i]], -lengths[i], i)
        )
        shared = [0]
        for a, b in pairwise(order):
            if keys[a] != keys[b]:
                shared.append(0)
            elif object_ids[a] == object_ids[b]:
                shared.append(max(0, len(prompts[a]) - 1))
            else:
                shared.append(shared_tokens(tokens[object_ids[a]], tokens[object_ids[b]]))
        family = np.cumsum([not k for k in shared]).tolist()
        positions = [0] * len(order)
        for position, i in enumerate(order):
            positions[i] = position
        return cls(lengths, order, shared, family, positions)

    @classmethod
    def none(cls, lengths: Sequence[int]) -> Prefixes:
        """Return the prefixes of sequences that share no tokens."""
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
        pairs = [(self.lengths[self.order[first]], 0) for first in positions[:1]]
        for a, b in pairwise(positions):
            k = min(self.shared[a + 1 : b + 1]) if self.family[a] == self.family[b] else 0
            pairs.append((self.lengths[self.order[b]], k))
        return pairs

    def units(self, limit: int) -> list[list[int]]:
        """Return groups of neighbours that share tokens.

        A group computes at most `limit` tokens, or consists of one sequence.
        """
        groups: list[list[int]] = []
        tokens = 0
        for position, i in enumerate(self.order):
            computed_tokens = self.lengths[i] - self.shared[position]
            if self.shared[position] and tokens + computed_tokens <= limit:
                groups[-1].append(i)
                tokens += computed_tokens
            else:
                groups.append([i])
                tokens = self.lengths[i]
        return groups

    def candidates(self, token_budget: int, round_size: int) -> list[list[list[int]]]:
        """Return alternative groupings of the sequences, from the largest groups to single sequences.

        Large groups share more tokens; small groups can be balanced better over the `round_size` bins of a round.
        """
        if not any(self.shared):
            return [[[i] for i in range(len(self.lengths))]]
        computed_tokens = sum(self.lengths) - sum(self.shared)
        rounds = max(1, -(-computed_tokens // (token_budget * round_size)))
        mean = -(-computed_tokens // (rounds * round_size))
        limits = sorted(
            {min(token_budget, n) for n in (token_budget, mean, mean // 2, mean // 4)}, reverse=True
        )
        return [*(self.units(n) for n in limits), [[i] for i in self.order]]
