"""What comes from engines: checked, added to its sample, and counted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from rlsys.core.types import Sample, Segment
from rlsys.engine.wire import EngineError
from rlsys.engine_requests import Limits, RefusedPrompt
from rlsys.router.dispatch import EVALUATION, Dispatcher
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.failures import SERVER_FAULT, Suspects
from rlsys.router.turn_ends import TurnEnds, shortened


class Arrivals:
    """Owns the counts of tokens. `told`: of a sample of the ledger, and how many tokens it has just got."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        suspects: Suspects,
        told: Callable[[Sample, int], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._suspects = suspects
        self._told = told
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
        self._prefills: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # cached, all

    async def receive(
        self, engine: EngineState, flight: Flight, segment: Segment, ends: TurnEnds
    ) -> str | None:
        """Add what came to the sample, up to a text that ends the turn. Returns how the request ended, None while it
        goes on."""
        sample, tokens, now = flight.sample, len(segment.ids), asyncio.get_running_loop().time()
        assert sample is not None
        try:
            self._limits.check_ids(segment.ids)
            self._limits.check_ids(segment.id_range or ())
        except (
            RefusedPrompt
        ) as e:  # the next engine that is sent it would die of it, and so would the trainer
            raise EngineError(f"{engine.url}: {e}", SERVER_FAULT) from None
        versions = {s.version for s in segment.spans}
        if segment.call_spans is not None:
            versions.update(s.version for s in segment.call_spans)
        if not engine.pushed.issuperset(versions):
            self._counts["discarded_tokens"] += tokens
            if not await _attested(engine, versions):
                return None
            self._counts["discarded_tokens"] -= tokens
        engine.hear(flight, segment, now)
        engine.received += tokens
        flight.arrived += tokens
        ended = False
        if ends.texts:
            turn = ends.turn_of(sample)
            end = 0 if ends.ended(turn) else ends.text_ends_after(turn, segment.ids)
            ended = end is not None
            if end is not None:
                flight.dropped += tokens - end
                segment = shortened(segment, end, flight.dropped)
                self._counts["discarded_tokens"] += tokens - end
                tokens = end
        try:
            sample.append(segment)
        except ValueError as e:
            raise EngineError(f"{engine.url}: not an answer of SGLang: {e}", SERVER_FAULT) from None
        self._counts["rounded_log_probs"] += segment.rounded
        if tokens:
            self._suspects.clear(sample)
        self._dispatcher.works(engine)
        self._dispatcher.grow(engine, flight, tokens)
        self._counts["received_tokens"] += tokens
        self._counts["draft_checks"] += segment.checks
        self._counts["checked_tokens"] += segment.checked
        if sample.sample_id == EVALUATION:
            self._counts["evaluation_tokens"] += tokens
        else:
            self._told(sample, tokens)
            if segment.finish is not None:
                self._count_prefill(flight.why, sample, segment)
        if ended and tokens and segment.finish is None:
            # The engine has not seen it. What else it makes is dropped, but its routes, which come last, are not.
            # Last of all: it may die now, or be interrupted, and what came has been counted and told.
            await engine.client.abort(flight.rid)
        return segment.finish

    def _count_prefill(self, why: str, sample: Sample, segment: Segment) -> None:
        self._counts["cached_tokens"] += segment.cached_tokens
        self._counts["prefilled_tokens"] += segment.prompt_tokens
        self._prefills[why][0] += segment.cached_tokens
        self._prefills[why][1] += segment.prompt_tokens
        sample.cached_tokens += segment.cached_tokens
        sample.prefilled_tokens += segment.prompt_tokens

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """Counts; and by what could have put a prefix into a cache, how many tokens of prompts came from one, and of
        how many."""
        return dict(self._counts), {why: (cached, all) for why, (cached, all) in self._prefills.items()}


def with_shares(counts: Mapping[str, float], prefills: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """See Router.stats, of a tally."""
    shares = {f"cache_share_{why}": cached / all for why, (cached, all) in prefills.items() if all}
    return {**counts, **shares}


async def _attested(engine: EngineState, versions: set[int]) -> bool:
    """Tokens came of a version that nobody attested here. In a push: wait for it, as long as the request is not
    cut off. Else the engine was restarted between two probes, or another run has pushed to it: these weights are
    not what anybody pushed here.
    """
    while not engine.pushed.issuperset(versions):
        if engine.attested.is_set():
            engine.lost_weights()
            return False
        await engine.attested.wait()
    return True
