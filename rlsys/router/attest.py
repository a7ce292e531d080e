"""Do trainer and engine agree after a push? Pure: checksums of tensors, log-probs of canaries (invariant 8)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsys.config import Config

DEFAULT_BOUNDS = {"float32": (1e-6, 1e-4), "bfloat16": (2e-2, 0.5), "fp8": (0.1, 2.0)}
"""Those of FP8 are a guess: no engine has been compared yet."""
WARNING = 5.0
"""An engine whose tensors agree is quarantined for its canaries only beyond so many times the bounds; below, it is
warned of. In half precision, experts that score nearly the same are chosen otherwise here and there, and what follows
differs (docs/trainer.md: mean 0.035, 99.9th percentile 1.79 in bfloat16). Other weights show as 0.2 and more."""


@dataclass(frozen=True)
class Bounds:
    """Largest mean and 99.9th percentile of the gap between trainer and engine over all canary tokens.

    A quantile and not the maximum: where two experts score nearly the same, one token may legitimately differ.
    """

    mean: float
    p999: float
    exact: bool = True
    """Whether both sides compute in float32, or somebody has set the bounds: then what exceeds them is wrong."""

    @classmethod
    def of(cls, config: Config) -> Bounds:
        mean, p999 = DEFAULT_BOUNDS["fp8" if config.model.fp8 != "none" else config.model.dtype]
        w = config.weights
        exact = config.model.dtype == "float32" or w.canary_mean is not None or w.canary_p999 is not None
        return cls(w.canary_mean or mean, w.canary_p999 or p999, exact)


@dataclass(frozen=True)
class Agreement:
    """Gaps are relative where |log-prob| exceeds 1: rounding grows with the logits, and a prompt's tokens, which
    nobody trained, can have log-probs of -20.
    """

    mean: float
    p999: float

    @classmethod
    def of(cls, expected: list[float], seen: list[float]) -> Agreement:
        """Raises ValueError when the lengths differ."""
        if len(expected) != len(seen):
            raise ValueError(f"{len(expected)} canary log-probs expected, {len(seen)} seen")
        a, b = np.asarray(expected, dtype=np.float64), np.asarray(seen, dtype=np.float64)
        if not len(a):
            return cls(0.0, 0.0)
        gaps = np.abs(a - b) / np.maximum(1.0, np.abs(a))
        return cls(float(gaps.mean()), float(np.quantile(gaps, 0.999)))

    def against(self, bounds: Bounds) -> str:
        """For people."""
        return (
            f"mean {self.mean:.1e} (bound {bounds.mean:.0e}: weights.canary_mean), "
            f"99.9th percentile {self.p999:.1e} (bound {bounds.p999:.0e}: weights.canary_p999)"
        )

    def within(self, bounds: Bounds, times: float = 1.0) -> bool:
        return self.mean <= times * bounds.mean and self.p999 <= times * bounds.p999


@dataclass(frozen=True)
class Match:
    """Checksums of an engine against the trainer's. Counts are tensors of all its ranks."""

    equal: int
    unknown: tuple[str, ...]
    """Held in a layout that the trainer cannot foretell: nothing is known of them."""
    wrong: tuple[str, ...]


class Checksums:
    """Compares, and learns which tensors can be compared: where one tensor of a kind has ever agreed (the same name
    in another layer, another engine, an earlier push), the trainer knows how engines hold this kind, and a difference
    means other values. A kind that never agreed is kept in another order or precision by the engine's kernels.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def compare(self, expected: Sequence[dict[str, str]], reported: Sequence[dict[str, str]]) -> Match:
        """Both: for each tensor-parallel rank, name -> checksum."""
        if len(expected) != len(reported):
            return Match(0, tuple(name for held in reported for name in held), ())
        pairs = [
            (name, mine.get(name) == theirs)
            for mine, held in zip(expected, reported, strict=True)
            for name, theirs in held.items()
        ]
        self._known |= {_kind(name) for name, same in pairs if same}
        differing = [name for name, same in pairs if not same]
        wrong = tuple(name for name in differing if _kind(name) in self._known)
        unknown = tuple(name for name in differing if _kind(name) not in self._known)
        return Match(len(pairs) - len(differing), unknown, tuple(dict.fromkeys(wrong)))


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
