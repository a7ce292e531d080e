"""Placement by measured speed, on two real engines of which one is slowed down."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.core.types import Sample
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LONG, SHORT = 400, 12
"""Tokens of a prompt."""
EACH = 8
SLEEP = 0.05


def mixed(first: int) -> list[tuple[Sample, int]]:
    """Long prompts with 4 tokens of response, and short ones with 64, in turns; what each may write."""

    def of(i: int, prompt: int, response: int) -> tuple[Sample, int]:
        return Sample(
            i, i, 0, [9 + (i * 37 + j * (1 + i)) % 110 for j in range(prompt)], seed=i + 1
        ), response

    return [of(first + i, *((LONG, 4) if i % 2 else (SHORT, 64))) for i in range(2 * EACH)]


async def test_a_slow_decoding_engine_gets_long_prompts_instead_of_long_responses(
    engine: str, engine_config: Config, tmp_path: Path
) -> None:
    """It sleeps before every pass, so writing takes it many times longer and reading a long prompt once."""
    with running_engine(engine_config, tmp_path) as slow:
        async with make_session() as session:
            clients = [EngineClient(url, session) for url in (engine, slow)]
            for client in clients:
                await client.set_weight_version(0)  # other tests have pushed to one of them
            await clients[1].slow_down(SLEEP)
            router = Router(
                list(clients),
                vocab_size=128,
                context_length=512,
                stop_ids=(),
                bounds=Bounds(1.0, 1.0),
                strategy="hardware_affinity",
                skip_attestation=True,
            )
            watch = asyncio.create_task(router.watch())
            router.resume()

            async def placed(first: int) -> list[Sample]:
                work = mixed(first)
                generations = (router.generate(s, max_response_tokens=n, temperature=1.0) for s, n in work)
                async with asyncio.timeout(300):
                    return await asyncio.gather(*generations)

            samples_before = await placed(0)
            async with asyncio.timeout(60):
                while any(
                    engine_figures["prefill_tokens_per_s"] is None
                    or engine_figures["decode_tokens_per_s"] is None
                    for engine_figures in router.engine_metrics().values()
                ):
                    await asyncio.sleep(0.05)
            figures = router.engine_metrics()
            samples_after = await placed(100)
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    def on_slow(samples: list[Sample], prompt: int) -> int:
        return sum(s.engine == slow for s in samples if len(s.prompt_ids) == prompt)

    print(
        f"on the slow engine before: {on_slow(samples_before, LONG)} long, {on_slow(samples_before, SHORT)} short; "
        f"after: {on_slow(samples_after, LONG)} long, {on_slow(samples_after, SHORT)} short; {figures}"
    )
    assert figures[slow]["decode_tokens_per_s"] < figures[engine]["decode_tokens_per_s"]  # type: ignore[operator]
    assert on_slow(samples_before, SHORT) >= EACH / 4, "nothing was known then"
    assert on_slow(samples_after, SHORT) <= 1 and on_slow(samples_after, LONG) >= EACH / 4
