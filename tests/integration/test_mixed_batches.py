"""The tokens of a seeded sample on a deterministic engine, whatever else is in its batch: a real engine on a CPU."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlsys.config import Config
from rlsys.engine.wire import make_session
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]

VOCABULARY = 128
SEEDS = range(7, 13)
PROMPT = [4, 12, 13, 14, 5]
LONG_PROMPT = [4, *(6 + i * 7 % 100 for i in range(150)), 5]
CHUNK, CACHE = 64, 800
END = 2
KINDS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "cut by all three": {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deterministic engine that prefills in chunks, admits requests in hope, and retracts some of them."""
    config = Config.model_validate(
        {
            "model": {"path": tiny_moe},
            "rollout": {"max_response_tokens": 150},
            "engine": {
                "max_running_requests": 32,
                "max_total_tokens": CACHE,
                "extra_args": ["--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"],
            },
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        with running_engine(config, tmp_path_factory.mktemp("mixed")) as url:
            yield url


class Engine:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def generate(
        self, prompt: list[int], seed: int | None = None, logprobs: int = 0, **sampling: Any
    ) -> Any:
        """The answer of /generate, with log-probs of the `logprobs` most probable ids at each token."""
        parameters = {"temperature": 1.0, "max_new_tokens": 30, **sampling}
        if seed is not None:
            parameters["sampling_seed"] = seed
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": parameters}
        body |= {"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {}
        async with self.session.post(f"{self.url}/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def ids(self, prompt: list[int], seed: int | None = None, **sampling: Any) -> list[int]:
        output_ids: list[int] = (await self.generate(prompt, seed, **sampling))["output_ids"]
        return output_ids

    async def samples(self, prompt: list[int] = PROMPT, **sampling: Any) -> list[list[int]]:
        return await asyncio.gather(*(self.ids(prompt, seed, **sampling) for seed in SEEDS))

    async def retracted(self) -> float:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        name = "sglang:num_retracted_requests_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def engine_at(url: str) -> AsyncIterator[Engine]:
    async with make_session() as session:
        yield Engine(url, session)


def murmur3(words: list[int]) -> int:
    """MurmurHash3, 32 bits, seed 0, of 32-bit words, as published by its author."""
    h = 0
    for word in words:
        k = word * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) * 0x1B873593 & 0xFFFFFFFF
        h ^= k
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = h * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & 0xFFFFFFFF
    return h ^ h >> 16


def expected_draw(
    logprobs: Mapping[int, float], seed: int, position: int, sampling: Mapping[str, Any]
) -> tuple[int, float]:
    """The token that the formula draws, and how far ahead it is of the next one.

    logprobs: of the tempered distribution, by token id. Kept are the `top_k` most probable ids; of these, those
    before which a mass of at most `top_p` lies; of these, those of at least `min_p` times the largest probability.
    Each kept id gets log p plus Gumbel noise from (seed, position, id): the largest is drawn.
    """
    order = sorted(logprobs, key=lambda token: (-logprobs[token], token))[: sampling.get("top_k", VOCABULARY)]
    candidates, mass = [], 0.0
    for token in order:
        probability = math.exp(logprobs[token])
        least = sampling.get("min_p", 0.0) * math.exp(logprobs[order[0]])
        if mass <= sampling.get("top_p", 1.0) and probability >= least:
            candidates.append(token)
        mass += probability
    scores = []
    for token in candidates:
        uniform = murmur3([seed & 0xFFFFFFFF, seed >> 32, position, token]) / 0xFFFFFFFF
        scores.append((logprobs[token] - math.log(-math.log(uniform)), token))
    scores.sort(reverse=True)
    return scores[0][1], scores[0][0] - scores[1][0] if len(scores) > 1 else math.inf


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_drawn_by_the_formula(kind: str, url: str) -> None:
    """Noise of a token follows from (seed, position, token id), not from the token's rank in its batch's sort."""
    sampling = KINDS[kind]
    async with engine_at(url) as engine:
        for seed in (*SEEDS, 2**40 + 5):
            answer = await engine.generate(PROMPT, seed, VOCABULARY, **sampling)
            tables = answer["meta_info"]["output_top_logprobs"]
            for index, (token, table) in enumerate(zip(answer["output_ids"], tables, strict=True)):
                logprobs = {int(t): float(value) for value, t, _ in table}
                assert len(logprobs) == VOCABULARY
                drawn, lead = expected_draw(logprobs, seed, len(PROMPT) + index - 1, sampling)
                assert token == drawn or lead < 1e-4


async def test_a_seeded_sample_does_not_depend_on_its_batch(url: str) -> None:
    """All kinds of samples, alone and in a batch with a longer request of each kind."""
    async with engine_at(url) as engine:
        references = {kind: await engine.samples(**sampling) for kind, sampling in KINDS.items()}
        greedy = await engine.ids(PROMPT, **GREEDY)
        for guest_kind, guest_sampling in {"greedy": GREEDY, **KINDS}.items():
            for kind, sampling in KINDS.items():
                longer = {**guest_sampling, "max_new_tokens": 60, "ignore_eos": True}
                guest = asyncio.create_task(engine.ids(PROMPT, 3, **longer))
                assert await engine.samples(**sampling) == references[kind], (kind, guest_kind)
                assert (await guest)[: len(greedy)] == greedy or guest_kind != "greedy"


async def test_samples_are_identical_in_a_mixed_batch_and_alone(url: str) -> None:
    """Their log-probs, too, bit by bit, where none is retracted: the cache holds all of them."""
    requests = [(seed, {**KINDS[kind], "logprobs": 1}) for kind in KINDS for seed in list(SEEDS)[:4]]
    async with engine_at(url) as engine:
        references = [await engine.generate(PROMPT, seed, **sampling) for seed, sampling in requests]
        together = await asyncio.gather(
            *(engine.generate(PROMPT, seed, **sampling) for seed, sampling in requests)
        )
    for reference, answer in zip(references, together, strict=True):
        assert reference["output_ids"] == answer["output_ids"]
        assert reference["meta_info"]["output_token_logprobs"] == answer["meta_info"]["output_token_logprobs"]


async def test_a_prompt_prefilled_in_chunks_in_a_batch_has_the_same_samples(url: str) -> None:
    """A long prompt is prefilled in chunks, whose sizes follow from what is prefilled beside it."""
    assert len(LONG_PROMPT) > 2 * CHUNK
    async with engine_at(url) as engine:
        references = [await engine.ids(LONG_PROMPT, seed, top_k=9) for seed in list(SEEDS)[:4]]
        guest = asyncio.create_task(engine.ids(PROMPT, **{**GREEDY, "max_new_tokens": 150}))
        other_requests = [engine.ids(PROMPT, seed, top_p=0.8) for seed in SEEDS]
        together = await asyncio.gather(
            *other_requests, *(engine.ids(LONG_PROMPT, seed, top_k=9) for seed in list(SEEDS)[:4])
        )
        await guest
        assert together[-4:] == references


async def test_retracted_requests_have_the_same_samples(url: str) -> None:
    """The cache is too small for all: requests are retracted in the middle, and their tokens computed once more."""
    # Without ignore_eos, for which SGLang reserves the cache of the whole response. Three of them fill the cache: on
    # a busy machine requests begin one after the other, and few run at a time.
    sampling = {"max_new_tokens": 300, "logit_bias": {str(END): -100.0}}
    async with engine_at(url) as engine:
        references = [await engine.ids(PROMPT, seed, **sampling) for seed in SEEDS]
        initial_retractions = await engine.retracted()
        mixed = asyncio.gather(
            *(
                engine.ids(
                    PROMPT, seed, **{**sampling, **(KINDS["top_k"] if seed % 2 else {"temperature": 0.0})}
                )
                for seed in range(100, 106)
            )
        )
        together = await engine.samples(**sampling)
        await mixed
        assert await engine.retracted() > initial_retractions
        assert together == references
