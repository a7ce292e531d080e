"""Fleet: the engines of a stand-alone router, their limits and their weights.

At the start, the weight version of the fleet is the highest one that an engine reports. `POST
/update_weights_from_disk` changes it: all engines load the weights of a folder. An engine that joins, restarts or
failed the update loads the same folder before it serves. Before the first update there is no folder to load, and an
engine of another version serves no requests.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import aiohttp
from yarl import URL

from rlsys.core.errors import RunError, UserError, error_text
from rlsys.core.identity import ANONYMOUS, Identity
from rlsys.core.model_folder import read_fields
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.engine_requests import RESERVED_TOKENS, Limits
from rlsys.gateway.generation import POISON
from rlsys.gateway.served_model import ServedModel
from rlsys.router.attest import Bounds
from rlsys.router.engine_state import EngineState, Flight
from rlsys.router.push import PROBE_SECONDS, describe_states
from rlsys.router.router import Router

log = logging.getLogger("rlsys.router")

FleetInterruption = Literal["abort", "retract"]
"""Treatment of running requests during an update. `in_place` is excluded, because it keeps keys and values of the old
weights, which later requests could reuse."""


def is_engine_url(text: str) -> bool:
    """Return whether a text is the base URL of a server: http:// or https://, without user, query and fragment."""
    try:
        url = URL(text)
        host = (url.host or "").encode("idna")  # fails for an empty or too long part of a name
        if not text.isprintable() or " " in text:
            return False
    except ValueError:
        return False
    plain = not url.query and not url.fragment and not url.user and not url.password
    return bool(url.scheme in ("http", "https") and host and url.port and plain)


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether a host may be the host of an engine.

    Args:
        host: a host name or an address. A name is not resolved.
        allowed: allowed host names, addresses and networks.
    """
    if host in allowed:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False  # a name may resolve to any address, so only the name itself can be allowed
    return any(address in network for text in allowed if (network := network_of(text)) is not None)


def is_host(text: str) -> bool:
    """Return whether a text is a host name, an address, or a network."""
    return network_of(text) is not None or bool(
        re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", text)
    )


def network_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Parse an address or a network. Return None for other texts."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


class Fleet:
    """The engines of a stand-alone router. Owns the router.

    Args:
        urls: URLs of the engines.
        session: HTTP session.
        allowed: host names, addresses or networks of engines that may join; empty: the hosts of `urls`.
        identity: the keys of all engines.
        strategy: routing strategy (rlsys/router/strategy.py).
        interruption: treatment of running requests while weights change.
        queue_seconds: time for which a request may wait for an engine, in seconds.
        vocab_size: number of token ids; None: read it from the model folder.
        model_path: folder with the tokenizer; None: the folder that the engines report.

    Attributes:
        limits: limits of requests that all engines accept; None until an engine has responded.
        model: the engines' model; None until an engine has responded.
    """

    def __init__(
        self,
        urls: list[str],
        session: aiohttp.ClientSession,
        *,
        allowed: Sequence[str] = (),
        identity: Identity = ANONYMOUS,
        strategy: str,
        interruption: FleetInterruption,
        queue_seconds: float,
        vocab_size: int | None = None,
        model_path: Path | None = None,
    ) -> None:
        self._session = session
        self._identity = identity
        self._allowed = tuple(allowed) or tuple({URL(url).host or "" for url in urls if is_engine_url(url)})
        self.router = Router(
            [],
            vocab_size=1,
            context_length=1,
            stop_ids=(),
            bounds=Bounds(1.0, 1.0),
            strategy=strategy,
            interruption=interruption,
            skip_attestation=True,
            poison=POISON,
        )
        self.pool, self.dispatcher = self.router.pool, self.router.dispatcher
        for url in urls:
            self.add(url)
        self.queue_seconds = queue_seconds
        self._interruption = interruption
        self._vocab_size, self._model_path = vocab_size, model_path
        self._engine_limits: dict[str, tuple[int, Limits]] = {}
        """URL of an engine -> its number of deaths at the time its limits were read, and these limits."""
        self.limits: Limits | None = None
        self.model: ServedModel | None = None
        self._folder: str | None = None
        self._updating = asyncio.Lock()
        self._loading: dict[str, asyncio.Task[bool]] = {}  # URL -> load of the current folder
        self._unusable: set[str] = set()  # URLs of stale engines without a folder to load

    def add(self, url: str) -> None:
        """Add an engine.

        Raises:
            UserError: the URL is invalid, or the engine is already in the pool.
        """
        if not is_engine_url(url):
            raise UserError(f"engine URL {url[:200]!r}: expected http://HOST:PORT")
        try:
            self.pool.add(EngineClient(url, self._session, identity=self._identity))
        except ValueError as e:
            raise UserError(str(e)) from None

    def join(self, url: str) -> None:
        """Add an engine that an administrator requests.

        Raises:
            UserError: the host is not allowed, the URL is invalid, or the engine is already in the pool.
        """
        if is_engine_url(url) and not is_allowed(URL(url).host or "", self._allowed):
            raise UserError(
                f"engine URL {url[:200]!r}: its host is not allowed; expected one of {', '.join(self._allowed)} "
                "(--allow-engine)"
            )
        self.add(url)

    def drain(self, url: str) -> None:
        """Remove an engine when its requests have ended.

        Raises:
            UserError: the engine is not in the pool.
        """
        engine = self.pool.find(url)
        if engine is None:
            raise UserError(
                f"{url[:200]}: not an engine of the pool; expected one of {describe_states(self.pool.states)}"
            )
        engine.draining = True

    async def watch(self) -> None:
        """Probe the engines, read their limits and load weights in stale engines, until cancelled."""
        self.router.resume()
        while True:
            await self.pool.probe()
            for engine in self.pool.serving():
                if self._engine_limits.get(engine.url, (-1, None))[0] != engine.deaths:
                    await self._read_limits(engine)
            self._load_stale()
            if self.pool.serving() and self.limits is not None:
                self.dispatcher.wake()
            await asyncio.sleep(PROBE_SECONDS)

    def _load_stale(self) -> None:
        """Start a task for each stale engine that loads the current folder, which may take minutes."""
        for url in [url for url, task in self._loading.items() if task.done()]:
            self._loading.pop(url).result()
        if self._updating.locked():
            return
        for engine in self.pool.stale():
            if self._folder is not None and engine.url not in self._loading:
                load = self.dispatcher.attempt(engine, self._load(engine))
                self._loading[engine.url] = asyncio.create_task(load)
            elif self._folder is None and engine.url not in self._unusable:
                self._unusable.add(engine.url)
                log.warning(
                    "engine %s has weight version %d; expected %d; it serves no requests until POST "
                    "/update_weights_from_disk",
                    engine.url, engine.version, self.pool.version,
                )  # fmt: skip

    async def _read_limits(self, engine: EngineState) -> None:
        """Read the limits of an engine, and update `limits` to the strictest ones of all engines.

        Raises:
            UserError: the vocabulary size of the first engine is unknown.
        """
        try:
            info = await engine.client.info()
        except (*DeadEngine, EngineError):
            return
        folder = self._model_path or Path(str(info.get("tokenizer_path") or info.get("model_path")))
        size = self._read_vocab_size(folder)
        length = info.get("max_req_input_len")
        if self.limits is not None and type(length) is not int:
            context = self.limits.context_length
        else:
            context = int(info["max_req_input_len"]) + RESERVED_TOKENS
        limits = Limits(size, context, deterministic=bool(info.get("enable_deterministic_inference", True)))
        self._engine_limits[engine.url] = engine.deaths, limits
        urls = {e.url for e in self.pool.engines}
        self._engine_limits = {url: entry for url, entry in self._engine_limits.items() if url in urls}
        strictest = functools.reduce(Limits.strictest, (limits for _, limits in self._engine_limits.values()))
        if self.model is None:
            self.model = await asyncio.to_thread(ServedModel, folder, info)
        self.router.set_limits(strictest)
        self.limits = strictest

    def _read_vocab_size(self, folder: Path) -> int:
        """Return the vocabulary size: the configured one, that of `folder`, or that of earlier engines.

        Raises:
            UserError: none of them is known.
        """
        if self._vocab_size is not None:
            return self._vocab_size
        try:
            return int(read_fields(folder)["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            if self.limits is None:
                raise UserError(
                    f"{folder}/config.json: cannot read vocab_size ({type(e).__name__}); set --vocab-size"
                ) from None
            return self.limits.vocab_size  # the folder is on another machine

    # -- weights ------------------------------------------------------------------------------------------------

    async def update(self, folder: str, version: int | None) -> int:
        """Load new weights in all engines. Requests in flight continue afterwards. Engines that fail try again later.

        Args:
            folder: path of the weights, for the engines.
            version: new weight version; None: the current one plus 1.

        Returns:
            The new weight version.

        Raises:
            UserError: `version` is not larger than the current one.
            RunError: no engine could load the folder; the weights are unchanged.
        """
        # The update continues if the client disconnects, so that the gate does not stay closed.
        return await asyncio.shield(asyncio.create_task(self._update(folder, version)))

    async def _update(self, folder: str, version: int | None) -> int:
        async with self._updating:
            if self._loading:  # two concurrent loads in one engine would mix their tensors
                await asyncio.wait(self._loading.values())
            previous = self.pool.version, self._folder
            if version is not None and version <= previous[0]:
                raise UserError(
                    f"weight_version = {version}: expected more than {previous[0]}, the current version"
                )
            hold = self._interruption != "abort"
            engines: list[EngineState] = []
            try:
                await self.router.interrupt((lambda _: True) if hold else None)
                self.pool.version, self._folder = version or previous[0] + 1, folder
                engines = self.pool.alive()
                results = await asyncio.gather(*(self._try_load(e) for e in engines))
                if not any(ok for ok, _ in results):
                    self.pool.version, self._folder = previous
                    raise RunError(
                        f"no engine could load {folder}: {'; '.join(reason for _, reason in results)[:500]}"
                    )
                return self.pool.version
            finally:
                for engine in engines or self.pool.alive():
                    await self.dispatcher.attempt(engine, self.dispatcher.unpause(engine))
                self.router.resume()

    async def _try_load(self, engine: EngineState) -> tuple[bool, str]:
        """Load the folder in an engine. Return whether it succeeded, and the reason if it failed."""
        try:
            await self._load(engine)
        except EngineError as e:  # the engine keeps its weights
            return False, str(e)
        except DeadEngine as e:
            engine.mark_dead()
            return False, f"{engine.url}: {error_text(e)}"
        return True, ""

    async def _load(self, engine: EngineState) -> None:
        """Load the folder in an engine, and empty the engine's cache, before it serves.

        If a probe detects that the engine is dead, the load ends, like a request.

        Raises:
            EngineError: the engine refuses the folder, or reports another version afterwards.
            Exception: one of DeadEngine, if the engine does not respond.
        """
        assert self._folder is not None
        version, engine.loading = self.pool.version, True
        flight = Flight("load", None, asyncio.timeout(None))
        try:
            with self.dispatcher.track(engine, flight, 0):
                async with flight.scope:
                    await engine.client.update_weights_from_disk(self._folder, version)
                    await engine.client.flush(paused=engine.paused)
                    reported = await engine.client.weight_version()
            if reported != version:
                raise EngineError(f"{engine.url} reports weight version {reported}; expected {version}")
            engine.set_version(version)
        finally:
            engine.loading = False
