"""Distribution of response lengths: from a file, from a run, or a long tail up to the maximum."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from rlsys.core.errors import UserError

_MEDIAN, _SIGMA = 0.085, 1.25
"""Median as a fraction of the maximum, and sigma of the log-normal: half of all responses end within a tenth of the
maximum, and a tail reaches it, as in long reasoning runs (bench/traces/long_tail.json)."""
_POINTS = 2000


class _Trace(msgspec.Struct):
    lengths: list[int]


class LengthDistribution:
    """A distribution of response lengths in tokens.

    A sample's length depends on its prompt and its seed only, not on interruptions.
    """

    def __init__(
        self, lengths: Sequence[int], cap: int, groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Create a distribution.

        Args:
            lengths: response lengths.
            cap: rollout.max_response_tokens.
            groups: the same lengths by prompt, if known: responses to one prompt are similar, so that a group
                of long ones delays a step by itself.
        """
        self.values = [min(n, cap) for n in lengths]
        self._groups = None if groups is None else [[min(n, cap) for n in group] for group in groups if group]

    def sample(self, seed: int, prompt: int) -> int:
        """Return the length of a sample; prompts are numbered."""
        candidates = self.values if self._groups is None else random.Random(prompt).choice(self._groups)
        return random.Random(seed).choice(candidates)

    def truncate(self, cap: int) -> LengthDistribution:
        """Return the same distribution with another maximum."""
        return LengthDistribution(self.values, cap, self._groups)

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.values) / len(self.values)

    @property
    def in_flight(self) -> float:
        """Mean length of a response at a random time of its generation."""
        return sum(n * n for n in self.values) / len(self.values) / self.mean / 2


def long_tail(cap: int) -> LengthDistribution:
    """Return an assumed distribution: log-normal, truncated at the maximum; `[2000]` quantiles."""
    normal = NormalDist(math.log(_MEDIAN * cap), _SIGMA)
    quantiles = (normal.inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
    return LengthDistribution([max(1, round(math.exp(x))) for x in quantiles], cap)


def read_trace(file: Path, cap: int) -> LengthDistribution:
    """Read a JSON file with `lengths`, a list of token counts.

    Raises:
        UserError: the file is invalid.
    """
    try:
        lengths = msgspec.json.decode(file.read_bytes(), type=_Trace).lengths
    except OSError as e:
        raise UserError(f"--trace {file}: {e.strerror}") from None
    except msgspec.DecodeError as e:
        raise UserError(f'--trace {file}: expected JSON {{"lengths": [tokens, ...]}}: {e}') from None
    if not lengths or min(lengths) < 1:
        raise UserError(f"--trace {file}: lengths: expected at least one, and each at least 1 token")
    return LengthDistribution(lengths, cap)
