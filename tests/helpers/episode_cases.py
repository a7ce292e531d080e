"""Samples that are split into several sequences, and generators whose samples have several sequences."""

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
    """Split a sample into sequences at the response offsets `cuts`.

    The prompt of each sequence is all that precedes it, so losses must not change. Routes are dropped.
    """
    token_ids = [*sample.prompt_ids, *sample.response_ids]
    bounds = list(pairwise([0, *cuts, sample.tokens]))
    first = _part(replace(sample, extra_sequences=[]), *bounds[0], sample)
    for start, end in bounds[1:]:
        first.begin(token_ids[: len(sample.prompt_ids) + start], parent=0)
        first.extra_sequences[-1] = _part(first.extra_sequences[-1], start, end, sample)
    return first


def _part(template: Sample, start: int, end: int, sample: Sample) -> Sample:
    """Return `template` with the response tokens [start, end) of `sample`."""
    mu = sample.mu[start:end]
    return replace(
        template, response_ids=sample.response_ids[start:end], mu=mu, mu_sum=sum(mu), status=sample.status, routes=[],
        behaviour=sample.behaviour[start:end],
        spans=[
            VersionSpan(x.version, *bounds)
            for x in sample.spans if (bounds := _within(x.start, x.end, start, end))
        ],
        observed=[TokenSpan(*bounds) for x in sample.observed if (bounds := _within(x.start, x.end, start, end))],
    )  # fmt: skip


def _within(start: int, end: int, a: int, b: int) -> tuple[int, int] | None:
    """Return the overlap of [start, end) and [a, b) relative to `a`, or None."""
    overlap = max(start, a) - a, min(end, b) - a
    return overlap if overlap[0] < overlap[1] else None


def split_groups(groups: Iterable[SampleGroup], interval: int = 2) -> list[SampleGroup]:
    """Split each `interval`-th sample of a group: 3 to 9 tokens into two sequences, more tokens into three."""

    def of(sample: Sample) -> Sample:
        n = sample.tokens
        if sample.index % interval or n < 3:
            return sample
        return split(sample, [n // 3, n // 2] if n > 9 else [n // 2])

    return [replace(g, samples=[of(s) for s in g.samples]) for g in groups]


def concurrent_sequences(config: Config, tokenizer: object, generate_turn: GenerateTurn) -> Generator:
    """Return a generator that samples a response and, concurrently, responses to two further prompts."""

    async def turn(q: Sample) -> Status:
        await generate_turn(q)
        status, q.status = q.status, Status.PARKED  # the sample ends when all sequences have ended
        return status

    async def generate(sample: Sample, prompt: Prompt) -> None:
        while len(sample.extra_sequences) < 2:
            sample.begin([7, 8, 9 + len(sample.extra_sequences)])
        turns = [asyncio.ensure_future(turn(q)) for q in sample.sequences]
        try:
            statuses = await asyncio.gather(*turns)
        except asyncio.CancelledError:
            await asyncio.gather(*turns, return_exceptions=True)
            raise
        for q, status in zip(sample.sequences, statuses, strict=True):
            q.status = status

    return generate


def consecutive_sequences(config: Config, tokenizer: object, generate_turn: GenerateTurn) -> Generator:
    """Return a generator that samples the same three sequences one after another."""

    async def generate(sample: Sample, prompt: Prompt) -> None:
        for number in range(3):
            q = (
                sample.sequences[number]
                if number <= len(sample.extra_sequences)
                else sample.begin([7, 8, 8 + number])
            )
            await generate_turn(q)
            if number < 2:
                q.status = Status.PARKED
        sample.status = Status.FINISHED

    return generate
