"""Distributions of response lengths: from a file, from a run, or an assumed long-tailed one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from rlsys.core.errors import UserError

_MEDIAN = 0.085
"""Median of the log-normal distribution as a fraction of the largest length. Half of all responses end within a tenth
of the largest length, as in runs with long reasoning (bench/traces/long_tail.json)."""
_SIGMA = 1.25
"""Sigma of the log-normal distribution; the tail reaches the largest length."""
_POINTS = 2000
"""Number of quantiles of the log-normal distribution."""


class _Trace(msgspec.Struct):
    """Content of a --trace file."""

    lengths: list[int]


class LengthDistribution:
    """A distribution of response lengths in tokens.

    Attributes:
        values: Equally likely lengths.
    """

    def __init__(
        self, lengths: Sequence[int], cap: int, groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Create a distribution.

        Args:
            lengths: response lengths, at least one.
            cap: rollout.max_response_tokens; longer lengths are truncated.
            groups: the same lengths by prompt, because responses to one prompt have similar lengths; None if unknown.
        """
        self.values = [min(n, cap) for n in lengths]
        self._groups = None if groups is None else [[min(n, cap) for n in group] for group in groups if group]

    def sample(self, seed: int, prompt: int) -> int:
        """Return the length of a sample's response, which depends only on its seed and its prompt's number."""
        candidates = self.values if self._groups is None else random.Random(prompt).choice(self._groups)
        return random.Random(seed).choice(candidates)

    def truncate(self, cap: int) -> LengthDistribution:
        """Return the distribution with another largest length `cap`."""
        return LengthDistribution(self.values, cap, self._groups)

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.values) / len(self.values)

    @property
    def in_flight(self) -> float:
        """Mean number of tokens that a response in flight has at a random time."""
        return sum(n * n for n in self.values) / len(self.values) / self.mean / 2


def long_tail(cap: int) -> LengthDistribution:
    """Return the assumed long-tailed distribution: log-normal, with lengths above `cap` set to `cap`."""
    normal = NormalDist(math.log(_MEDIAN * cap), _SIGMA)
    quantiles = (normal.inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS))
    return LengthDistribution([max(1, round(math.exp(x))) for x in quantiles], cap)


def read_trace(file: Path, cap: int) -> LengthDistribution:
    """Read a distribution from a JSON file {"lengths": [tokens, ...]}.

    Args:
        file: the file.
        cap: rollout.max_response_tokens.

    Raises:
        UserError: the file cannot be read, or is invalid.
    """
    try:
        lengths = msgspec.json.decode(file.read_bytes(), type=_Trace).lengths
    except OSError as e:
        raise UserError(f"--trace {file}: {e.strerror}; expected a readable file") from None
    except msgspec.DecodeError as e:
        raise UserError(f'--trace {file}: expected JSON {{"lengths": [tokens, ...]}}: {e}') from None
    if not lengths:
        raise UserError(f"--trace {file}: lengths = []: expected at least one length")
    if (shortest := min(lengths)) < 1:
        raise UserError(f"--trace {file}: lengths contains {shortest}; expected at least 1 token")
    return LengthDistribution(lengths, cap)
