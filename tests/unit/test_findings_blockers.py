"""What an attack on the blockers' fixes found and is not fixed yet; strict: a fix removes its mark."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.rollout.censoring import Censored, boundary


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a task that ends with SystemExit or KeyboardInterrupt is raised out of the event loop by asyncio itself, "
    "before the boundary of its sample sees it; only a task factory of ours, or a process for generators, could help",
)
@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_attack_1_an_exit_in_a_task_of_a_generators_own_costs_its_sample(raised: BaseException) -> None:
    async def search() -> None:
        raise raised

    async def sample() -> Any:
        with boundary("rows.jsonl:1") as item:
            await asyncio.gather(search())
        return item.censored

    try:
        found = asyncio.run(sample())
    except (SystemExit, KeyboardInterrupt) as e:
        found = e
    assert isinstance(found, Censored), repr(found)
