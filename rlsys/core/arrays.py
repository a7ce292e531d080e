"""Arrays of tokens that grow. Standard library only: every process imports this file."""

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
    """An array that grows, 4 bytes a token. A list takes 36, and Python's collector visits each of its items every
    time. Raises OverflowError for an id of more than 32 bits."""
    return array("i", ids)


def log_probs(values: Iterable[float] = ()) -> LogProbs:
    """The same of log-probs, 8 bytes each."""
    return array("d", values)
