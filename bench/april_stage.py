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
"""Number of samples of a train step, N, and of a group. N' is a multiple of the group size at every N'/N.

A step has few samples for the length of a response, as in long reasoning runs. So responses end in few passes, and
most passes only decode.
"""
VOCAB, PROMPT_TOKENS, CONTEXT = 128, 24, 2048
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Mode:
    """Settings of a mode of april.py; all but `name` and `batch` are fields of a config.

    Attributes:
        batch: number of samples that a step takes.
    """

    name: str
    over_provision: float
    max_staleness: int
    placement: str = "colocated"
    interruption: Interruption = "abort"
    batch: int = BATCH

    @property
    def slots(self) -> int:
        """Return N', the number of samples in flight."""
        return round(self.batch * self.over_provision)

    def warm_steps(self, lengths: Sequence[int]) -> int:
        """Return the number of steps in which the longest response starts and ends.

        It is 0 in a mode in which no response spans several steps.

        Args:
            lengths: response lengths of the trace in tokens.
        """
        tokens_of_slot = self.batch * sum(lengths) / len(lengths) / self.slots
        return math.ceil(max(lengths) / tokens_of_slot) if self.max_staleness else 0


class TracedRouter(Router):
    """A router that gives each response the length of the trace.

    Attributes:
        lengths: response lengths in tokens; sample i gets entry i modulo their number.
        interrupt_seconds: total time of interruptions so far.
    """

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
    """Return random canaries with the number and the lengths of a run's canaries: prompts, and longest responses."""
    rng = random.Random(-1)
    lengths = [PROMPT_TOKENS] * CANARIES + [CANARY_TOKENS] * CANARIES
    return [[rng.randrange(9, VOCAB) for _ in range(n)] for n in lengths]


@dataclass
class Stage:
    """Engine, tensors and trace that all modes share.

    Attributes:
        client: client of the engine.
        config: base of the modes' configs.
        tensors: the weights to push.
        canaries: canaries with the engine's log-probs.
        lengths: response lengths of the trace in tokens.
        folder: parent of the modes' run folders.
    """

    client: EngineClient
    config: Config
    tensors: dict[str, Tensor]
    canaries: list[Canary]
    lengths: list[int]
    folder: Path

    async def tokens_read(self) -> float:
        """Return the number of tokens that the engine has prefilled since its start.

        The number includes prompts, canaries, and prefixes that are prefilled again.
        """
        lines = (await self.client.get("/metrics")).splitlines()
        prefill_lines = (
            line
            for line in lines
            if line.startswith("sglang:realtime_tokens_total{") and "prefill_compute" in line
        )
        return sum(float(line.rsplit(" ", 1)[1]) for line in prefill_lines)

    @property
    def true_mean(self) -> float:
        """Return the mean response length of the trace in tokens."""
        return sum(self.lengths) / len(self.lengths)

    def for_mode(self, mode: Mode, folder: Path) -> Config:
        """Return the config of a mode, with the run folder `folder`."""
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
        """Return a new router of the engine with the trace's response lengths."""
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
    """Records the number of busy slots every POLL_SECONDS while a mode runs."""

    router: Router
    slots: int
    busy_slots: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            self.busy_slots.append(self.router.stats()["in_flight"])
            await asyncio.sleep(POLL_SECONDS)

    def idle_share(self) -> float:
        """Return the share of the time in which fewer than half of the slots were busy."""
        return sum(n < self.slots / 2 for n in self.busy_slots) / max(1, len(self.busy_slots))
