"""Members: engines that join and leave during the run, as listed in RUN/engines (rlsys/core/membership.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from rlsys.config import Config
from rlsys.core.membership import Member, read_members, remove_member
from rlsys.core.owner import Owner
from rlsys.engine.client import EngineClient
from rlsys.worker.worker_engines import WorkerEngines

POLL_SECONDS = 1.0
LOST_SECONDS = 300.0
"""A joined engine that has been dead for this long is lost with its machine: no process here restarts it."""

log = logging.getLogger("rlsys.rollout")


class Members:
    """Owns the list of joined engines; WorkerEngines owns the engines. Belongs to one event loop.

    Args:
        make_client: creates a client from URL, number of ranks and pool.
        launch_clients: the engines that the launch itself starts.
    """

    def __init__(
        self,
        config: Config,
        owner: Owner,
        engines: WorkerEngines,
        make_client: Callable[[str, int, str | None], EngineClient],
        launch_clients: Sequence[EngineClient],
    ) -> None:
        self._max_engines, self._min_engines = config.launch.max_engines, config.launch.min_engines or 1
        self._owner, self._engines, self._make_client = owner, engines, make_client
        self._launch_clients = {client.url: client for client in launch_clients}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._warned: set[str] = set()
        """URLs of members whose wait to join or leave was logged."""
        self._dead_since: dict[str, float] = {}
        """URL of a dead joined engine -> loop time at which it was first seen dead."""

    async def watch(self) -> None:
        """Update the engines forever."""
        while True:
            self.update()
            await asyncio.sleep(POLL_SECONDS)

    def update(self) -> None:
        """Add active members, evict inactive ones, and remove dead ones."""
        for url in [url for url, task in self._leaving.items() if task.done()]:
            self._leaving.pop(url).result()
        states, members = self._engines.engine_states(), read_members(self._owner)
        for member in members:
            if member.active and member.url not in states:
                self._add(member, len(states))
            elif not member.active and member.url in states:
                self._evict(member)
            elif not member.active and member.url not in self._launch_clients:
                remove_member(self._owner, member.url)
            states = self._engines.engine_states()
        self._remove_dead({member.url for member in members})

    def _add(self, member: Member, engine_count: int) -> None:
        """Add the member's engine, unless the run already has launch.max_engines engines."""
        if self._max_engines is not None and engine_count >= self._max_engines:
            self._warn_once(member, f"waits: the run has launch.max_engines = {self._max_engines}")
            return
        launch_client = self._launch_clients.get(member.url)
        client = (
            self._make_client(member.url, member.tp, member.pool) if launch_client is None else launch_client
        )
        self._engines.add_engine(client)
        self._warned.discard(member.url)
        log.info("%s joined; it serves once it has the current weights", member.url)

    def _evict(self, member: Member) -> None:
        """Start the eviction of the member's engine, unless too few engines would serve."""
        if member.url in self._leaving:
            return
        metrics = self._engines.engine_metrics()
        remaining = sum(bool(engine["serving"]) for url, engine in metrics.items() if url != member.url)
        serves = member.url in metrics and metrics[member.url]["serving"]
        if serves and remaining < self._min_engines:
            self._warn_once(
                member,
                f"stays: number of engines that would serve without it: {remaining}; expected at least "
                f"{self._min_engines} (launch.min_engines)",
            )
            return
        log.info("%s is leaving; its samples continue on other engines", member.url)
        self._leaving[member.url] = asyncio.create_task(self._engines.evict_engine(member.url))
        self._warned.discard(member.url)

    def _remove_dead(self, member_urls: Collection[str]) -> None:
        """Remove joined engines that are dead, if they are unlisted or have not answered for LOST_SECONDS.

        The process that started a joined engine removes it in other cases.

        Args:
            member_urls: URLs of the engines listed in RUN/engines.
        """
        current_time = asyncio.get_running_loop().time()
        metrics = self._engines.engine_metrics()
        dead = {u for u, engine in metrics.items() if not engine["alive"] and u not in self._launch_clients}
        self._dead_since = {url: self._dead_since.get(url, current_time) for url in dead}
        for url, dead_since in self._dead_since.items():
            is_lost = current_time - dead_since > LOST_SECONDS
            if url in self._leaving or (url in member_urls and not is_lost):
                continue
            reason = f"has not answered for {LOST_SECONDS:g} s" if is_lost else "died"
            log.warning("%s %s; removed", url, reason)
            remove_member(self._owner, url)
            self._leaving[url] = asyncio.create_task(self._engines.evict_engine(url))

    def _warn_once(self, member: Member, reason: str) -> None:
        if member.url not in self._warned:
            self._warned.add(member.url)
            log.warning("%s %s", member.url, reason)
