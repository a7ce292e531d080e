"""Engines: the interface to engines for evaluations, judges and planners. A router, or all routers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlsys.config.rollout import Truncation
from rlsys.core.types import Segment


class Engines(Protocol):
    """See Router for the methods."""

    async def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> Segment: ...

    async def probe(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_texts: Sequence[str] = (),
        *,
        truncation: Truncation | None = None,
        evaluation: bool = False,
    ) -> Segment: ...

    async def prompt_logprobs(self, ids: list[int]) -> list[float]: ...

    def pin(self) -> bool: ...

    def unpin(self) -> None: ...
