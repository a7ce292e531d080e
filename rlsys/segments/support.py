"""Encoding of sampling masks: for each token, the ids that sampling with top_k, top_p and min_p allowed.

The encoding has one row per token. A row has the allowed ids except the sampled one, in ascending order, each as its
distance from the previous one (the first as its distance from -1) in LEB128, and then a 0. A token without other
allowed ids takes 1 byte.

No byte of a distance is 0. Therefore a 0 always ends a row, and rows can be concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BITS = 7
_CONTINUATION = 1 << _BITS


def encode(allowed_ids: Sequence[Sequence[int]], sampled_ids: Sequence[int]) -> bytes:
    """Encode the masks of several tokens.

    Args:
        allowed_ids: for each token, the ids that sampling did not mask, in any order.
        sampled_ids: the sampled ids, [tokens].

    Returns:
        one row per token.

    Raises:
        ValueError: the number of rows is not the number of tokens, a sampled id is not in its row, or a row
            contains an id twice or a negative id.
    """
    sizes = np.array([len(row) for row in allowed_ids], np.int64)
    if len(sizes) != len(sampled_ids):
        raise ValueError(
            f"{len(sizes)} rows of allowed ids for {len(sampled_ids)} tokens; expected one per token"
        )
    row = np.repeat(np.arange(len(sizes)), sizes)
    ids = np.fromiter(chain.from_iterable(allowed_ids), np.int64, len(row))
    order = np.lexsort((ids, row))
    row, ids = row[order], ids[order]
    is_other = ids != np.asarray(sampled_ids, np.int64)[row]
    counts = np.bincount(row[~is_other], minlength=len(sizes))
    if np.any(counts != 1):
        token = int(np.argmax(counts != 1))
        raise ValueError(
            f"token {token}: its row of allowed ids must contain the sampled id {sampled_ids[token]} once; found "
            f"{counts[token]} occurrences"
        )
    row, ids = row[is_other], ids[is_other]
    previous = np.where(np.diff(row, prepend=-1) != 0, -1, np.roll(ids, 1))
    distances = ids - previous
    if len(distances) and distances.min() < 1:
        first = int(np.argmax(distances < 1))
        problem = "expected ids of 0 or more" if ids[first] < 0 else "expected it once"
        times = "" if ids[first] < 0 else " twice"
        raise ValueError(
            f"token {row[first]}: its row of allowed ids contains {ids[first]}{times}; {problem}"
        )
    ends = np.bincount(row, minlength=len(sizes)).cumsum()
    return _leb128(np.insert(distances, ends, 0))


def decode(
    support: bytes | bytearray | memoryview, sampled_ids: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode the masks of several tokens to pairs of a token and an id that its sampling allowed.

    Args:
        support: one row per token.
        sampled_ids: the sampled ids, [tokens].

    Returns:
        the token of each pair as an index into `sampled_ids`, [N], and the id of each pair, [N]. The pairs with
        sampled ids are the last ones.

    Raises:
        ValueError: the number of rows is not the number of tokens, or the last row is incomplete.
    """
    tokens = np.asarray(sampled_ids, np.int64)
    values = _decode_leb128(np.frombuffer(support, np.uint8))
    ends = values == 0
    if (rows := int(ends.sum())) != len(tokens):
        raise ValueError(f"{rows} rows of allowed ids for {len(tokens)} tokens; expected one per token")
    row = ends.cumsum() - ends
    cumulative = values.cumsum()
    base = np.concatenate([[0], cumulative[ends]])[row]
    is_id = ~ends
    positions = np.arange(len(tokens))
    return np.concatenate([row[is_id], positions]), np.concatenate([(cumulative - base - 1)[is_id], tokens])


def _leb128(values: NDArray[np.int64]) -> bytes:
    sizes = np.ones(len(values), np.int64)
    for shift in range(_BITS, 63, _BITS):
        sizes += values >> shift > 0
    starts = sizes.cumsum() - sizes
    encoded = np.empty(int(sizes.sum()), np.uint8)
    for group in range(int(np.max(sizes, initial=0))):
        has_group = sizes > group
        low = (values[has_group] >> (_BITS * group)) & (_CONTINUATION - 1)
        encoded[starts[has_group] + group] = low | np.where(sizes[has_group] > group + 1, _CONTINUATION, 0)
    return encoded.tobytes()


def _decode_leb128(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    last = data < _CONTINUATION
    if len(data) and not last[-1]:
        raise ValueError("truncated: the rows of allowed ids end within a number")
    starts = np.flatnonzero(np.concatenate([[True], last[:-1]])) if len(data) else np.empty(0, np.int64)
    group = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    parts = (data & (_CONTINUATION - 1)).astype(np.int64) << (_BITS * group)
    return np.add.reduceat(parts, starts) if len(starts) else parts
