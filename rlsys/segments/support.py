"""The support of a drawn token: the ids that sampling had kept (rollout.top_k, top_p, min_p), itself among them.

    bytes    one row a token, one behind the other: the other ids, ascending, each as its distance from the one before
             it (from -1 at first) in LEB128; then a 0. A token that was drawn from itself alone takes 1 byte.

No distance is 0 and no byte of a longer number is, so a 0 ends a row and nothing else, and rows can be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BITS = 7
_MORE = 1 << _BITS


def encode(kept: Sequence[Sequence[int]], drawn: Sequence[int]) -> bytes:
    """Rows of the ids `kept` for each token that was `drawn`. Raises ValueError: one of these is not among its own
    row, or an id is there twice."""
    sizes = np.array([len(row) for row in kept], np.int64)
    if len(sizes) != len(drawn):
        raise ValueError(f"{len(sizes)} rows of kept ids for {len(drawn)} tokens")
    row = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.fromiter(chain.from_iterable(kept), np.int64, len(row))
    order = np.lexsort((ids, row))
    row, ids = row[order], ids[order]
    other = ids != np.asarray(drawn, np.int64)[row]
    if not np.array_equal(np.bincount(row[~other], minlength=len(sizes)), np.ones(len(sizes))):
        raise ValueError("a token was drawn that is not once among the ids that were kept for it")
    row, ids = row[other], ids[other]
    before = np.where(np.diff(row, prepend=-1) != 0, -1, np.roll(ids, 1))
    distances = ids - before
    if len(distances) and distances.min() < 1:
        raise ValueError("an id is below 0, or twice among those that were kept for a token")
    ends = np.bincount(row, minlength=len(sizes)).cumsum()
    return _leb128(np.insert(distances, ends, 0))


def decode(
    support: bytes | bytearray | memoryview, drawn: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The token `[N]` that each kept id belongs to, as its place in `drawn`, and the id `[N]`; the drawn ones last.

    Raises ValueError when there is not one row for each of `drawn`.
    """
    tokens = np.asarray(drawn, np.int64)
    values = _numbers(np.frombuffer(support, np.uint8))
    ends = values == 0
    if (rows := int(ends.sum())) != len(tokens):
        raise ValueError(f"{rows} rows of kept ids for {len(tokens)} tokens")
    row = ends.cumsum() - ends
    reached = values.cumsum()
    base = np.concatenate([[0], reached[ends]])[row]
    others = ~ends
    own = np.arange(len(tokens))
    return np.concatenate([row[others], own]), np.concatenate([(reached - base - 1)[others], tokens])


def _leb128(values: NDArray[np.int64]) -> bytes:
    sizes = np.ones(len(values), np.int64)
    for shift in range(_BITS, 63, _BITS):
        sizes += values >> shift > 0
    starts = sizes.cumsum() - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    for place in range(int(np.max(sizes, initial=0))):
        there = sizes > place
        low = (values[there] >> (_BITS * place)) & (_MORE - 1)
        out[starts[there] + place] = low | np.where(sizes[there] > place + 1, _MORE, 0)
    return out.tobytes()


def _numbers(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    last = data < _MORE
    if len(data) and not last[-1]:
        raise ValueError("kept ids end within a number")
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]])) if len(data) else np.empty(0, np.int64)
    place = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    parts = (data & (_MORE - 1)).astype(np.int64) << (_BITS * place)
    return np.add.reduceat(parts, starts) if len(starts) else parts
