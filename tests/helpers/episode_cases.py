"""Rollouts split into sequences: the same tokens behind the same tokens, so that nothing they give may change. And a
generator whose samples have several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from rlsys.config import Config
from rlsys.core.spans import TokenSpan, VersionSpan
from rlsys.core.types import Prompt, Sample, SampleGroup, Status
from rlsys.generators.generator import Generator
from rlsys.generators.turns import GenerateTurn


def split(sample: Sample, cuts: Sequence[int]) -> Sample:
    """The sample as an episode: each sequence has all that came before it as its prompt. Without routes."""
    token_ids = [*sample.prompt_ids, *sample.response_ids]
    bounds = list(pairwise([0, *cuts, sample.tokens]))
    first = _part(replace(sample, extra_sequences=[]), *bounds[0], sample)
    for start, end in bounds[1:]:
        first.begin(token_ids[: len(sample.prompt_ids) + start], parent=0)
        first.extra_sequences[-1] = _part(first.extra_sequences[-1], start, end, sample)
    return first


def _part(into: Sample, start: int, end: int, sample: Sample) -> Sample:
    """Response tokens [start, end)."""
    mu = sample.mu[start:end]
    return replace(
        into, response_ids=sample.response_ids[start:end], mu=mu, mu_sum=sum(mu), status=sample.status, routes=[],
        behaviour=sample.behaviour[start:end],
        spans=[VersionSpan(x.version, *bounds) for x in sample.spans if (bounds := _within(x.start, x.end, start, end))],
        observed=[TokenSpan(*bounds) for x in sample.observed if (bounds := _within(x.start, x.end, start, end))],
    )  # fmt: skip


def _within(start: int, end: int, a: int, b: int) -> tuple[int, int] | None:
    overlap = max(start, a) - a, min(end, b) - a
    return overlap if overlap[0] < overlap[1] else None


def split_groups(groups: Iterable[SampleGroup], every: int = 2) -> list[SampleGroup]:
    """Every second sample with at least three tokens becomes two sequences, those with more than nine three."""

    def of(sample: Sample) -> Sample:
        n = sample.tokens
        if sample.index % every or n < 3:
            return sample
        return split(sample, [n // 3, n // 2] if n > 9 else [n // 2])

    return [replace(g, samples=[of(s) for s in g.samples]) for g in groups]


def three_at_once(config: Config, tokenizer: object, speak: GenerateTurn) -> Generator:
    """A generator: the sample's own response and, at the same time, those to two prompts of its own."""

    async def turn(q: Sample) -> Status:
        await speak(q)
        status, q.status = q.status, Status.PARKED  # at once: the sample has ended when all have
        return status

    async def generate(sample: Sample, prompt: Prompt) -> None:
        while len(sample.extra_sequences) < 2:
            sample.begin([7, 8, 9 + len(sample.extra_sequences)])
        ends = [asyncio.ensure_future(turn(q)) for q in sample.sequences]
        try:
            statuses = await asyncio.gather(*ends)
        except asyncio.CancelledError:
            await asyncio.gather(*ends, return_exceptions=True)
            raise
        for q, end in zip(sample.sequences, statuses, strict=True):
            q.status = end

    return generate


def one_after_the_other(config: Config, tokenizer: object, speak: GenerateTurn) -> Generator:
    """The same conversations in turn; each begins when the one before it has ended."""

    async def generate(sample: Sample, prompt: Prompt) -> None:
        for number in range(3):
            q = (
                sample.sequences[number]
                if number <= len(sample.extra_sequences)
                else sample.begin([7, 8, 8 + number])
            )
            await speak(q)
            if number < 2:
                q.status = Status.PARKED
        sample.status = Status.FINISHED

    return generate
