"""KeepBudget: which samples keep their KV cache across a push, by measured error (rollout.keep_budget).

With keys and values of older weights, log-probs differ from those of the new weights. The trainer measures the
error: the mean |log-prob - mu| of tokens in responses that older weights started. The longest responses are
kept first: their prefill costs most, and they have the fewest tokens left. All others are returned and
prefilled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlsys.config import Config
from rlsys.core.types import TokenSequence
from rlsys.ledger.buffer import RolloutBuffer

FIRST_SHARE = 0.25
"""Share of the samples in flight before the first measurement."""
GROWTH = 1.25
LARGEST_CUT = 4.0


def next_share(share: float, budget: float, measured: float) -> float:
    """Return the next share to keep, in [0, 1], from the error measured with `share`.

    Above the budget it falls in proportion; below it grows by a quarter, or from 0 to 1/20.
    """
    if measured > budget:
        return share / min(measured / budget, LARGEST_CUT) if budget else 0.0
    return min(max(share * GROWTH, 0.05), 1.0)


class KeepBudget:
    """Owns the share. Stored in the buffer across restarts. Without a budget all samples are kept."""

    def __init__(self, config: Config, buffer: RolloutBuffer) -> None:
        self._budget, self._buffer = config.rollout.keep_budget, buffer
        stored_share = buffer.note("keep_share")
        self._share = FIRST_SHARE if stored_share is None else float(stored_share)
        if self._budget == 0:
            self._share = 0.0
        self.metrics: dict[str, float] = {}
        """Metrics of the last interruption; empty without a budget."""

    def steer(self, measured: float | None) -> None:
        """Update the share from the error that the trainer measured; None: no such tokens."""
        if self._budget and measured is not None:
            self._share = next_share(self._share, self._budget, measured)
            self._buffer.set_note("keep_share", repr(self._share))

    def choose(self, in_flight: Iterable[TokenSequence]) -> Callable[[TokenSequence], bool]:
        """Return a predicate: whether a sample is kept in its engine."""
        if self._budget is None:
            return lambda _: True
        longest = sorted(in_flight, key=lambda s: (-s.tokens, s.sample_id))
        kept_tokens = {s.sample_id: s.tokens for s in longest[: int(self._share * len(longest))]}
        self.metrics = {
            "keep_share": self._share, "kept_samples": len(kept_tokens),
            "kept_response_tokens": sum(kept_tokens.values()),
        }  # fmt: skip
        return lambda sample: sample.sample_id in kept_tokens
