"""Agents before scripted engines: an interrupt, a push and an engine's death hold an answer up, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rlsys.core.types import Sample, Status, TokenSequence
from rlsys.generators.generator import build_generator
from rlsys.generators.turns import sampling_turns
from tests.helpers.router_rig import A, B, Rig
from tests.helpers.scripted_engine import ScriptedEngine, logprob, token
from tests.unit.generators.test_agent import TOKENIZER, config, prompt

pytestmark = pytest.mark.gate


def never(seed: int) -> int:
    return -1


class Watch:
    """Says when a sample has got so many tokens."""

    def __init__(self, rig: Rig) -> None:
        self._waits: list[tuple[int, asyncio.Event]] = []
        rig.router.on_tokens = self._heard

    def _heard(self, sample: TokenSequence, tokens: int) -> None:
        for least, event in self._waits:
            if sample.tokens + 12 * (sample.sequence > 0) >= least:
                event.set()

    async def until(self, tokens: int) -> None:
        event = asyncio.Event()
        self._waits.append((tokens, event))
        await event.wait()


async def test_engine_interruptions_delay_an_agent_and_change_no_token() -> None:
    first, second = ScriptedEngine(A, ends_at=never, chunk=1), ScriptedEngine(B, ends_at=never, chunk=1)
    rig = Rig(first, second)
    watch = Watch(rig)
    await rig.push()
    made_for = config("three_turns", max_response_tokens=100)
    generate = build_generator(made_for, TOKENIZER, sampling_turns(made_for, rig.router))
    sample = Sample(5, 1, 0, prompt().ids, seed=7)
    running: asyncio.Future[None] = asyncio.ensure_future(generate(sample, prompt()))
    await watch.until(5)
    await rig.router.interrupt()
    assert 5 <= sample.tokens < 12 and sample.status is Status.PARKED
    rig.router.resume()
    await watch.until(20)  # in its second turn
    await rig.push()
    await watch.until(36)  # in its third
    serving = first if sample.engine == A else second
    serving.die()
    await running
    check(sample, TOKENIZER.decode)
    assert sample.resumes == 3 and [span.version for span in sample.spans] == [1, 2]


def check(sample: Sample, decode: Callable[[list[int]], str]) -> None:
    """Three turns of twelve tokens, each as an engine without interruptions makes it."""
    assert sample.status is Status.TRUNCATED and sample.sampled_tokens == 36
    observed_texts = [decode(sample.response_ids[o.start : o.end].tolist()) for o in sample.observed]
    assert observed_texts == ["<user>0<assistant><think>", "<user>1<assistant><think>"]
    versions, first = sample.versions(), len(sample.prompt_ids)
    for i, trained in enumerate(sample.trained()):
        if trained:
            assert sample.response_ids[i] == token(sample.seed, first + i, versions[i])
            assert sample.mu[i] == logprob(sample.seed, first + i, versions[i])


async def test_an_agent_continues_after_a_request_beyond_the_context_is_refused() -> None:
    rig = Rig(ScriptedEngine(A, ends_at=lambda seed: 30))
    await rig.push()
    made_for = config("asks_too_much")
    sample = Sample(5, 1, 0, prompt().ids, seed=7)
    await build_generator(made_for, TOKENIZER, sampling_turns(made_for, rig.router))(sample, prompt())
    assert (sample.status, sample.prompt_ids) == (Status.FINISHED, prompt().ids)


async def test_engine_interruptions_delay_every_conversation_and_change_no_token() -> None:
    """Three at the same time, each with tokens of its own."""
    first, second = ScriptedEngine(A, ends_at=never, chunk=1), ScriptedEngine(B, ends_at=never, chunk=1)
    rig = Rig(first, second)
    watch = Watch(rig)
    await rig.push()
    made_for = config("asks_others", max_response_tokens=100)
    generate = build_generator(made_for, TOKENIZER, sampling_turns(made_for, rig.router))
    sample = Sample(5, 1, 0, prompt().ids, seed=7)
    running: asyncio.Future[None] = asyncio.ensure_future(generate(sample, prompt()))
    await watch.until(5)
    await rig.router.interrupt()
    rig.router.resume()
    await watch.until(15)  # a sub-agent's
    await rig.push()
    await watch.until(20)
    (first if sample.extra_sequences[0].engine == A else second).die()
    await running
    assert [(q.sequence, q.sampled_tokens, q.parent) for q in sample.sequences] == [
        (0, 24, None), (1, 16, None), (2, 16, None)
    ]  # fmt: skip
    assert len({q.seed for q in sample.sequences}) == 3
    for q in sample.sequences:
        versions, first_place = q.versions(), len(q.prompt_ids)
        for i, trained in enumerate(q.trained()):
            if trained:
                assert q.response_ids[i] == token(q.seed, first_place + i, versions[i])
                assert q.mu[i] == logprob(q.seed, first_place + i, versions[i])
