"""Findings of the security review of 919cd76 that need a real engine, named after the finding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.engine.wire import make_session

pytestmark = pytest.mark.integration

PROMPT = [4, 12, 13, 14, 5]
SEEDS = range(7, 13)


async def test_security_a20_a_concurrent_greedy_request_changes_no_seeded_sample(engine: str) -> None:
    """SGLang by itself then draws all of the batch in the order of their probabilities, not of their ids."""
    async with make_session() as session:

        async def ids(**sampling: Any) -> list[int]:
            body = {"input_ids": PROMPT, "sampling_params": {"temperature": 1.0, **sampling}}
            async with session.post(f"{engine}/generate", json=body) as answer:
                output_ids: list[int] = (await answer.json())["output_ids"]
                return output_ids

        async def samples() -> list[list[int]]:
            return await asyncio.gather(*(ids(max_new_tokens=40, sampling_seed=seed) for seed in SEEDS))

        reference = await samples()
        assert await samples() == reference
        greedy_task = asyncio.create_task(ids(max_new_tokens=200, temperature=0.0, ignore_eos=True))
        try:
            assert await samples() == reference
        finally:
            await greedy_task
