"""ResponseHandler: checks what engines return, appends it to its sample, and counts tokens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from rlsys.core.types import Segment, TokenSequence
from rlsys.engine.wire import EngineError
from rlsys.engine_requests import Limits, RefusedPrompt
from rlsys.router.dispatch import EVALUATION, Dispatcher
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.failure_policy import SERVER_FAULT, PoisonDetector
from rlsys.router.turn_ends import TurnEnds, truncate_segment


class ResponseHandler:
    """Handles the segments of requests. Owns the counts of tokens.

    `on_tokens` is called with a sample of the ledger and its number of new tokens.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        poison_detector: PoisonDetector,
        on_tokens: Callable[[TokenSequence, int], None],
    ) -> None:
        self._dispatcher = dispatcher
        self.limits = limits
        self._poison_detector = poison_detector
        self._on_tokens = on_tokens
        self._counts = {
            "received_tokens": 0,
            "evaluation_tokens": 0,
            "discarded_tokens": 0,
            "cached_tokens": 0,
            "prefilled_tokens": 0,
            "draft_checks": 0,
            "checked_tokens": 0,
            "rounded_log_probs": 0,
        }
        self._prefills: dict[str, list[int]] = defaultdict(
            lambda: [0, 0]
        )  # source -> prompt tokens: cached, all

    async def receive(
        self, engine: EngineState, flight: Flight, segment: Segment, ends: TurnEnds
    ) -> str | None:
        """Append a segment to its sample, up to the end of the turn.

        Returns:
            The finish reason of the request; None while it runs.

        Raises:
            EngineError: the engine returned ids outside the vocabulary, or a malformed response.
        """
        sample, tokens, time = flight.sample, len(segment.ids), asyncio.get_running_loop().time()
        assert sample is not None
        try:
            self.limits.check_ids(segment.ids)
            self.limits.check_ids(segment.id_range or ())
        except RefusedPrompt as e:  # such an id would kill the next engine and the trainer
            raise EngineError(f"{engine.url}: {e}", SERVER_FAULT) from None
        versions = {s.version for s in segment.spans}
        if segment.call_spans is not None:
            versions.update(s.version for s in segment.call_spans)
        if not engine.pushed.issuperset(versions):
            self._counts["discarded_tokens"] += tokens
            if not await _wait_attested(engine, versions):
                return None
            self._counts["discarded_tokens"] -= tokens
        engine.record_tokens(flight, segment, time)
        engine.received += tokens
        flight.received_tokens += tokens
        turn_ended = False
        if ends.texts:
            turn = ends.turn_of(sample)
            end = 0 if ends.is_ended(turn) else ends.text_ends_after(turn, segment.ids)
            turn_ended = end is not None
            if end is not None:
                flight.dropped += tokens - end
                segment = truncate_segment(segment, end, flight.dropped)
                self._counts["discarded_tokens"] += tokens - end
                tokens = end
        try:
            sample.append(segment)
        except ValueError as e:
            raise EngineError(f"{engine.url}: malformed response: {e}", SERVER_FAULT) from None
        self._counts["rounded_log_probs"] += segment.rounded
        if tokens:
            self._poison_detector.clear(sample)
        self._dispatcher.record_success(engine)
        self._dispatcher.add_tokens(engine, flight, tokens)
        self._counts["received_tokens"] += tokens
        self._counts["draft_checks"] += segment.checks
        self._counts["checked_tokens"] += segment.checked
        if sample.sample_id == EVALUATION:
            self._counts["evaluation_tokens"] += tokens
        else:
            self._on_tokens(sample, tokens)
            if segment.finish is not None:
                self._count_prefill(flight.cache_source, sample, segment)
        if turn_ended and tokens and segment.finish is None:
            # The engine has not detected the end. Later tokens are dropped; the routes, which arrive
            # last, are kept. This call comes after the counts, because the engine may die during it.
            await engine.client.abort(flight.rid)
        return segment.finish

    def _count_prefill(self, cache_source: str, sample: TokenSequence, segment: Segment) -> None:
        self._counts["cached_tokens"] += segment.cached_tokens
        self._counts["prefilled_tokens"] += segment.prompt_tokens
        self._prefills[cache_source][0] += segment.cached_tokens
        self._prefills[cache_source][1] += segment.prompt_tokens
        sample.cached_tokens += segment.cached_tokens
        sample.prefilled_tokens += segment.prompt_tokens

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """Return the counts, and (cached, all) prompt tokens by the reason why the prefix could be cached."""
        return dict(self._counts), {
            source: (cached, total) for source, (cached, total) in self._prefills.items()
        }


def with_cache_shares(
    counts: Mapping[str, float], prefills: Mapping[str, tuple[int, int]]
) -> dict[str, float]:
    """Add the cache_share_* metrics of Router.stats to the counts of a tally."""
    shares = {
        f"cache_share_{source}": cached / total for source, (cached, total) in prefills.items() if total
    }
    return {**counts, **shares}


async def _wait_attested(engine: EngineState, versions: set[int]) -> bool:
    """Wait until the weight versions of new tokens are attested.

    Returns:
        False if this run did not push these versions: the engine was restarted between two probes, or another run
        pushed to it.
    """
    while not engine.pushed.issuperset(versions):
        if engine.attested.is_set():
            engine.mark_weights_lost()
            return False
        await engine.attested.wait()
    return True
