"""Sockets of an SGLang server: only its HTTP port is reachable for other users.

By default, an SGLang server

- creates Unix sockets under TMPDIR, where their paths may be too long;
- lets its ranks rendezvous in a TCPStore that listens on all addresses, even with one rank;
- binds its port so that other processes can bind it, too.
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
"""Environment variable with the init_method of SGLang's process group."""
LIMITS = ServerLimits(connections=2**14, body_seconds=120.0)
"""Limits of the HTTP server. Request bodies may contain pieces of weights, over slow links."""
PLUGINS = {
    "sglang.srt.platforms": "rlsys.engine.cpu.platform:activate",
    "sglang.srt.plugins": "rlsys.engine.cpu.hooks:register",
}
"""Entry point group -> function that SGLang calls, as in pyproject.toml."""


def restrict_access(arguments: Sequence[str]) -> None:
    """Restrict the sockets of this process. Call it before importing SGLang.

    Args:
        arguments: Command line of the server.

    Raises:
        UserError: `--host` is not an address of this machine.
    """
    os.environ["TMPDIR"] = str(role_folder())
    tempfile.tempdir = None
    host = _value(arguments, "--host") or "127.0.0.1"
    choose_interface(host)
    # SGLang's kernels for some CPUs derive names of shared memory from these variables, so engines need other values.
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": _value(arguments, "--port") or "0"}
    init_address = _value(arguments, "--dist-init-addr")
    os.environ[_INIT_METHOD] = (
        f"{SCHEME}://{init_address}" if init_address else f"file://{role_folder()}/ranks"
    )


def _value(arguments: Sequence[str], name: str) -> str | None:
    """Return the argument after `name`, None without it."""
    return arguments[arguments.index(name) + 1] if name in arguments else None


def check_plugins() -> None:
    """Check that SGLang has found and completed the plug-ins of rlsys. SGLang itself ignores or only logs a failure.

    Raises:
        UserError: A plug-in is missing or did not complete.
    """
    for group, plugin in PLUGINS.items():
        if plugin not in {point.value for point in importlib.metadata.entry_points(group=group)}:
            raise UserError(
                f"SGLang does not find {plugin} (entry point group {group}): rlsys is importable, but not installed; "
                "install it, or its wheel, with pip"
            )
    if not hooks.complete:
        variables = ", ".join(f"{n} = {os.environ.get(n)}" for n in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"))
        raise UserError(
            f"SGLang did not complete {PLUGINS['sglang.srt.plugins']}: {variables}; expected values that do not "
            "exclude rlsys; otherwise the log above has the error"
        )


def check_hooks() -> None:
    """Check that SGLang has applied all hooks. SGLang itself only logs a failure.

    Raises:
        RunError: A hook was not applied.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    if missing := sorted(set(registry._hooks) - registry._patched):
        raise RunError(f"this version of SGLang lacks functions that rlsys wraps: {', '.join(missing)}")
    if not hasattr(importlib.import_module("sglang.srt.environ").envs, _INIT_METHOD):
        raise RunError(
            f"this version of SGLang does not read {_INIT_METHOD}, without which its ranks listen on all addresses"
        )


def bind_exclusively() -> None:
    """Make SGLang's HTTP server listen on its port exclusively, and limit its connections.

    Only the launcher, a process of the same user, shares the port: it reserves the port with SO_REUSEPORT
    (launch/ports.py).
    """
    server = importlib.import_module("uvicorn").Server
    run = server.run

    def run_exclusively(self: Any, sockets: list[socket.socket] | None = None) -> None:
        limit_connections(self.config, LIMITS)
        run(self, sockets or [_listen(self.config.host, self.config.port, self.config.backlog)])

    server.run = run_exclusively


def limit_connections(config: Any, limits: ServerLimits) -> None:
    """Limit the connections of a uvicorn server.

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
    """Listen on a port.

    Raises:
        OSError: A server already listens on the port. With SO_REUSEPORT both servers would share the requests.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if probe.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0:
            raise OSError(errno.EADDRINUSE, f"{host}:{port}: another server uses this address")
        return socket.create_server((host, port), family=probe.family, backlog=backlog, reuse_port=True)
