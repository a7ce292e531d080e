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

    Args:
        limits: limits of token ids.
        poison_detector: clears the failures of samples that get tokens.
        on_tokens: called with a sample of the ledger and its number of new tokens.
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
        self._prefills: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        """Flight.cache_source -> number of cached prompt tokens, number of all prompt tokens."""

    async def receive(
        self, engine: EngineState, flight: Flight, segment: Segment, ends: TurnEnds
    ) -> str | None:
        """Append a segment to its sample, up to the end of the turn.

        Returns:
            the finish reason of the request; None while it runs, and if this run did not push the weights of its
                tokens, which are discarded.

        Raises:
            EngineError: the engine returned ids outside the vocabulary, or a malformed response.
        """
        sample, time = flight.sample, asyncio.get_running_loop().time()
        assert sample is not None
        self._check_ids(engine, segment)
        if not await self._wait_attested(engine, segment):
            return None
        engine.record_tokens(flight, segment, time)
        engine.received += len(segment.ids)
        flight.received_tokens += len(segment.ids)
        segment, turn_ended = self._truncate(flight, sample, segment, ends)
        tokens = len(segment.ids)
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

    def _check_ids(self, engine: EngineState, segment: Segment) -> None:
        try:
            self.limits.check_ids(segment.ids)
            self.limits.check_ids(segment.id_range or ())
        except RefusedPrompt as e:  # such an id would kill the next engine and the trainer
            raise EngineError(f"{engine.url}: {e}", SERVER_FAULT) from None

    async def _wait_attested(self, engine: EngineState, segment: Segment) -> bool:
        """Wait until the weights of the segment's tokens are attested, and count the tokens as discarded meanwhile.

        Returns:
            False if this run did not push these weights.
        """
        versions = {s.version for s in segment.spans}
        if segment.call_spans is not None:
            versions.update(s.version for s in segment.call_spans)
        if engine.pushed.issuperset(versions):
            return True
        self._counts["discarded_tokens"] += len(segment.ids)
        if not await _wait_pushed(engine, versions):
            return False
        self._counts["discarded_tokens"] -= len(segment.ids)
        return True

    def _truncate(
        self, flight: Flight, sample: TokenSequence, segment: Segment, ends: TurnEnds
    ) -> tuple[Segment, bool]:
        """Truncate a segment at the first stop text.

        Returns:
            the segment up to the end of the turn, and whether the turn has ended.
        """
        if not ends.texts:
            return segment, False
        turn = ends.turn_of(sample)
        end = 0 if ends.is_ended(turn) else ends.text_ends_after(turn, segment.ids)
        if end is None:
            return segment, False
        flight.dropped += len(segment.ids) - end
        self._counts["discarded_tokens"] += len(segment.ids) - end
        return truncate_segment(segment, end, flight.dropped), True

    def _count_prefill(self, cache_source: str, sample: TokenSequence, segment: Segment) -> None:
        self._counts["cached_tokens"] += segment.cached_tokens
        self._counts["prefilled_tokens"] += segment.prompt_tokens
        self._prefills[cache_source][0] += segment.cached_tokens
        self._prefills[cache_source][1] += segment.prompt_tokens
        sample.cached_tokens += segment.cached_tokens
        sample.prefilled_tokens += segment.prompt_tokens

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """Return two dicts: name -> count, and Flight.cache_source -> (cached prompt tokens, all prompt tokens)."""
        return dict(self._counts), {
            source: (cached, total) for source, (cached, total) in self._prefills.items()
        }


def with_cache_shares(
    counts: Mapping[str, float], prefills: Mapping[str, tuple[int, int]]
) -> dict[str, float]:
    """Return the counts of a tally with the cache_share_* metrics of Router.stats."""
    shares = {
        f"cache_share_{source}": cached / total for source, (cached, total) in prefills.items() if total
    }
    return {**counts, **shares}


async def _wait_pushed(engine: EngineState, versions: set[int]) -> bool:
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
