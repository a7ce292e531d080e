"""How long responses are: from a file, from a run, or a long tail up to the cap."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from rlsys.core.errors import UserError

_MEDIAN, _SIGMA = 0.085, 1.25
"""Of the cap, and of the log-normal's logarithm: half of all responses end within a tenth of the cap, a tail reaches
it, as in long reasoning runs (bench/traces/long_tail.json)."""
_POINTS = 2000


class _Trace(msgspec.Struct):
    lengths: list[int]


class Lengths:
    """A distribution of response lengths in tokens. A sample's length follows from its prompt and its seed, however
    it is cut."""

    def __init__(
        self, lengths: Sequence[int], cap: int, groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`cap`: rollout.max_response_tokens. `groups`: the same lengths, those of one prompt together, where that
        is known: responses to one prompt are alike, so that a group of long ones holds up a step alone."""
        self.values = [min(n, cap) for n in lengths]
        self._groups = None if groups is None else [[min(n, cap) for n in group] for group in groups if group]

    def of(self, seed: int, prompt: int) -> int:
        """Of a prompt's response; prompts are numbers here."""
        found = self.values if self._groups is None else random.Random(prompt).choice(self._groups)
        return random.Random(seed).choice(found)

    def cut(self, cap: int) -> Lengths:
        """The same where responses may be no longer than this."""
        return Lengths(self.values, cap, self._groups)

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
