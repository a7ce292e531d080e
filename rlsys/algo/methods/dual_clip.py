"""Dual clip: a bound on the loss of tokens with negative advantages (Ye et al. 2020, section 4)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.losses import Clip


class DualClip(Clip):
    """PPO's clip with a loss of at most dual |A| where A < 0, so that no token dominates the update.

    The loss of such a token is min(-min(r A, clip(r) A), -dual A).
    """

    paper: ClassVar[str] = "Mastering complex control in MOBA games (Ye et al. 2020), section 4"
    evidence: ClassVar[str] = "R"
    dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Largest ratio with a gradient where the advantage is negative (10 in agent recipes); null: no bound."""
