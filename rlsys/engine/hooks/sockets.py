"""Sockets of an SGLang server: only its HTTP port is reachable for other users.

By default SGLang creates Unix sockets under TMPDIR, whose path may be too long; its ranks rendezvous in a TCPStore on
all addresses, even with one rank; and it binds its port such that other processes can bind it, too.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

from rlsys.core.errors import RunError, UserError
from rlsys.core.interfaces import choose_interface
from rlsys.core.rendezvous import SCHEME
from rlsys.core.sockets import role_folder
from rlsys.engine.cpu import hooks
from rlsys.http_server.connections import ConnectionLimiter, ServerLimits

_INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable: init_method of its process group."""
LIMITS = ServerLimits(connections=2**14, body_seconds=120.0)
"""Limits for request bodies that include pieces of weights over slow links."""
PLUGINS = {
    "sglang.srt.platforms": "rlsys.engine.cpu.platform:activate",
    "sglang.srt.plugins": "rlsys.engine.cpu.hooks:register",
}
"""Entry point group -> function that SGLang calls, as in pyproject.toml."""


def restrict_access(arguments: Sequence[str]) -> None:
    """Restrict the sockets of this process. Call this before importing SGLang.

    Args:
        arguments: Command line of the server.

    Raises:
        UserError: `--host` is no address of this machine.
    """
    os.environ["TMPDIR"] = str(role_folder())
    tempfile.tempdir = None
    host = _value(arguments, "--host") or "127.0.0.1"
    choose_interface(host)
    # SGLang's kernels for some CPUs derive names of shared memory from these: they must differ between engines.
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": _value(arguments, "--port") or "0"}
    init_address = _value(arguments, "--dist-init-addr")
    os.environ[_INIT_METHOD] = (
        f"{SCHEME}://{init_address}" if init_address else f"file://{role_folder()}/ranks"
    )


def _value(arguments: Sequence[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


def check_plugins() -> None:
    """Raise UserError if SGLang has not found rlsys' plug-ins, or has not run them completely.

    SGLang ignores or only logs this, but the run relies on the plug-ins.
    """
    for group, plugin in PLUGINS.items():
        if plugin not in {point.value for point in importlib.metadata.entry_points(group=group)}:
            raise UserError(
                f"SGLang finds no {plugin} (entry point group {group}): rlsys is on the path, but not installed; "
                "expected `pip install` of it or of its wheel"
            )
    if not hooks.complete:
        variables = ", ".join(f"{n} = {os.environ.get(n)}" for n in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"))
        raise UserError(
            f"SGLang has not run {PLUGINS['sglang.srt.plugins']} to its end: {variables}; expected neither to "
            "leave out rlsys, or see the log above"
        )


def check_hooks() -> None:
    """Raise RunError for a hook that SGLang could not apply.

    SGLang only logs this and serves, but the run relies on the hook.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    if missing := sorted(set(registry._hooks) - registry._patched):
        raise RunError(f"this SGLang has not what rlsys changes in it: {', '.join(missing)}")
    if not hasattr(importlib.import_module("sglang.srt.environ").envs, _INIT_METHOD):
        raise RunError(f"this SGLang has no {_INIT_METHOD}: its ranks would meet on all addresses")


def bind_exclusively() -> None:
    """Restrict SGLang's HTTP server to a port that it shares with the launcher only, and limit its connections.

    The launcher of the same user reserves the port with SO_REUSEPORT (launch/ports.py).
    """
    server = importlib.import_module("uvicorn").Server
    run = server.run

    def run_exclusively(self: Any, sockets: list[socket.socket] | None = None) -> None:
        limit_connections(self.config, LIMITS)
        run(self, sockets or [_listen(self.config.host, self.config.port, self.config.backlog)])

    server.run = run_exclusively


def limit_connections(config: Any, limits: ServerLimits) -> None:
    """Put the connections of a uvicorn server behind a limiter.

    Args:
        config: uvicorn.Config, before the server runs.
        limits: Limits of connections, heads and bodies; the application limits the size of a body.
    """
    if not config.loaded:
        config.load()
    limiter = ConnectionLimiter(limits)
    config.loaded_app = limiter.asgi(config.loaded_app)
    config.http_protocol_class = limiter.protocol(config.http_protocol_class)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on a port. Raises OSError if a server listens there: with SO_REUSEPORT both would share the requests."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if probe.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0:
            raise OSError(errno.EADDRINUSE, f"{host}:{port}: another server listens there")
        return socket.create_server((host, port), family=probe.family, backlog=backlog, reuse_port=True)
