"""How long responses are: from a file, from a run, or a long tail up to the cap."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from rlsys.errors import UserError

_MEDIAN, _SIGMA = 0.085, 1.25
"""Of the cap, and of the log-normal's logarithm: half of all responses end within a tenth of the cap, a tail reaches
it, as in long reasoning runs (bench/traces/long_tail.json)."""
_POINTS = 2000


class _Trace(msgspec.Struct):
    lengths: list[int]


class Lengths:
    """A distribution of response lengths in tokens. A sample's length follows from its seed, however it is cut."""

    def __init__(self, lengths: Sequence[int], cap: int) -> None:
        """`cap`: rollout.max_response_tokens."""
        self.values = [min(n, cap) for n in lengths]

    def of(self, seed: int) -> int:
        return random.Random(seed).choice(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def long_tail(cap: int) -> Lengths:
    """An assumption, for who has no trace: log-normal, cut at the cap; `[2000]` quantiles."""
    normal = NormalDist(math.log(_MEDIAN * cap), _SIGMA)
    quantiles = (normal.inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
    return Lengths([max(1, round(math.exp(x))) for x in quantiles], cap)


def read_trace(file: Path, cap: int) -> Lengths:
    """A JSON file with `lengths`, a list of token counts. Raises UserError."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Trace).lengths
    except OSError as e:
        raise UserError(f"--trace {file}: {e.strerror}") from None
    except msgspec.DecodeError as e:
        raise UserError(f'--trace {file}: expected JSON {{"lengths": [tokens, ...]}}: {e}') from None
    if not found or min(found) < 1:
        raise UserError(f"--trace {file}: lengths: expected at least one, and each at least 1 token")
    return Lengths(found, cap)
