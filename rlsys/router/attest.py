"""Attestation of an engine after a push: comparison of canary log-probs (invariant 8). Pure functions.

engine_checksums.py compares the tensors. The first comparison of log-probs with an engine measures rounding,
because checksums confirm that both sides hold the same tensors. Its limit is the largest rounding error of a
model of this precision, depth and vocabulary. The limit of later comparisons is a multiple of the first result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rlsys.config import Config
from rlsys.core.model_folder import read_fields

DEFAULT_BOUNDS = {"float32": (1e-6, 1e-4), "bfloat16": (2e-2, 0.5), "fp8": (0.1, 2.0)}
"""Largest mean and 99.9th percentile of the gap, by precision.

The values of float32 hold for 2 layers and a vocabulary of 128 tokens, the others for up to 4 layers. The values
of FP8 are an estimate: no FP8 engine has been compared yet.
"""
_FLOAT32_VOCABULARY, _HALF_PRECISION_LAYERS = 128, 4
LATER_BOUND_FACTOR = 3.0
"""Limit of later comparisons as a multiple of the first result: sequences and weights change."""
WARNING_FACTOR = 5.0
"""Multiple of the bounds up to which the gap of an engine with some equal tensors only causes a warning.

An engine with a larger gap is quarantined.

In half precision, experts with nearly equal scores may be chosen differently, which also changes the following
tokens (docs/trainer.md: mean 0.035, 99.9th percentile 1.79 in bfloat16). With wrong weights the mean is 0.2 or more.
"""
STANDARD_ERRORS = 6.0
"""An engine is rejected if its canaries are nearer to the old weights by more than this number of standard errors.

The number is large because the tokens of a sequence are correlated.
"""


@dataclass(frozen=True)
class Bounds:
    """Largest mean and 99.9th percentile of the gap between trainer and engine over all canary tokens.

    The second bound limits a quantile instead of the maximum, because one token may legitimately differ if two
    experts have nearly equal scores.
    """

    mean: float
    p999: float
    exact: bool = True
    """Whether the bounds allow no WARNING_FACTOR: both sides compute in float32, or the config sets the bounds."""
    max_unknown_share: float = 0.0
    """Largest share of an engine's tensors that may be `unknown` (engine_checksums.py)."""
    floor: tuple[float, float] | None = None
    """Smallest `mean` and `p999` that `after` may return. None: `after` does not change the bounds."""
    experts: bool = False
    """Whether `Agreement.differs_by_ties` applies: the model has experts, and the config sets no bounds."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the bounds of an engine's first comparison.

        `weights.canary_mean`, if set, replaces the default mean and scales the default percentile likewise.
        """
        precision = "fp8" if config.model.fp8 != "none" else config.model.dtype
        mean, p999 = DEFAULT_BOUNDS[precision]
        fields = _fields(config)
        layers, vocabulary = fields.get("num_hidden_layers", 1), fields.get("vocab_size", _FLOAT32_VOCABULARY)
        # The first push compares prompts only; responses of a small model had six times the rounding error.
        floor_scale = LATER_BOUND_FACTOR if precision == "float32" else 1.0
        scale = rounding_growth(precision, int(layers), int(vocabulary))
        w = config.weights
        set_by_hand = w.canary_mean is not None
        if w.canary_mean is not None:
            scale = w.canary_mean / mean
        return cls(
            mean=mean * scale,
            p999=p999 * scale,
            exact=config.model.dtype == "float32" or set_by_hand,
            max_unknown_share=largest_unknown_share(config),
            floor=None if set_by_hand else (mean * floor_scale, p999 * floor_scale),
            experts=not set_by_hand and any(fields.get(name) for name in _EXPERTS),
        )

    def after(self, first: Agreement | None) -> Self:
        """Return the bounds of an engine's next comparison.

        Args:
            first: result of the engine's first comparison; None: the next comparison is the first.
        """
        if first is None or self.floor is None:
            return self
        mean, p999 = self.floor
        return replace(
            self,
            mean=min(self.mean, max(mean, LATER_BOUND_FACTOR * first.mean)),
            p999=min(self.p999, max(p999, LATER_BOUND_FACTOR * first.p999)),
        )


def largest_unknown_share(config: Config) -> float:
    """Return the largest share of an engine's tensors that may have no comparable checksum.

    A checksum is comparable if the engine keeps the trainer's order of values. SGLang's default kernels keep it: 39
    of 39 tensors of a bfloat16 model were equal on an H200. Exceptions:

    - Kernels that engine.extra_args selects may rearrange all tensors.
    - FP8 kernels rearrange projections and their scales.
    - The trainer does not predict the checksums of a draft model. A small draft model has at most as many tensors as
      its target.
    """
    if config.engine.chooses_kernels:
        return 1.0
    if config.model.fp8_engines:
        return 0.75
    return 0.5 if config.engine.drafts_with_model else 0.0


def rounding_growth(precision: str, layers: int, vocabulary: int) -> float:
    """Return the factor on DEFAULT_BOUNDS for a model of this size.

    Args:
        precision: a key of DEFAULT_BOUNDS.
        layers: number of transformer layers.
        vocabulary: number of tokens in the vocabulary.

    In float32, every layer after the first adds rounding to the residual sum, relative to the logits, which grow
    with the logarithm of the vocabulary size. Measured means: SmolLM2-135M (30 layers, 49,152 tokens) 4.8e-6 (bound
    6.5e-5), gpt-oss with 4 random layers 2e-6 (3e-6). In half precision, the rounding errors of layers partly cancel,
    so they grow with the square root of the number of layers, regardless of the vocabulary. Measured means of random
    models with 4, 16, 30 and 60 layers: 0.009, 0.019, 0.026 and 0.044 (bounds 0.02, 0.04, 0.055, 0.077).
    """
    if precision != "float32":
        return math.sqrt(max(1.0, layers / _HALF_PRECISION_LAYERS))
    return max(1, layers - 1) * max(1.0, math.log(max(vocabulary, 1)) / math.log(_FLOAT32_VOCABULARY))


_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def _fields(config: Config) -> dict[str, Any]:
    """Return the content of the model's config.json.

    If this machine has no such file, return an empty dict, which leads to the strictest bounds.
    """
    try:
        return read_fields(config.model.path)
    except FileNotFoundError:
        return {}


@dataclass(frozen=True)
class Agreement:
    """Gaps between trainer and engine over canary tokens.

    The gap of a token is |difference of its log-probs| / max(1, |log-prob of the trainer|): rounding grows with the
    logits, and prompt tokens, which are not trained, can have log-probs of -20.
    """

    mean: float
    p999: float
    median: float = 0.0

    @classmethod
    def of(cls, expected: list[float], reported: list[float]) -> Agreement:
        """Compare log-probs of the trainer with those of an engine.

        Raises:
            ValueError: the lengths differ.
        """
        if len(expected) != len(reported):
            raise ValueError(f"{len(reported)} canary log-probs; expected {len(expected)}")
        a, b = np.asarray(expected, dtype=np.float64), np.asarray(reported, dtype=np.float64)
        if not len(a):
            return cls(0.0, 0.0)
        gaps = np.abs(a - b) / np.maximum(1.0, np.abs(a))
        return cls(float(gaps.mean()), float(np.quantile(gaps, 0.999)), float(np.median(gaps)))

    def describe(self, bounds: Bounds) -> str:
        """Return mean and percentile with their bounds, for messages."""
        return (
            f"mean {self.mean:.1e} (bound {bounds.mean:.0e}: weights.canary_mean), "
            f"99.9th percentile {self.p999:.1e} (bound {bounds.p999:.0e})"
        )

    def within(self, bounds: Bounds, times: float = 1.0) -> bool:
        """Return whether mean and percentile are at most `times` their bounds."""
        return self.mean <= times * bounds.mean and self.p999 <= times * bounds.p999

    def differs_by_ties(self, bounds: Bounds) -> bool:
        """Return whether a different choice of experts at a few tokens may explain the gaps.

        It may if at least half of the tokens have a gap within the mean bound, and the mean gap is at most the
        bfloat16 bound.
        """
        return bounds.experts and self.median <= bounds.mean and self.mean <= DEFAULT_BOUNDS["bfloat16"][0]


def nearness(old: Sequence[float], new: Sequence[float], reported: Sequence[float]) -> tuple[float, float]:
    """Compare an engine's log-probs with the trainer's before and after its step.

    Args:
        old: the trainer's log-probs before the step.
        new: the trainer's log-probs after the step.
        reported: the engine's log-probs.

    Returns:
        Mean and standard error of a score that is 1 at `new` and -1 at `old`; (1, 0) if the step changed no
            log-prob. Tokens are weighted by their change in the step, which limits the effect of rounding.
    """
    a, b, x = (np.asarray(values, dtype=np.float64) for values in (old, new, reported))
    movement = float(np.abs(b - a).mean()) if len(a) else 0.0
    if not movement:
        return 1.0, 0.0
    gains = (np.abs(x - a) - np.abs(x - b)) / movement
    return float(gains.mean()), float(gains.std() / len(gains) ** 0.5)
