"""Early backward, the rollout's side: portions of a step, each group once, all in the take, the same again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsys.core.types import Sample
from tests.helpers.rollout_rig import (
    Rig,
    advance_clock,
    answer_all_but,
    answer_until_done,
    ids,
    make_config,
    rig,
    settle,
)


def even_tail(sample: Sample) -> int:
    """Group i is done after 2 + 2i tokens."""
    return 2 + 2 * sample.group_id


def early_config(tmp_path: Path, **rollout: Any) -> Any:
    """Six groups of two samples a step; two groups fill a micro-batch. Prompts have 3 tokens."""
    return make_config(
        tmp_path,
        rollout={"groups_per_step": 6, **rollout},
        trainer={"early_backward": True, "token_budget": 24},
        launch={"placement": "disaggregated"},
    )


async def portions(r: Rig, step: int) -> list[list[int]]:
    portion_ids = []
    while (part := await r.until(r.manager.early(step))) is not None:
        assert part.train_step == step
        assert all(s.status.terminal for g in part.groups for s in g.samples)
        portion_ids.append(ids(part.groups))
    return portion_ids


async def test_finished_groups_are_delivered_once_and_are_in_the_take(tmp_path: Path) -> None:
    async with rig(early_config(tmp_path), even_tail) as r:
        await r.start()
        # Group by group 10, 14, 18, 22 tokens; 24 make a portion, and the last group comes with the take.
        assert await portions(r, 1) == [[0, 1], [2, 3], [4]]
        assert ids((await r.take(1)).groups) == [0, 1, 2, 3, 4, 5]
        await r.push()


async def test_a_repeated_step_gets_its_portions_again(tmp_path: Path) -> None:
    """The trainer dies in the second step, before its first checkpoint."""
    config = early_config(tmp_path)
    async with rig(config, even_tail) as r:
        await r.start()
        first = await portions(r, 1)
        first_step_ids = ids((await r.take(1)).groups)
        await r.push()
        assert await r.until(r.manager.early(2)) is not None  # never taken: nobody else has heard of it
    async with rig(config, even_tail) as r:
        await r.start()
        assert await portions(r, 1) == first
        assert ids((await r.take(1)).groups) == first_step_ids
        await r.push()
        early_ids = {i for part in await portions(r, 2) for i in part}
        second_step_ids = set(ids((await r.take(2)).groups))
        assert early_ids < second_step_ids
        assert not second_step_ids & set(first_step_ids)


async def test_an_engine_that_returns_during_a_step_costs_no_portion(tmp_path: Path) -> None:
    async with rig(early_config(tmp_path), even_tail) as r:
        await r.start()
        part = await r.until(r.manager.early(1))
        assert part is not None and ids(part.groups) == [0, 1]
        r.router.stale_engines = ["http://engine:2"]
        assert await r.manager.early(1) is None
        assert await r.manager.take(1) is None
        await r.push()
        assert await portions(r, 1) == [[2, 3], [4]]
        assert ids((await r.take(1)).groups) == [0, 1, 2, 3, 4, 5]


async def test_groups_finished_before_the_step_come_with_the_take(tmp_path: Path) -> None:
    async with rig(early_config(tmp_path, over_provision=2, max_staleness=1)) as r:
        await r.start()
        await r.take(1)  # all samples are alike and end together: the surplus makes a step
        await r.push()
        assert await r.manager.early(2) is None
        await r.take(2)


async def test_group_deadlines_apply_while_waiting_for_a_portion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(early_config(tmp_path, groups_per_step=2, group_deadline=3600)) as r:
        await r.start()
        early = asyncio.create_task(r.manager.early(1))
        await settle()
        hung, finished_group = r.buffer.groups[0], r.buffer.groups[1]
        await answer_until_done(r, finished_group)
        advance_clock(monkeypatch, 7200)
        await answer_all_but(r, 0, early)
        assert hung.samples[0].censor_reason is not None
        assert ids((await r.take(1)).groups) == [1, 2]


async def test_portions_are_trained_without_their_old_tokens(tmp_path: Path) -> None:
    """As the take masks them: what goes backward early must not train what the rest of its step may not."""
    config = early_config(tmp_path, over_provision=2, max_staleness=1, staleness_policy="mask")
    masked = 0
    async with rig(config, lambda s: 19 if s.group_id % 4 == 1 else 5) as r:
        await r.start()
        for step in range(1, 12):
            while (part := await r.until(r.manager.early(step))) is not None:
                for sample in (s for g in part.groups for s in g.samples):
                    stale_positions = [i for i, v in enumerate(sample.versions()) if step - v > 1]
                    assert [i for i, trained in enumerate(sample.trained()) if not trained] == stale_positions
                    masked += len(stale_positions)
            await r.take(step)
            await r.push()
    assert masked
