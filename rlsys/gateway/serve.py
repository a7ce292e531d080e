"""`rlsys router`: runs the HTTP server of a stand-alone router until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.core.descriptors import raise_descriptors
from rlsys.core.errors import UserError
from rlsys.core.identity import ANONYMOUS, Identity, read_keys
from rlsys.engine.wire import make_session
from rlsys.gateway.fleet import Fleet, FleetInterruption
from rlsys.gateway.front import Front, FrontLimits
from rlsys.http_server.server import serving
from rlsys.obs.role import without_ignored

SHORTEST_TOKEN = 16
"""Smallest number of characters of a token."""
SHUTDOWN_SECONDS = 10.0

log = logging.getLogger("rlsys.router")


@dataclass(frozen=True)
class RouterOptions:
    """Options of `rlsys router`.

    Attributes:
        engines: URLs of the engines.
        allowed: hosts of engines that may join (Fleet).
        engine_keys: file with the keys of the engines; None: the engines need no key.
        strategy: routing strategy (rlsys/router/strategy.py).
        interruption: treatment of running requests while weights change.
        vocab_size: number of token ids; None: read it from the model folder.
        model_path: folder with the tokenizer; None: the folder that the engines report.
        queue_seconds: time for which a request may wait for an engine, in seconds.
    """

    engines: list[str]
    port: int
    host: str = "127.0.0.1"
    token_file: Path | None = None
    admin_token_file: Path | None = None
    allowed: tuple[str, ...] = ()
    engine_keys: Path | None = None
    strategy: str = "prefix_affinity"
    interruption: FleetInterruption = "retract"
    vocab_size: int | None = None
    model_path: Path | None = None
    queue_seconds: float = 120.0
    limits: FrontLimits = field(default_factory=FrontLimits)


@dataclass(frozen=True)
class Tokens:
    """Tokens of the HTTP server.

    Attributes:
        client: token of clients; None: clients need no token.
        admin: the admin token; None: no request is one of an administrator.
    """

    client: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)


def read_tokens(options: RouterOptions) -> Tokens:
    """Read the tokens from their files.

    Raises:
        UserError: a token is missing, unreadable or too short, or both are equal.
    """
    if options.token_file is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host}: other machines can reach this address; expected --token-file"
        )
    client = _read_token("--token-file", options.token_file)
    admin = _read_token("--admin-token-file", options.admin_token_file)
    if client is not None and client == admin:
        raise UserError(
            f"--admin-token-file {options.admin_token_file}: the token is that of --token-file; expected another"
        )
    return Tokens(client, admin)


def _read_token(option: str, file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{option} {file}: {getattr(e, 'strerror', None) or e}") from None
    if len(token) < SHORTEST_TOKEN:
        raise UserError(f"{option} {file}: {len(token)} characters; expected at least {SHORTEST_TOKEN}")
    return token


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_router(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UserError: the port is in use, a token is missing or invalid, or the vocabulary size is unknown.
    """
    tokens = read_tokens(options)
    identity = ANONYMOUS if options.engine_keys is None else read_keys(options.engine_keys)
    asyncio.run(serve(options, tokens, identity))


async def serve(options: RouterOptions, tokens: Tokens, identity: Identity = ANONYMOUS) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        options: options of `rlsys router`.
        tokens: tokens of the HTTP server.
        identity: the keys of the engines.

    Raises:
        UserError: the port is in use, or the vocabulary size is unknown.
    """
    raise_descriptors(
        2 * options.limits.samples,
        "rlsys router: a connection of the client and one of the engine for each sample",
    )
    stop = asyncio.Event()
    for number in without_ignored(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with make_session() as session:
        fleet = Fleet(
            options.engines,
            session,
            strategy=options.strategy,
            interruption=options.interruption,
            queue_seconds=options.queue_seconds,
            vocab_size=options.vocab_size,
            model_path=options.model_path,
            allowed=options.allowed,
            identity=identity,
        )
        app = Front(fleet, tokens.client, options.limits, tokens.admin).app()
        # cancel_handlers: the request of a client that disconnected must not keep an engine busy.
        listening = serving(
            app, options.host, options.port, shutdown_seconds=SHUTDOWN_SECONDS, cancel_handlers=True
        )
        tasks = [asyncio.ensure_future(fleet.watch()), asyncio.ensure_future(stop.wait())]
        try:
            async with listening as url:
                log.info("listening on %s with %d engines", url, len(options.engines))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            if fleet.model is not None:
                await fleet.model.close()
