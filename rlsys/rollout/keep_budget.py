"""KeepBudget: chooses the samples that keep their KV cache across a push (rollout.keep_budget).

With keys and values of older weights, log-probs differ from those of the new weights. The trainer measures the
error: the mean |log-prob - mu| of tokens in responses that older weights started. The longest responses keep their
cache first, because their prefill costs most. All others return to the router and are prefilled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlsys.config import Config
from rlsys.core.types import TokenSequence
from rlsys.ledger.buffer import RolloutBuffer

FIRST_SHARE = 0.25
"""Share of the samples in flight that keep their cache before the first measurement."""
GROWTH = 1.25
LARGEST_CUT = 4.0


def next_share(share: float, budget: float, error: float) -> float:
    """Return the next share of samples that keep their cache, in [0, 1].

    - error above budget: the share divided by error / budget, at most by LARGEST_CUT.
    - otherwise: the share multiplied by GROWTH, at least 0.05.

    Args:
        share: the current share.
        budget: largest mean |log-prob - mu|, in nats.
        error: the mean |log-prob - mu| measured with `share`, in nats.
    """
    if error > budget:
        return share / min(error / budget, LARGEST_CUT) if budget else 0.0
    return min(max(share * GROWTH, 0.05), 1.0)


class KeepBudget:
    """Chooses samples that keep their cache. Owns their share, which the buffer stores across restarts.

    Without rollout.keep_budget, all samples keep their cache.
    """

    def __init__(self, config: Config, buffer: RolloutBuffer) -> None:
        self._budget, self._buffer = config.rollout.keep_budget, buffer
        stored_share = buffer.note("keep_share")
        self._share = FIRST_SHARE if stored_share is None else float(stored_share)
        if self._budget == 0:
            self._share = 0.0
        self.metrics: dict[str, float] = {}
        """Metrics of the last interruption; empty without a budget."""

    def steer(self, error: float | None) -> None:
        """Update the share.

        Args:
            error: the trainer's mean |log-prob - mu| of tokens in responses that older weights started, in
                nats; None: the step had no such tokens.
        """
        if self._budget and error is not None:
            self._share = next_share(self._share, self._budget, error)
            self._buffer.set_note("keep_share", repr(self._share))

    def choose(self, in_flight: Iterable[TokenSequence]) -> Callable[[TokenSequence], bool]:
        """Return a predicate that is true for samples that keep their cache, and record their number.

        Args:
            in_flight: all samples in engines.
        """
        if self._budget is None:
            return lambda _: True
        longest = sorted(in_flight, key=lambda s: (-s.tokens, s.sample_id))
        kept_tokens = {s.sample_id: s.tokens for s in longest[: int(self._share * len(longest))]}
        self.metrics = {
            "keep_share": self._share, "kept_samples": len(kept_tokens),
            "kept_response_tokens": sum(kept_tokens.values()),
        }  # fmt: skip
        return lambda sample: sample.sample_id in kept_tokens
