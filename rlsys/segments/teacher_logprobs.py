"""Encoding of a teacher's top-k log-probs at each response token.

The bytes are ids int32[tokens, K] and log-probs float32[tokens, K], little-endian; their number determines K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ENTRY = 8
"""Size of an id and its log-prob in bytes."""


def encode(ids: NDArray[np.int32], logp: NDArray[np.float32]) -> bytes:
    """Encode ids and log-probs, both `[tokens, K]`.

    Raises:
        ValueError: the arrays have other shapes or no elements, or a log-prob is not finite.
    """
    if ids.ndim != 2 or ids.shape != logp.shape or not ids.size:
        raise ValueError(
            f"ids have shape {list(ids.shape)}, log-probs {list(logp.shape)}; expected both to be [tokens, K]"
        )
    if not np.isfinite(logp).all():
        raise ValueError("a teacher log-prob is not finite; expected finite numbers")
    return ids.astype("<i4").tobytes() + logp.astype("<f4").tobytes()


def decode(data: bytes, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Decode ids and log-probs, both `[tokens, K]`.

    Raises:
        ValueError: the size of `data` is not a positive multiple of 8 * tokens bytes.
    """
    if not data or len(data) % (_ENTRY * tokens):
        raise ValueError(
            f"{len(data)} bytes of teacher log-probs for {tokens} tokens; expected a positive multiple of "
            f"{_ENTRY * tokens} bytes"
        )
    half = len(data) // 2
    ids = np.frombuffer(data, "<i4", half // 4).reshape(tokens, -1)
    return ids, np.frombuffer(data, "<f4", half // 4, half).reshape(tokens, -1)
