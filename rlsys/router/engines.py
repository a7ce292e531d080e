"""Engines: the interface to engines for commands, evaluations and planners. A router, or several workers' routers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rlsys.config.rollout import Truncation
from rlsys.core.types import Segment
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.client import EngineClient
from rlsys.engine_requests import Limits


class Engines(Protocol):
    """See Router for the methods."""

    @property
    def open(self) -> bool: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def stale_engines(self) -> list[str]: ...

    def resume(self) -> None: ...

    async def release_memory(self) -> None: ...

    def next_members(self, at_most: int) -> list[str]: ...

    async def begin_push(
        self, version: int, *, only_stale: bool = False, members: Collection[str] = ()
    ) -> list[EngineAddress]: ...

    async def end_push(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        left_out: Mapping[str, str] = {},
    ) -> dict[str, float]: ...

    def add_engine(self, client: EngineClient) -> None: ...

    async def evict_engine(self, url: str) -> None: ...

    def engine_states(self) -> dict[str, str]: ...

    def engine_figures(self) -> dict[str, dict[str, object]]: ...

    def stats(self) -> dict[str, float]: ...

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
