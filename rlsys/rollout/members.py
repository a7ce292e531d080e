"""Engines that join and leave while the run goes on, as RUN/engines says (rlsys/core/membership.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from rlsys.config import Config
from rlsys.core.membership import Member, read_members, remove_member
from rlsys.core.owner import Owner
from rlsys.engine.client import EngineClient
from rlsys.router.engines import Engines

LOOK_SECONDS = 1.0
LOST_SECONDS = 300.0
"""An engine that joined and has been dead for so long has gone with its machine: nobody restarts it here."""

log = logging.getLogger("rlsys.rollout")


class Members:
    """Belongs to one event loop. Owns who has joined; what they do is the router's.

    `make_client`: of an engine at a URL with so many ranks, in a pool of that name. `own`: the engines that the
    launch itself starts.
    """

    def __init__(
        self,
        config: Config,
        owner: Owner,
        router: Engines,
        make_client: Callable[[str, int, str | None], EngineClient],
        own: Sequence[EngineClient],
    ) -> None:
        self._most, self._fewest = config.launch.max_engines, config.launch.min_engines or 1
        self._owner, self._router, self._make_client = owner, router, make_client
        self._own = {client.url: client for client in own}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()  # URLs of members that the log has said why they wait
        self._dead_since: dict[str, float] = {}

    async def watch(self) -> None:
        """For the life of the process."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Once: who is wanted comes, who is not goes, who is lost is forgotten."""
        for url in [url for url, task in self._leaving.items() if task.done()]:
            self._leaving.pop(url).result()
        here, told = self._router.engine_states(), read_members(self._owner)
        for member in told:
            if member.active and member.url not in here:
                self._take_in(member, len(here))
            elif not member.active and member.url in here:
                self._send_away(member)
            elif not member.active and member.url not in self._own:
                remove_member(self._owner, member.url)
            here = self._router.engine_states()
        self._forget_lost({member.url for member in told})

    def _take_in(self, member: Member, here: int) -> None:
        if self._most is not None and here >= self._most:
            self._tell_once(member, f"waits: the run has launch.max_engines = {self._most}")
            return
        own = self._own.get(member.url)
        joins = self._make_client(member.url, member.tp, member.pool) if own is None else own
        self._router.add_engine(joins)
        self._told.discard(member.url)
        log.info("%s joins; it serves when it has the current weights", member.url)

    def _send_away(self, member: Member) -> None:
        if member.url in self._leaving:
            return
        figures = self._router.engine_figures()
        left = sum(bool(told["serving"]) for url, told in figures.items() if url != member.url)
        serves = member.url in figures and figures[member.url]["serving"]
        if serves and left < self._fewest:
            self._tell_once(
                member, f"stays: without it {left} engines would serve, fewer than {self._fewest}"
            )
            return
        log.info("%s leaves; its samples go on in other engines", member.url)
        self._leaving[member.url] = asyncio.create_task(self._router.evict_engine(member.url))
        self._told.discard(member.url)

    def _forget_lost(self, told: Collection[str]) -> None:
        """`told`: URLs of those that joined. Who started an engine and saw it die takes it back itself."""
        now = asyncio.get_running_loop().time()
        figures = self._router.engine_figures()
        dead = {u for u, told in figures.items() if not told["alive"] and u not in self._own}
        self._dead_since = {url: self._dead_since.get(url, now) for url in dead}
        for url, since in self._dead_since.items():
            lost = now - since > LOST_SECONDS
            if url in self._leaving or (url in told and not lost):
                continue
            log.warning(
                "%s %s; forgotten", url, f"has not answered for {LOST_SECONDS:g} s" if lost else "died"
            )
            remove_member(self._owner, url)
            self._leaving[url] = asyncio.create_task(self._router.evict_engine(url))

    def _tell_once(self, member: Member, why: str) -> None:
        if member.url not in self._told:
            self._told.add(member.url)
            log.warning("%s %s", member.url, why)
