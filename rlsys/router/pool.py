"""The engines behind the router, and the weight version that they should have. Owner: the router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from rlsys.config.rollout import JOINED, EngineConfig
from rlsys.core.errors import RunError
from rlsys.engine.client import EngineClient
from rlsys.router.engine_state import NEVER, UNBOUNDED, EngineState


class PinLost(RunError):
    """The engine that was pinned for an evaluation has died, and its weights are gone."""


class NobodyExplores(RunError):
    """Every engine of the pools that try prompts out is dead, or must not serve."""


class Pool:
    """All engines and the weight version that they should have. Owns the pin."""

    def __init__(
        self,
        clients: list[EngineClient],
        *,
        trusted: bool = False,
        slots: int = UNBOUNDED,
        kinds: EngineConfig | None = None,
    ) -> None:
        """`slots`: requests that each engine decodes at once. `kinds`: which pools of the config there are."""
        self._trusted = trusted
        self._slots = slots
        self._kinds = kinds if kinds is not None and kinds.pools else None
        self.engines: list[EngineState] = []
        self.version = NEVER
        self.older: int | None = None
        """The version before it, while a rolling push goes round: engines that have it serve until their turn."""
        self._gone = {"generated": 0, "lost": 0, "deaths": 0}
        self._seconds_gone = 0.0
        self._gone_by_pool: dict[str, float] = {}
        self._pin: tuple[EngineState, int] | None = None
        """The engine that answers an evaluation alone, and its weight version."""
        for client in clients:
            self.add(client)

    def add(self, client: EngineClient) -> EngineState:
        """It serves once it has the current weights. Raises ValueError for an engine that is here already."""
        if any(e.url == client.url for e in self.engines):
            raise ValueError(f"{client.url} is in the pool already")
        engine = EngineState(client, trusted=self._trusted, slots=self._slots)
        if self._kinds is not None:
            pool = self._kinds.pool_of(client.index, client.pool)
            engine.pool, engine.cost = (JOINED, 1.0) if pool is None else (pool.name, pool.cost)
            engine.explores = pool is not None and pool.role == "explore"
            engine.chain = self._kinds.chain_of(client.pool)
        self.engines.append(engine)
        return engine

    def forget(self, engine: EngineState) -> None:
        """Its figures stay in the sums."""
        self.engines.remove(engine)
        self._seconds_gone += engine.rank_seconds
        _add(self._gone_by_pool, _by_pool(engine))
        self._gone["generated"] += engine.generated + engine.generated_before
        self._gone["lost"] += engine.lost
        self._gone["deaths"] += engine.deaths

    def find(self, url: str) -> EngineState | None:
        return next((e for e in self.engines if e.url == url.rstrip("/")), None)

    def alive(self) -> list[EngineState]:
        return [e for e in self.engines if e.alive and e.quarantined is None and not e.draining]

    def serving(self, *, explorers: bool = False) -> list[EngineState]:
        """Those that a request may go to now; of `explorers`, one that tries a prompt out."""
        now, version = asyncio.get_running_loop().time(), self.version
        if version == NEVER:
            return []
        return [
            e
            for e in self.engines
            if e.version in (version, self.older) and e.alive
            if e.explores is explorers and not (e.paused or e.pinned or e.draining or e.resting)
            if e.quarantined is None and not e.held_off(now)
        ]

    @property
    def explorable(self) -> bool:
        """Whether a prompt can be tried out, now or after a push."""
        return any(e.explores for e in self.alive())

    def stale(self) -> list[EngineState]:
        """Alive, but without weights that may serve: they serve after a push."""
        return [e for e in self.alive() if e.version not in (self.version, self.older) and not e.pinned]

    def before_roll(self) -> list[EngineState]:
        """Those that a rolling push has still to update: all that serve, as long as it has not begun."""
        version = self.version if self.older is None else self.older
        return [e for e in self.alive() if e.version == version and not e.pinned]

    @property
    def hopeless(self) -> bool:
        """Whether there are engines, and every one is quarantined."""
        return bool(self.engines) and all(e.quarantined for e in self.engines)

    def pin(self) -> bool:
        """See Router.pin."""
        serving = self.serving()
        if self._pin is not None or len(serving) < 2:
            return False
        engine = min(serving, key=lambda e: e.tokens)
        engine.pinned = True
        self._pin = engine, engine.version
        return True

    def unpin(self) -> None:
        """See Router.unpin."""
        if self._pin is not None:
            engine, _ = self._pin
            engine.pinned, self._pin = False, None

    @property
    def has_pin(self) -> bool:
        return self._pin is not None

    def pinned(self) -> EngineState:
        """Raises PinLost."""
        if self._pin is None:
            raise PinLost("its engine is no longer pinned")
        engine, version = self._pin
        if not engine.alive or engine.version != version:
            raise PinLost(f"{engine.url} had weight version {version}, it is {engine.state} now")
        return engine

    @property
    def in_flight(self) -> int:
        return sum(e.load for e in self.engines)

    async def probe(self) -> None:
        """Those in their back-off are left alone; those that were drained leave."""
        now = asyncio.get_running_loop().time()
        for engine in [e for e in self.engines if e.draining and not e.load]:
            await engine.count()
            if engine in self.engines:  # a push probes as well, and may have been faster
                self.forget(engine)
        await asyncio.gather(*(e.probe() for e in self.engines if e.alive or not e.breaker.open(now)))
        at_work = self.in_flight > 0
        for engine in self.engines:
            engine.speed.settle(fade=at_work)
            if engine.alive and engine.since is None:
                engine.since = now
        if self._trusted and self.version == NEVER:
            self.version = max((e.version for e in self.alive()), default=NEVER)

    async def count(self, members: Collection[str] | None = None) -> None:
        """Compare the engines' own counters with what arrived; only meaningful while nothing is in flight. `members`:
        URLs of those that are asked; all when none are given."""
        asked = [e for e in self.alive() if not e.pinned and (members is None or e.url in members)]
        await asyncio.gather(*(e.count() for e in asked))

    def figures(self) -> dict[str, dict[str, object]]:
        """See Router.engine_figures."""
        left_out = {e.url for e in self.engines if e.quarantined or e.draining or e.pinned}
        return {
            e.url: {
                "state": e.state,
                "serving": e.alive
                and not e.explores
                and e.url not in left_out
                and e.version in (self.version, self.older),
                "requests": e.load,
                "tokens": e.tokens,
                "weight_version": e.version if e.version >= 0 else None,
                "deaths": e.deaths,
                "alive": e.alive,
                "rank_seconds": e.rank_seconds,
                **e.speed.told(e.load),
                **({"pool": e.pool} if e.pool else {}),
            }
            for e in self.engines
        }

    def totals(self) -> dict[str, float]:
        """Of all engines that ever were here. `engine_rank_seconds`: what they cost, each rank from the first answer
        of its engine until that left, dead or alive. Where the config has pools, also of each: its rank-seconds,
        these times its cost, tokens as of the last interrupt, and how many of its engines serve."""
        pools = dict(self._gone_by_pool)
        for engine in self.engines:
            _add(pools, _by_pool(engine))
        if self._kinds is not None:
            serving = Counter(e.pool for e in [*self.serving(), *self.serving(explorers=True)])
            names = {p.name for p in self._kinds.pools} | {e.pool for e in self.engines}
            pools |= {f"pool_{name}_serving": serving[name] for name in names}
        return {
            **pools,
            "engine_rank_seconds": self._seconds_gone + sum(e.rank_seconds for e in self.engines),
            "engine_tokens": self._gone["generated"]
            + sum(e.generated + e.generated_before for e in self.engines),
            "lost": self._gone["lost"] + sum(e.lost for e in self.engines),
            "engine_deaths": self._gone["deaths"] + sum(e.deaths for e in self.engines),
        }


def _by_pool(engine: EngineState) -> dict[str, float]:
    """See Pool.totals; of an engine in no pool, nothing."""
    if not engine.pool:
        return {}
    seconds, name = engine.rank_seconds, f"pool_{engine.pool}"
    return {
        f"{name}_rank_seconds": seconds,
        f"{name}_cost": seconds * engine.cost,
        f"{name}_tokens": engine.generated + engine.generated_before,
    }


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0.0) + value
