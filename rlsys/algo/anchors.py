"""What ratios are taken against: `algo.anchor`, the log-probs that it needs, and its value at each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.config.algo import Anchor

CURRENT = frozenset({"old", "now", "behaviour", "entropy", "values", "sum_pi_squared", "divergence"})
"""Signals that one forward pass of the current weights gives."""
PASSES = CURRENT | {"ewma", "ref"}
"""Needs that forward passes of the trainer serve, as fields of Batch."""

AnyAnchor = Anchor | Literal["current"]
"""`current`, the policy itself, is the anchor of an objective without a ratio: its corrections reach as far."""

ANCHOR_NEEDS: dict[str, frozenset[str]] = {
    "mu": frozenset(),
    "current": frozenset(),
    "old": frozenset({"old"}),
    "behaviour": frozenset({"behaviour", "old"}),
    "interpolated": frozenset(),
    "ewma": frozenset({"ewma"}),
}
MOVING = frozenset({"interpolated", "current"})
"""Anchors that follow the current policy: before a loss is called, they need `now`."""


def anchor_at(anchor: AnyAnchor, batch: Batch, logp: Tensor) -> Tensor:
    """`[T]`, any number where masked. logp `[T]`: of the current weights, without gradient."""
    if anchor == "current":
        return logp
    if anchor == "old":
        return _old(batch, logp)
    if anchor == "ewma":
        return batch.signal("ewma")
    if anchor == "behaviour":
        stored = batch.signal("behaviour")
        return torch.where(stored.isnan(), _old(batch, logp), stored)
    if anchor == "interpolated":
        age = (batch.version - batch.versions).clamp(min=1).to(batch.mu.dtype)
        return batch.mu + (age - 1) / age * (logp - batch.mu)  # 0 up to an age of 1: see `algo.anchor`
    return batch.mu


def _old(batch: Batch, logp: Tensor) -> Tensor:
    return logp if batch.old_is_current else batch.signal("old")
