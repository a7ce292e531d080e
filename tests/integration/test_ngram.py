"""NGRAM speculation on the real engine: tokens are those without it, drafts are accepted, interrupts lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.core.types import Segment
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]

PROMPT = [1, 4, 20, 40, 21, 40, 22, 30, 23, 5, 6]
DRAWS = 600


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """An engine that drafts, and transformers' model."""
    folder = tmp_path_factory.mktemp("ngram")
    made_of = tiny.TINY["qwen3-moe"]
    model = tiny.write(folder / "model", made_of, **made_of.served)
    config = cases.config_of(
        model, folder / "run",
        engine={"extra_args": ["--skip-tokenizer-init"], "max_total_tokens": 8192, "ngram_drafts": 4,
                "deterministic": False},
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    with running_engine(config, folder) as url:
        yield url, loaded.eval()


async def drawn(
    client: EngineClient, rid: str, tokens: int, temperature: float, seed: int | None = None
) -> list[Segment]:
    stream = client.generate(
        PROMPT, rid=rid, max_new_tokens=tokens, temperature=temperature, seed=seed, stop_ids=()
    )
    return [segment async for segment in stream]


def joined(segments: list[Segment]) -> tuple[list[int], list[float]]:
    return [t for s in segments for t in s.ids], [x for s in segments for x in s.mu]


def log_probs(model: Any, ids: list[int]) -> Tensor:
    """Of every token of the vocabulary, in the place of each of `ids`: `[len(ids), V]`."""
    with torch.no_grad():
        logprobs: Tensor = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return logprobs


def test_greedy_tokens_are_the_models(served: tuple[str, Any]) -> None:
    """Twice: the second time from what the first has taught, of which nearly all is accepted."""
    url, model = served

    async def ask() -> list[list[Segment]]:
        async with make_session() as session:
            client = EngineClient(url, session)
            return [await drawn(client, f"greedy-{i}", 60, 0.0) for i in range(2)]

    first, second = asyncio.run(ask())
    ids, mu = joined(first)
    expected = log_probs(model, ids)
    assert ids == expected.argmax(-1).tolist() == joined(second)[0]
    model_logprobs = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(mu), model_logprobs, rtol=0, atol=5e-5)
    assert second[-1].checks < 30 < 60 == len(ids), "several tokens a pass"


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Cells of fewer than 5 expected draws together. Returns the sum, and the degrees of freedom."""
    many = expected >= 5
    observed_counts = torch.cat([counts[many], counts[~many].sum()[None]])
    expected_counts = torch.cat([expected[many], expected[~many].sum()[None]])
    return float(((observed_counts - expected_counts) ** 2 / expected_counts).sum()), int(many.sum())


def test_sampled_tokens_have_the_models_distribution(served: tuple[str, Any]) -> None:
    """The second token after the most frequent first one, which drafts propose by then. The 99.9th percentile of
    chi-square with k degrees is below k + 4.5 sqrt(k) + 8."""
    url, model = served

    async def ask() -> list[list[Segment]]:
        async with make_session() as session:
            client = EngineClient(url, session)
            return await asyncio.gather(
                *(drawn(client, f"draw-{i}-", 3, 1.0, seed=1000 + i) for i in range(DRAWS))
            )

    rows = [joined(segments)[0] for segments in asyncio.run(ask())]
    first = int(torch.tensor([row[0] for row in rows]).mode().values)
    for position, draws in ((0, [row[0] for row in rows]), (1, [row[1] for row in rows if row[0] == first])):
        probs = log_probs(model, [first, 0])[position].exp()
        statistic, degrees = chi_square(
            torch.bincount(torch.tensor(draws), minlength=96).float(), probs * len(draws)
        )
        print(f"token {position}: chi-square {statistic:.1f} with {degrees} degrees, {len(draws)} draws")
        assert statistic < degrees + 4.5 * degrees**0.5 + 8


def test_an_interrupt_loses_no_token(served: tuple[str, Any]) -> None:
    """What came is what the engine counts, and `mu` of each token is the model's."""
    url, model = served

    async def ask() -> tuple[list[list[Segment]], int]:
        async with make_session() as session:
            client = EngineClient(url, session)
            initial_tokens = await client.generated_tokens()
            tasks = [asyncio.create_task(drawn(client, f"cut-{i}-", 200, 1.0, seed=i)) for i in range(4)]
            while not any(task.done() for task in tasks):
                await client.abort(None)
            return await asyncio.gather(*tasks), await client.generated_tokens() - initial_tokens

    parts, counted = asyncio.run(ask())
    assert counted == sum(len(joined(segments)[0]) for segments in parts)
    for segments in parts:
        ids, mu = joined(segments)
        if ids:
            model_logprobs = log_probs(model, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(mu), model_logprobs, rtol=0, atol=5e-5)
