"""Growable arrays of token ids and log-probs. Standard library only: every process imports this file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    TokenIds = array[int]
    LogProbs = array[float]
else:  # Python 3.11 has no array[int]
    TokenIds = LogProbs = array


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Return a growable array of token ids with 4 bytes each.

    Raises:
        OverflowError: an id does not fit into a signed 32-bit integer.
    """
    # A list takes 36 bytes per item, and each full collection of Python's garbage collector visits all items.
    return array("i", ids)


def log_probs(values: Iterable[float] = ()) -> LogProbs:
    """Return a growable array of log-probs with 8 bytes each."""
    return array("d", values)
