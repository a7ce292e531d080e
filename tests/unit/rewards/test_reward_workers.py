"""The processes of plain reward functions: how many start, when, and that none is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from rlsys.config import Config
from rlsys.core.types import Prompt
from rlsys.rewards import Rewards
from rlsys.worker.scoring import Scorer
from tests.helpers.responses import sample_of

pytestmark = pytest.mark.gate  # each process takes seconds to start


@pytest.fixture
def rewards(tmp_path: Path) -> Rewards:
    return Rewards(
        Config.model_validate({"model": {"path": tmp_path}, "data": {"reward": f"{__name__}:meets"}})
    )


def meets(config: Config) -> object:
    """Right when as many as `entry` says score at the same time: each waits until it sees all of them."""

    def score(prompt: Prompt, text: str) -> float:
        folder = Path(prompt.entry["place"])
        (folder / str(prompt.index)).touch()
        while len(list(folder.iterdir())) < prompt.entry["together"]:
            os.sched_yield()
        return 1.0

    return score


async def test_quick_scores_share_one_process_and_those_that_last_get_another(
    rewards: Rewards, tmp_path: Path
) -> None:
    """A start costs seconds of the cores that the engine starts on: four at once were the most of a run's start."""
    rewards.begin()
    scorer = Scorer(rewards.open, lambda ids: "", timeout=60, concurrency=4)

    async def worth(count: int, together: int, place: Path) -> list[float | None]:
        place.mkdir()
        prompts = [Prompt(i, "", [], {"place": str(place), "together": together}) for i in range(count)]
        return [v.reward for v in await asyncio.gather(*(scorer.score(p, sample_of()) for p in prompts))]

    assert await worth(8, 1, tmp_path / "quick") == [1.0] * 8
    assert rewards._workers.started == 1
    assert await worth(2, 2, tmp_path / "slow") == [1.0] * 2
    assert rewards._workers.started == 2
    await rewards.close()


async def test_processes_that_began_ahead_end_with_the_rewards(rewards: Rewards) -> None:
    rewards.begin()
    await asyncio.sleep(0)
    await rewards.close()  # in the middle of the start
    assert rewards._start_task is not None and rewards._start_task.cancelled()
    assert not [p for p in psutil.Process().children() if "rlsys.rewards.worker" in p.cmdline()]
