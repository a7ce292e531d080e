"""Parts that all modes of bench/april.py share: engine, random weights and prompts, trace, measurement of slots."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlsys.config import Config
from rlsys.core.types import AnySequence, Prompt, TokenSequence
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.rollout.canaries import CANARIES, CANARY_TOKENS
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.router import Router

BATCH, GROUP_SIZE = 40, 2
"""Samples of a train step, N, the same in every mode, and of a group. N' is a multiple of the group size at every
N'/N. There are few samples for the length of a response, as in long reasoning runs, so that responses end in few
passes, and most passes decode."""
VOCAB, PROMPT_TOKENS, CONTEXT = 128, 24, 2048
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Mode:
    name: str
    over_provision: float
    max_staleness: int
    placement: str = "colocated"
    interruption: Interruption = "abort"
    batch: int = BATCH

    @property
    def slots(self) -> int:
        """Return N', the samples in flight."""
        return round(self.batch * self.over_provision)

    def warm_steps(self, lengths: Sequence[int]) -> int:
        """Return the steps in which the longest response can begin and end; 0 if none spans several steps."""
        a_step = self.batch * sum(lengths) / len(lengths) / self.slots
        return math.ceil(max(lengths) / a_step) if self.max_staleness else 0


class TracedRouter(Router):
    """The product's router, with the response lengths of the trace."""

    lengths: Sequence[int] = ()
    interrupt_seconds = 0.0

    async def interrupt(
        self, keep: Callable[[TokenSequence], bool] | None = None, *, keep_serving: bool = False
    ) -> None:
        start = time.monotonic()
        await super().interrupt(keep, keep_serving=keep_serving)
        self.interrupt_seconds += time.monotonic() - start

    async def generate(self, sample: AnySequence, *, max_response_tokens: int, **how: Any) -> AnySequence:
        limit = self.lengths[sample.sample_id % len(self.lengths)]
        return await super().generate(sample, max_response_tokens=limit, **how)


class RandomPrompts:
    """A source of prompts with random ids, the same in every mode."""

    def train(self, index: int) -> Prompt:
        rng = random.Random(index)
        return Prompt(index, "", [rng.randrange(9, VOCAB) for _ in range(PROMPT_TOKENS)], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(-1 - i) for i in range(n)]


def canary_ids() -> list[list[int]]:
    """Return canaries as large as those of the product: some prompts, and as many of its longest responses."""
    rng = random.Random(-1)
    lengths = [PROMPT_TOKENS] * CANARIES + [CANARY_TOKENS] * CANARIES
    return [[rng.randrange(9, VOCAB) for _ in range(n)] for n in lengths]


@dataclass
class Stage:
    """Engine, tensors and trace that all modes share."""

    client: EngineClient
    config: Config
    tensors: dict[str, Tensor]
    canaries: list[Canary]
    lengths: list[int]
    folder: Path

    async def tokens_read(self) -> float:
        """Return the engine's count of prefilled tokens since its start.

        It includes prompts, canaries, and prefixes that are prefilled again, also those of requests in the engine."""
        lines = (await self.client.get("/metrics")).splitlines()
        read = (x for x in lines if x.startswith("sglang:realtime_tokens_total{") and "prefill_compute" in x)
        return sum(float(line.rsplit(" ", 1)[1]) for line in read)

    @property
    def true_mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def for_mode(self, mode: Mode, folder: Path) -> Config:
        data = self.config.model_dump()
        data["run"]["dir"] = folder
        data["rollout"] |= {
            "groups_per_step": mode.batch // GROUP_SIZE, "group_size": GROUP_SIZE,
            "over_provision": mode.over_provision, "max_staleness": mode.max_staleness,
        }  # fmt: skip
        data["launch"]["placement"] = mode.placement
        data["router"]["interruption"] = mode.interruption
        return Config.model_validate(data)

    def router(self, interruption: Interruption = "abort") -> TracedRouter:
        router = TracedRouter(
            [self.client],
            vocab_size=VOCAB,
            context_length=CONTEXT,
            stop_ids=(),
            bounds=Bounds.of(self.config),
            interruption=interruption,
        )
        router.lengths = self.lengths
        return router


@dataclass
class Clock:
    """Samples the number of busy slots while a mode runs."""

    router: Router
    slots: int
    busy_slots: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            self.busy_slots.append(self.router.stats()["in_flight"])
            await asyncio.sleep(LOOK_SECONDS)

    def idle_share(self) -> float:
        """Return the share of the time with fewer than half of the slots busy."""
        return sum(n < self.slots / 2 for n in self.busy_slots) / max(1, len(self.busy_slots))
