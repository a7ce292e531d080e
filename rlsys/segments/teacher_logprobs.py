"""A teacher's opinions of a response: the ids that it finds most probable in the place of each response token, and
their log-probs.

    bytes    ids int32[tokens, K], logp float32[tokens, K]; little-endian, so that K follows from their number
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ENTRY = 8
"""Bytes of an id and its log-prob."""


def encode(ids: NDArray[np.int32], logp: NDArray[np.float32]) -> bytes:
    """Of `[tokens, K]` both. Raises ValueError for other shapes, and for what is no log-prob."""
    if ids.ndim != 2 or ids.shape != logp.shape or not ids.size:
        raise ValueError(f"ids {list(ids.shape)} and log-probs {list(logp.shape)}, expected [tokens, K] both")
    if not np.isfinite(logp).all():
        raise ValueError("a log-prob that is not finite")
    return ids.astype("<i4").tobytes() + logp.astype("<f4").tobytes()


def decode(opinions: bytes, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids and log-probs `[tokens, K]`. Raises ValueError when these are not of so many tokens."""
    if not opinions or len(opinions) % (_ENTRY * tokens):
        raise ValueError(f"{len(opinions)} bytes of a teacher's opinions for {tokens} tokens")
    half = len(opinions) // 2
    ids = np.frombuffer(opinions, "<i4", half // 4).reshape(tokens, -1)
    return ids, np.frombuffer(opinions, "<f4", half // 4, half).reshape(tokens, -1)
