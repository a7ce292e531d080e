"""What an attack on the blockers' fixes found and is not fixed yet; strict: a fix removes its mark."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.generators.censoring import Censored, boundary


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_attack_1_an_exit_in_a_task_of_a_generators_own_costs_its_sample(raised: BaseException) -> None:
    async def search() -> None:
        raise raised

    async def sample() -> Any:
        with boundary("rows.jsonl:1") as item:
            await asyncio.gather(search())
        return item.censored

    try:
        outcome = asyncio.run(sample())
    except (SystemExit, KeyboardInterrupt) as e:
        outcome = e
    assert isinstance(outcome, Censored), repr(outcome)


async def test_attack_1_tasks_outside_a_boundary_and_cancelled_ones_are_as_asyncio_has_them() -> None:
    started: list[str] = []

    async def search() -> str:
        started.append("search")
        return "result"

    with boundary("rows.jsonl:1") as item:
        never_run = asyncio.create_task(search())
        never_run.cancel()
        assert await asyncio.create_task(search()) == "result"
        with pytest.raises(asyncio.CancelledError):
            await never_run
    assert item.censored is None and started == ["search"]
    outside = asyncio.create_task(search())
    assert asyncio.iscoroutine(outside.get_coro()) and type(outside.get_coro()).__name__ == "coroutine"
    await outside
