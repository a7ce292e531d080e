"""Which samples keep their keys and values over a push, by what that was measured to cost (rollout.keep_budget).

Keys and values of older weights make log-probs that are not the new weights'. The trainer measures how far: the
mean |log-prob - mu| of tokens in responses that older weights began. The longest responses are kept first: they cost
most to read again, and have the least left. All others return and are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlsys.config import Config
from rlsys.core.types import Sample
from rlsys.ledger.buffer import RolloutBuffer

FIRST_SHARE = 0.25
"""Of the samples in flight, before anything was measured."""
GROWTH = 1.25
LARGEST_CUT = 4.0


def next_share(share: float, budget: float, measured: float) -> float:
    """The share to keep next, in [0, 1], when keeping `share` was measured to cost so much. Above the budget it falls
    in proportion; below it grows by a quarter, or from 0 to one in twenty."""
    if measured > budget:
        return share / min(measured / budget, LARGEST_CUT) if budget else 0.0
    return min(max(share * GROWTH, 0.05), 1.0)


class KeepBudget:
    """Owns the share. Kept in the buffer over restarts. Without a budget all samples stay."""

    def __init__(self, config: Config, buffer: RolloutBuffer) -> None:
        self._budget, self._buffer = config.rollout.keep_budget, buffer
        saved = buffer.note("keep_share")
        self._share = FIRST_SHARE if saved is None else float(saved)
        if self._budget == 0:
            self._share = 0.0
        self.figures: dict[str, float] = {}
        """Of the last interruption, for a step's metrics; empty without a budget."""

    def steer(self, measured: float | None) -> None:
        """A step was trained, and the mean |log-prob - mu| of its tokens in responses that older weights began was so
        much; None: there were none."""
        if self._budget and measured is not None:
            self._share = next_share(self._share, self._budget, measured)
            self._buffer.set_note("keep_share", repr(self._share))

    def choose(self, in_flight: Iterable[Sample]) -> Callable[[Sample], bool]:
        """Whether a sample stays in its engine."""
        if self._budget is None:
            return lambda _: True
        longest = sorted(in_flight, key=lambda s: (-s.tokens, s.sample_id))
        kept = {s.sample_id: s.tokens for s in longest[: int(self._share * len(longest))]}
        self.figures = {
            "keep_share": self._share, "kept_samples": len(kept), "kept_response_tokens": sum(kept.values()),
        }  # fmt: skip
        return lambda sample: sample.sample_id in kept
