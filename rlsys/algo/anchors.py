"""Anchors of the policy's probability ratios (`algo.anchor`), and the signals that each anchor needs.

Objective.anchor_of computes the log-probs of an anchor.
"""

from __future__ import annotations

from typing import Literal

from rlsys.config.algo import Anchor

CURRENT = frozenset({"old", "current", "behaviour", "entropy", "values", "sum_pi_squared", "divergence"})
"""Signals that one forward pass with the current weights provides."""
PASSES = CURRENT | {"ewma", "ref"}
"""Signals that forward passes of the trainer provide."""

AnyAnchor = Anchor | Literal["current"]
"""An objective without a ratio has the anchor `current`, the policy itself. Its corrections use exp(logp - mu)."""

ANCHOR_NEEDS: dict[str, frozenset[str]] = {
    "mu": frozenset(),
    "current": frozenset(),
    "old": frozenset({"old"}),
    "behaviour": frozenset({"behaviour", "old"}),
    "interpolated": frozenset(),
    "ewma": frozenset({"ewma"}),
}
MOVING = frozenset({"interpolated", "current"})
"""Anchors that depend on the current weights. A plug-in that reads such an anchor before the loss call needs the
signal `current`."""
