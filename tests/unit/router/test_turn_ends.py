"""Where a turn ends: by an id or by a text, whatever tokens spell it and wherever an interruption cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import Segment, Status
from rlsys.router.turn_ends import TurnEnds, truncate_segment
from tests.helpers.router_rig import A, Rig, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine, token

WORDS = {1: "a", 2: "b", 3: "ab", 4: "</", 5: "end", 6: ">", 7: "end>x", 8: "", 9: "."}


def text(ids: Sequence[int]) -> str:
    return "".join(WORDS.get(i, "?") for i in ids)


ENDS = TurnEnds({9}, ["</end>", "aab"], text)


def slow(ids: list[int]) -> int | None:
    """By the definition: the first prefix that has a text."""
    return next((n for n in range(1, len(ids) + 1) if any(t in text(ids[:n]) for t in ENDS.texts)), None)


@given(st.lists(st.sampled_from(sorted(WORDS)), max_size=24), st.integers(0, 24))
def test_a_stop_text_is_found_at_its_token_for_every_cut(ids: list[int], cut: int) -> None:
    prefix, new = ids[:cut], ids[cut:]
    first = slow(ids)
    if first is None:
        assert ENDS.text_ends_after(prefix, new) is None
    elif first > len(prefix):
        assert ENDS.text_ends_after(prefix, new) == first - len(prefix)


def test_ends_by_hand() -> None:
    assert ENDS.is_ended([1, 9])
    assert ENDS.is_ended([4, 5, 6])
    assert ENDS.is_ended([4, 7]), "the last token may go on behind the text"
    assert not ENDS.is_ended([4, 5])
    assert not ENDS.is_ended([])
    assert ENDS.first_end([1, 4, 5, 6, 9]) == 4
    assert ENDS.first_end([1, 9, 4, 5, 6]) == 2
    assert ENDS.first_end([1, 2]) is None
    assert TurnEnds({9}).with_texts(["."]).text_ends_after([], [9]) is None, "nothing decodes there"
    assert ENDS.with_texts(["?"]).first_end([1, 44]) == 2


def test_a_segment_is_shortened_with_all_that_belongs_to_its_tokens() -> None:
    segment = Segment(
        [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], [VersionSpan(1, 0, 3), VersionSpan(2, 3, 4)], "length",
        routes=RouteSpan(10, 14, bytes(range(8))), call_spans=[VersionSpan(1, 0, 9), VersionSpan(2, 9, 12)],
        support=b"\1\0\0\2\2\0\0",
    )  # fmt: skip
    cut = truncate_segment(segment, 2, 2)
    assert (cut.ids, cut.mu, cut.spans, cut.finish) == ([5, 6], [-1.0, -2.0], [VersionSpan(1, 0, 2)], "stop")
    assert cut.routes == RouteSpan(10, 12, bytes(range(4)))
    assert cut.call_spans == [VersionSpan(1, 0, 9), VersionSpan(2, 9, 10)]
    assert cut.support == b"\1\0\0"
    at_the_seam = truncate_segment(segment, 3, 3)
    assert (at_the_seam.spans, at_the_seam.call_spans) == ([VersionSpan(1, 0, 3)], [VersionSpan(1, 0, 9)])


def stopping_at(*ids: int) -> tuple[str, ...]:
    return ("".join(f"<{i}>" for i in ids),)


def spelled(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("interrupt_at", [None, 8, 9, 10, 11])
async def test_a_text_over_an_interruption_ends_the_response_where_it_would_have(
    interrupt_at: int | None,
) -> None:
    """The engine of this test looks for no texts: what it makes behind them is dropped, its routes are not."""
    token_ids = [token(3, 4 + i, 1) for i in range(36)]
    engine = ScriptedEngine(A, chunk=4)
    async with routing(engine, stop_texts=stopping_at(*token_ids[9:12]), decode=spelled) as rig:
        await rig.push()
        s = sample()
        task = rig.start(s)
        if interrupt_at is not None:
            await reached(rig, engine, interrupt_at)
            await rig.router.interrupt()
            rig.router.resume()
        abort_count = engine.calls.count("abort_request")
        await task
        assert engine.calls.count("abort_request") <= abort_count + 1, "the engine is told once"
        assert (list(s.response_ids), s.status) == (token_ids[:12], Status.FINISHED)
        assert len(s.mu) == 12
        assert s.routes[-1].end == len(s.prompt_ids) + 12 - 1
        await rig.router.interrupt()
        stats = rig.router.stats()
        assert stats["lost"] == 0
        assert stats["received_tokens"] == 12
        assert sum(len(r.output_ids) for r in engine.history) == 12 + stats["discarded_tokens"]


async def reached(rig: Rig, engine: ScriptedEngine, tokens: int) -> None:
    """The engine has made so many tokens, of which it has sent whole chunks only."""
    while not any(len(r.output_ids) >= tokens for r in engine.requests.values()):
        await asyncio.sleep(0.001)


@pytest.mark.virtual_clock
async def test_stop_interrupts_the_engine_after_tokens_are_reported() -> None:
    """The engine dies of that: the tokens had been counted as received, and nobody had heard of them."""
    token_ids = [token(3, 4 + i, 1) for i in range(36)]
    engine, received_counts = ScriptedEngine(A, chunk=4), list[int]()
    async with routing(engine, stop_texts=stopping_at(*token_ids[9:12]), decode=spelled) as rig:
        await rig.push()
        rig.router.on_tokens = lambda _, tokens: received_counts.append(tokens)

        async def dies(rid: str | None) -> None:
            engine.die()
            raise aiohttp.ServerDisconnectedError

        rig.router._pool.engines[0].client.abort = dies  # type: ignore[method-assign]
        s = sample()
        await rig.start(s)
        assert (s.tokens, sum(received_counts), rig.router.stats()["received_tokens"]) == (12, 12, 12)


@pytest.mark.virtual_clock
async def test_an_engine_gets_no_more_stop_texts_than_it_accepts() -> None:
    """SGLang refuses more than 32, which would end the run: an agent's own come on top of rollout.stop."""
    token_ids = [token(3, 4 + i, 1) for i in range(36)]
    engine, stop_counts = ScriptedEngine(A, chunk=4), list[int]()
    stops = [*(f"never {i}" for i in range(40)), *stopping_at(*token_ids[9:12])]
    async with routing(engine, stop_texts=stops, decode=spelled) as rig:
        await rig.push()
        client = rig.router._pool.engines[0].client
        plain = client.generate

        def heard(*args: Any, **kwargs: Any) -> Any:
            stop_counts.append(len(kwargs["stop_texts"]))
            return plain(*args, **kwargs)

        client.generate = heard  # type: ignore[method-assign]
        s = sample()
        await rig.start(s)
        assert (list(s.response_ids), s.status) == (token_ids[:12], Status.FINISHED)
        assert max(stop_counts) <= 32
