"""Dual clip (Ye et al. 2020, section 4)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.losses import Clip


class DualClip(Clip):
    """PPO's clip, and for A < 0 a loss of at most dual |A|: one bad token cannot dominate.

    loss = min(-min(r A, clip(r) A), -dual A) where A < 0.
    """

    paper: ClassVar[str] = "Mastering complex control in MOBA games (Ye et al. 2020), section 4"
    evidence: ClassVar[str] = "R"
    dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Cap of the ratio where the advantage is negative (10 in agent recipes)."""
