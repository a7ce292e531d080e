"""Pool: the engines behind the router, and their expected weight version. Owner: the router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from rlsys.config.rollout import JOINED_POOL, EngineConfig
from rlsys.core.errors import RunError
from rlsys.engine.client import EngineClient
from rlsys.router.engine_state import NEVER, UNBOUNDED, EngineState


class PinLost(RunError):
    """Raised when the engine that was pinned for an evaluation has died, and its weights are lost."""


class NoExplorationEngine(RunError):
    """Raised when no engine for exploration (a pool with `role: explore`) can serve, now or after a push."""


class Pool:
    """All engines and their expected weight version. Owns the reservation of an engine for an evaluation (pin)."""

    def __init__(
        self,
        clients: list[EngineClient],
        *,
        skip_attestation: bool = False,
        slots: int = UNBOUNDED,
        engine_config: EngineConfig | None = None,
    ) -> None:
        """Create a pool.

        Args:
            skip_attestation: trust the weight versions that the engines report.
            slots: requests that each engine decodes concurrently.
            engine_config: pools and sizes of the engines; None: one pool.
        """
        self._skip_attestation = skip_attestation
        self._slots = slots
        self._engine_config = engine_config if engine_config is not None and engine_config.pools else None
        self.engines: list[EngineState] = []
        self.version = NEVER
        self.older: int | None = None
        """The previous version during a rolling push, otherwise None. Engines with it serve until their round."""
        self._removed_totals = {"generated": 0, "lost": 0, "deaths": 0}
        self._removed_seconds = 0.0
        self._removed_by_pool: dict[str, float] = {}
        self._pin: tuple[EngineState, int] | None = None
        """The engine reserved for an evaluation, and its weight version."""
        for client in clients:
            self.add(client)

    def add(self, client: EngineClient) -> EngineState:
        """Add an engine. It serves when it has the current weights.

        Raises:
            ValueError: an engine with this URL is already in the pool.
        """
        if any(e.url == client.url for e in self.engines):
            raise ValueError(f"{client.url} is already in the pool")
        engine = EngineState(client, skip_attestation=self._skip_attestation, slots=self._slots)
        if self._engine_config is not None:
            pool = self._engine_config.pool_of(client.index, client.pool)
            engine.pool, engine.cost = (JOINED_POOL, 1.0) if pool is None else (pool.name, pool.cost)
            engine.explores = pool is not None and pool.role == "explore"
            engine.chain = self._engine_config.chain_of(client.pool)
        self.engines.append(engine)
        return engine

    def remove(self, engine: EngineState) -> None:
        """Remove an engine. `totals` still includes its counts."""
        self.engines.remove(engine)
        self._removed_seconds += engine.rank_seconds
        _add(self._removed_by_pool, _pool_totals(engine))
        self._removed_totals["generated"] += engine.generated + engine.generated_before
        self._removed_totals["lost"] += engine.lost_tokens
        self._removed_totals["deaths"] += engine.deaths

    def find(self, url: str) -> EngineState | None:
        """Return the engine with this URL, None if there is none."""
        return next((e for e in self.engines if e.url == url.rstrip("/")), None)

    def alive(self) -> list[EngineState]:
        """Return the live engines, except quarantined and draining ones."""
        return [e for e in self.engines if e.alive and e.quarantined is None and not e.draining]

    def serving(self, *, explorers: bool = False) -> list[EngineState]:
        """Return the engines that may get a request now.

        Args:
            explorers: return the engines for exploration instead of all others.
        """
        time, version = asyncio.get_running_loop().time(), self.version
        if version == NEVER:
            return []
        return [
            e
            for e in self.engines
            if e.version in (version, self.older) and e.alive
            if e.explores is explorers and not (e.paused or e.pinned or e.draining or e.update_pending)
            if e.quarantined is None and not e.backing_off(time)
        ]

    @property
    def explorable(self) -> bool:
        """Whether an engine for exploration can serve, now or after a push."""
        return any(e.explores for e in self.alive())

    def stale(self) -> list[EngineState]:
        """Return the live engines without current weights. They serve after a push."""
        return [e for e in self.alive() if e.version not in (self.version, self.older) and not e.pinned]

    def rolling_targets(self) -> list[EngineState]:
        """Return the engines that the current rolling push has not updated yet.

        Without a rolling push, return the engines that have the current weights.
        """
        version = self.version if self.older is None else self.older
        return [e for e in self.alive() if e.version == version and not e.pinned]

    @property
    def states(self) -> dict[str, str]:
        """URL -> description of the state of each engine."""
        return {e.url: e.state for e in self.engines}

    @property
    def all_quarantined(self) -> bool:
        """Whether there are engines, and all are quarantined."""
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
        """Return the pinned engine.

        Raises:
            PinLost: no engine is pinned, or the pinned engine died or lost its weights.
        """
        if self._pin is None:
            raise PinLost("evaluation: no engine is pinned; expected the engine that was reserved for it")
        engine, version = self._pin
        if not engine.alive or engine.version != version:
            raise PinLost(
                f"evaluation: the pinned engine {engine.url} no longer serves weight version {version}; "
                f"its state: {engine.state}"
            )
        return engine

    @property
    def in_flight(self) -> int:
        return sum(e.load for e in self.engines)

    async def probe(self) -> None:
        """Probe all engines except dead ones in their back-off, and remove drained engines."""
        time = asyncio.get_running_loop().time()
        for engine in [e for e in self.engines if e.draining and not e.load]:
            await engine.count()
            if engine in self.engines:  # a concurrent push may have removed it
                self.remove(engine)
        await asyncio.gather(*(e.probe() for e in self.engines if e.alive or not e.breaker.open(time)))
        at_work = self.in_flight > 0
        for engine in self.engines:
            engine.speed.update(fade=at_work)
            if engine.alive and engine.first_response_at is None:
                engine.first_response_at = time
        if self._skip_attestation and self.version == NEVER:
            self.version = max((e.version for e in self.alive()), default=NEVER)

    async def count(self, members: Collection[str] | None = None) -> None:
        """Update the engines' counts of generated and lost tokens. The counts are right if no request is in flight.

        Args:
            members: URLs of the engines to read; None reads all.
        """
        engines = [e for e in self.alive() if not e.pinned and (members is None or e.url in members)]
        await asyncio.gather(*(e.count() for e in engines))

    def engine_metrics(self) -> dict[str, dict[str, object]]:
        """See Router.engine_metrics."""
        return {
            e.url: {
                "state": e.state,
                "serving": e.alive
                and not (e.explores or e.quarantined or e.draining or e.pinned)
                and e.version in (self.version, self.older),
                "requests": e.load,
                "tokens": e.tokens,
                "weight_version": e.version if e.version >= 0 else None,
                "deaths": e.deaths,
                "alive": e.alive,
                "rank_seconds": e.rank_seconds,
                **e.speed.metrics(e.load),
                **({"pool": e.pool} if e.pool else {}),
            }
            for e in self.engines
        }

    def totals(self) -> dict[str, float]:
        """Return totals over all current and former engines.

        - engine_rank_seconds: seconds from an engine's first response to its removal, dead or alive, times its ranks.
        - engine_tokens, lost: generated tokens, and generated tokens that never arrived, as of the last interrupt.
        - engine_deaths: number of times that an engine died.
        - pool_NAME_rank_seconds, pool_NAME_tokens: the same for one pool of the config.
        - pool_NAME_cost: rank-seconds times the cost of its engines.
        - pool_NAME_serving: number of engines that serve now.
        """
        pools = dict(self._removed_by_pool)
        for engine in self.engines:
            _add(pools, _pool_totals(engine))
        if self._engine_config is not None:
            serving = Counter(e.pool for e in [*self.serving(), *self.serving(explorers=True)])
            names = {p.name for p in self._engine_config.pools} | {e.pool for e in self.engines}
            pools |= {f"pool_{name}_serving": serving[name] for name in names}
        return {
            **pools,
            "engine_rank_seconds": self._removed_seconds + sum(e.rank_seconds for e in self.engines),
            "engine_tokens": self._removed_totals["generated"]
            + sum(e.generated + e.generated_before for e in self.engines),
            "lost": self._removed_totals["lost"] + sum(e.lost_tokens for e in self.engines),
            "engine_deaths": self._removed_totals["deaths"] + sum(e.deaths for e in self.engines),
        }


def _pool_totals(engine: EngineState) -> dict[str, float]:
    """Return the engine's contribution to the totals of its pool, see Pool.totals. Empty if it has no pool."""
    if not engine.pool:
        return {}
    seconds, name = engine.rank_seconds, f"pool_{engine.pool}"
    return {
        f"{name}_rank_seconds": seconds,
        f"{name}_cost": seconds * engine.cost,
        f"{name}_tokens": engine.generated + engine.generated_before,
    }


def _add(sums: dict[str, float], increments: dict[str, float]) -> None:
    for key, value in increments.items():
        sums[key] = sums.get(key, 0.0) + value
