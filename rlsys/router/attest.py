"""Do trainer and engine agree after a push? Pure: log-probs of canaries (invariant 8); tensors are in holdings.py.

The first comparison with an engine measures rounding: checksums say that both hold the same tensors. It is held
against the most that a model of this precision, depth and vocabulary rounds. Later ones are held against a multiple
of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rlsys.config import Config
from rlsys.model_folder import read_fields

DEFAULT_BOUNDS = {"float32": (1e-6, 1e-4), "bfloat16": (2e-2, 0.5), "fp8": (0.1, 2.0)}
"""Largest mean and 99.9th percentile: in float32 of 2 layers and 128 tokens, else of models of up to 4 layers. Those
of FP8 are a guess: no engine has been compared yet."""
_TOKENS, _HALF_LAYERS = 128, 4
REPEATED = 3.0
"""Later comparisons may show so many times what the first one did: the sequences are others, and weights move."""
WARNING = 5.0
"""An engine whose tensors agree is quarantined for its canaries only beyond so many times the bounds; below, it is
warned of. In half precision, experts that score nearly the same are chosen otherwise here and there, and what follows
differs (docs/trainer.md: mean 0.035, 99.9th percentile 1.79 in bfloat16). Other weights show as 0.2 and more."""
CHANCE = 6.0
"""Standard errors beyond which canaries are nearer to the old weights: tokens of a sequence are not independent."""


@dataclass(frozen=True)
class Bounds:
    """Largest mean and 99.9th percentile of the gap between trainer and engine over all canary tokens.

    A quantile and not the maximum: where two experts score nearly the same, one token may legitimately differ.
    """

    mean: float
    p999: float
    exact: bool = True
    """Whether both sides compute in float32, or somebody has set the bounds: then what exceeds them is wrong."""
    uncompared: float = 0.0
    """Largest share of an engine's tensors that may be unknown (holdings.py)."""
    floor: tuple[float, float] | None = None
    """Least mean and percentile that later comparisons are held against; None: no comparison moves the bounds."""
    experts: bool = False
    """Whether a few tokens may differ by more in float32, because experts score the same but for rounding."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Of a first comparison, where `weights` sets none."""
        precision = "fp8" if config.model.fp8 != "none" else config.model.dtype
        mean, p999 = DEFAULT_BOUNDS[precision]
        fields = _fields(config)
        layers, vocabulary = fields.get("num_hidden_layers", 1), fields.get("vocab_size", _TOKENS)
        # The first push compares prompts alone; responses of a small model were seen to round six times as much.
        least = REPEATED if precision == "float32" else 1.0
        more = growth(precision, int(layers), int(vocabulary))
        w = config.weights
        set_by_hand = w.canary_mean is not None or w.canary_p999 is not None
        return cls(
            w.canary_mean or mean * more,
            w.canary_p999 or p999 * more,
            config.model.dtype == "float32" or set_by_hand,
            largest_unknown_share(config),
            None if set_by_hand else (mean * least, p999 * least),
            not set_by_hand and any(fields.get(name) for name in _EXPERTS),
        )

    def after(self, first: Agreement | None) -> Self:
        """Of an engine whose first comparison came out so; None: this is the first."""
        if first is None or self.floor is None:
            return self
        mean, p999 = self.floor
        return replace(
            self,
            mean=min(self.mean, max(mean, REPEATED * first.mean)),
            p999=min(self.p999, max(p999, REPEATED * first.p999)),
        )


def largest_unknown_share(config: Config) -> float:
    """Share of an engine's tensors that no checksum needs to speak for: of kernels that keep weights in an order of
    their own, only what changes can be compared. SGLang's default kernels keep the trainer's order: 39 of 39 tensors
    of a bfloat16 model were equal on an H200. FP8 kernels rearrange projections and their scales. Of a draft that
    shares the target's tensors nothing is foretold: at most as many tensors as the target of a small model has. Of
    kernels that engine.extra_args choose nothing is known.
    """
    if config.engine.chooses_kernels:
        return 1.0
    if config.model.fp8 != "none":
        return 0.75
    return 0.5 if config.engine.drafts_with_model else 0.0


def growth(precision: str, layers: int, vocabulary: int) -> float:
    """How many times DEFAULT_BOUNDS a model of these sizes may round, at the most.

    float32: every layer but the first adds rounding to the sum of those before it, and rounding is relative to the
    logits, whose size grows as the logarithm of the vocabulary. SmolLM2-135M (30 layers, 49,152 tokens) was seen
    4.8e-6 off (bound 6.5e-5), gpt-oss with 4 random layers 2e-6 (3e-6). Half precision: roundings of layers partly
    cancel, so they grow as the square root; the vocabulary does not show. Random models of 4, 16, 30 and 60 layers
    were seen 0.009, 0.019, 0.026 and 0.044 off (0.02, 0.04, 0.055, 0.077).
    """
    if precision != "float32":
        return math.sqrt(max(1.0, layers / _HALF_LAYERS))
    return max(1, layers - 1) * max(1.0, math.log(max(vocabulary, 1)) / math.log(_TOKENS))


_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def _fields(config: Config) -> dict[str, Any]:
    """Of the model's config.json; none where its folder is not here, and with it the strictest bounds."""
    try:
        return read_fields(config.model.path)
    except FileNotFoundError:
        return {}


@dataclass(frozen=True)
class Agreement:
    """Gaps are relative where |log-prob| exceeds 1: rounding grows with the logits, and a prompt's tokens, which
    nobody trained, can have log-probs of -20.
    """

    mean: float
    p999: float
    median: float = 0.0

    @classmethod
    def of(cls, expected: list[float], seen: list[float]) -> Agreement:
        """Raises ValueError when the lengths differ."""
        if len(expected) != len(seen):
            raise ValueError(f"{len(expected)} canary log-probs expected, {len(seen)} seen")
        a, b = np.asarray(expected, dtype=np.float64), np.asarray(seen, dtype=np.float64)
        if not len(a):
            return cls(0.0, 0.0)
        gaps = np.abs(a - b) / np.maximum(1.0, np.abs(a))
        return cls(float(gaps.mean()), float(np.quantile(gaps, 0.999)), float(np.median(gaps)))

    def against(self, bounds: Bounds) -> str:
        """For people."""
        return (
            f"mean {self.mean:.1e} (bound {bounds.mean:.0e}: weights.canary_mean), "
            f"99.9th percentile {self.p999:.1e} (bound {bounds.p999:.0e}: weights.canary_p999)"
        )

    def within(self, bounds: Bounds, times: float = 1.0) -> bool:
        return self.mean <= times * bounds.mean and self.p999 <= times * bounds.p999

    def of_ties(self, bounds: Bounds) -> bool:
        """Whether a few tokens differ that other experts may have computed, and most are within the bounds. Such
        tokens move the mean no further than rounding does in half precision."""
        return bounds.experts and self.median <= bounds.mean and self.mean <= DEFAULT_BOUNDS["bfloat16"][0]


def nearness(old: Sequence[float], new: Sequence[float], seen: Sequence[float]) -> tuple[float, float]:
    """How much nearer log-probs `seen` in an engine are to the trainer's new ones than to those before its step, and
    the standard error of that: 1 at the new ones, -1 at the old ones, in units of the step's own movement.

    Rounding moves a token's figure by no more than the step itself moved its log-prob, however large the rounding is.
    (1, 0) where the step moved nothing.
    """
    a, b, x = (np.asarray(values, dtype=np.float64) for values in (old, new, seen))
    moved = float(np.abs(b - a).mean()) if len(a) else 0.0
    if not moved:
        return 1.0, 0.0
    gains = (np.abs(x - a) - np.abs(x - b)) / moved
    return float(gains.mean()), float(gains.std() / len(gains) ** 0.5)
