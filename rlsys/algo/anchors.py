"""Anchors of ratios, `algo.anchor`, and the log-probs that they need; Objective.anchor_of returns the value."""

from __future__ import annotations

from typing import Literal

from rlsys.config.algo import Anchor

CURRENT = frozenset({"old", "current", "behaviour", "entropy", "values", "sum_pi_squared", "divergence"})
"""Signals that one forward pass with the current weights provides."""
PASSES = CURRENT | {"ewma", "ref"}
"""Signals from forward passes of the trainer, as fields of Batch."""

AnyAnchor = Anchor | Literal["current"]
"""`current`, the policy itself, is the anchor of an objective without a ratio: corrections then use exp(logp -
mu)."""

ANCHOR_NEEDS: dict[str, frozenset[str]] = {
    "mu": frozenset(),
    "current": frozenset(),
    "old": frozenset({"old"}),
    "behaviour": frozenset({"behaviour", "old"}),
    "interpolated": frozenset(),
    "ewma": frozenset({"ewma"}),
}
MOVING = frozenset({"interpolated", "current"})
"""Anchors that change with the current policy. A plug-in that reads them before the loss call needs `current`."""
