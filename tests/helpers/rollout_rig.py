"""RolloutManager with a real buffer, planner, scorer and workers on a scripted router, and the trainer's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlsys.config import Config, identity
from rlsys.core.types import Prompt, Sample, SampleGroup, TrainBatch
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.planning import Planning, PromptScores
from rlsys.planning.teacher import EngineTeacher
from rlsys.rewards.judges import JudgeWithTimeout
from rlsys.rollout.manager import RolloutManager
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers
from tests.helpers.loaded import load_tokens
from tests.helpers.scripted_router import ScriptedRouter

T = TypeVar("T")
Reward = Callable[[Prompt, str], Awaitable[float]]


class Numbers:
    """Prompt source: training prompts have three ids, held-out prompt i has i + 1."""

    def train(self, index: int) -> Prompt:
        entry = {"answer": str(index), "data_source": ("even", "odd")[index % 2]}
        return Prompt(index, str(index), [5, 6, index % 50], entry)

    def heldout(self, n: int) -> list[Prompt]:
        return [Prompt(i, str(i), [1] * (i + 1), {"heldout": True}) for i in range(n)]


async def length_reward(prompt: Prompt, text: str) -> float:
    """Return 1.0 for an odd number of tokens, else 0.0."""
    return float(len(text) % 2)


APRIL = {"rollout": {"over_provision": 2, "max_staleness": 4}}
"""Sections of a config."""


def slow_group_zero(sample: Sample) -> int:
    return 8 if sample.group_id == 0 else 3


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    rollout = {
        "groups_per_step": 2, "group_size": 2, "max_response_tokens": 20, "reward_timeout": 5,
        **sections.pop("rollout", {}),
    }  # fmt: skip
    data = {"run": {"dir": tmp_path}, "model": {"path": tmp_path}, "rollout": rollout, **sections}
    return Config.model_validate(data)


class Rig:
    """A rollout manager on a scripted router, and the trainer's calls."""

    def __init__(
        self,
        config: Config,
        length: Callable[[Sample], int],
        reward: Reward,
        prompt_scores: PromptScores | None = None,
        judge: JudgeWithTimeout | None = None,
        tokenizer: Any = None,
        teacher: EngineTeacher | None = None,
    ) -> None:
        self.folder = config.run.dir
        self.router = ScriptedRouter(length)
        planning = Planning(config, Numbers(), tokenizer, judge, prompt_scores, teacher=teacher)
        self.buffer = RolloutBuffer(config.run.dir / FILE_NAME, identity(config), planning.largest)
        self.scorer = Scorer(
            lambda: nullcontext(reward), lambda ids: "x" * len(ids), config.rollout.reward_timeout
        )
        router: Any = self.router
        workers = direct_workers(config, router, self.scorer, tokenizer)
        self.manager = RolloutManager(config, self.buffer, workers, Numbers(), self.scorer, planning)

    async def push(self) -> None:
        await self.manager.end_push(await self.manager.begin_push(), [])

    async def start(self, step: int = 0) -> None:
        await self.manager.restore(step)
        await self.push()

    async def take(self, step: int) -> TrainBatch:
        """Tick until the batch of a step is complete, and return it with its tokens loaded."""
        batch = await self.until(self.manager.take(step))
        assert batch is not None
        return replace(batch, groups=load_tokens(self.folder, batch.groups))

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Tick until a coroutine has finished, and return its result."""
        task = asyncio.create_task(work)
        for _ in range(2000):
            await settle()
            if task.done():
                return task.result()
            self.router.tick()
        raise AssertionError(f"not done: {self.manager.status()}")


async def answer_all_but(r: Rig, group_id: int, task: asyncio.Task[Any]) -> None:
    """Add tokens to all samples except those of one group, until a task is done."""
    silent = {s.sample_id for s in r.buffer.groups[group_id].samples}
    while not task.done():
        for i in set(r.router.in_flight) - silent:
            r.router.add_tokens(i, 1)
        await asyncio.sleep(0.002)


async def answer_until_done(r: Rig, group: SampleGroup) -> None:
    """Add tokens only to the samples of one group, until it is done."""
    while not group.done:
        for i in set(r.router.in_flight) & {s.sample_id for s in group.samples}:
            r.router.add_tokens(i, 1)
        await settle()


def advance_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the event loop's clock by this many seconds."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(12):
        await asyncio.sleep(0)


@asynccontextmanager
async def rig(
    config: Config,
    length: Callable[[Sample], int] = lambda s: 3,
    reward: Reward = length_reward,
    prompt_scores: PromptScores | None = None,
    judge: JudgeWithTimeout | None = None,
    tokenizer: Any = None,
    teacher: EngineTeacher | None = None,
) -> AsyncIterator[Rig]:
    """Yield a rig. At exit, check that the ledger is consistent and accounts for every token of the router."""
    instance = Rig(config, length, reward, prompt_scores, judge, tokenizer, teacher)
    tokens_before = sum(instance.buffer.ledger().tokens.values())
    try:
        yield instance
        await instance.manager.close()
        ledger = instance.buffer.ledger()
        check_ledger(ledger)
        sampled = sum(ledger.tokens.values()) - ledger.inherited_tokens + ledger.discarded_tokens
        assert sampled == tokens_before + instance.router.received
    finally:
        instance.buffer.close()


def ids(groups: list[SampleGroup]) -> list[int]:
    return [g.group_id for g in groups]


def abandon(buffer: RolloutBuffer) -> None:
    """Close the file as a killed process would: uncommitted changes are lost."""
    if buffer._db.in_transaction:
        buffer._db.execute("ROLLBACK")
    buffer.close()
