"""The sockets of an SGLang server: its HTTP port, and nothing else that a stranger can reach.

By itself SGLang makes Unix sockets under TMPDIR, whose path may be too long for one; lets its ranks meet in a
TCPStore on all addresses, also where there is one rank; and binds its port so that another user's process can, too.
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

_MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable: init_method of its process group."""
LIMITS = ServerLimits(connections=2**14, body_seconds=120.0)
"""Bodies are also pieces of weights over slow links."""
PLUGINS = {
    "sglang.srt.platforms": "rlsys.engine.cpu.platform:activate",
    "sglang.srt.plugins": "rlsys.engine.cpu.hooks:register",
}
"""Entry point group -> what SGLang calls, as pyproject.toml declares it."""


def keep_private(arguments: Sequence[str]) -> None:
    """Before SGLang is imported. `arguments`: the server's.

    Raises UserError for a host that is none of this machine's.
    """
    os.environ["TMPDIR"] = str(role_folder())
    tempfile.tempdir = None
    host = _value(arguments, "--host") or "127.0.0.1"
    choose_interface(host)
    # SGLang's kernels for some CPUs name their shared memory after these: engines of one machine must differ.
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": _value(arguments, "--port") or "0"}
    several_nodes = _value(arguments, "--dist-init-addr")
    os.environ[_MEETING] = f"{SCHEME}://{several_nodes}" if several_nodes else f"file://{role_folder()}/ranks"


def _value(arguments: Sequence[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


def check_plugins() -> None:
    """Raises UserError where SGLang has not found rlsys' plug-ins, or has not run them to their end. It says nothing,
    or only logs it: an engine without them does something else than the run relies on."""
    for group, plugin in PLUGINS.items():
        if plugin not in {point.value for point in importlib.metadata.entry_points(group=group)}:
            raise UserError(
                f"SGLang finds no {plugin} (entry point group {group}): rlsys is on the path, but not installed; "
                "expected `pip install` of it or of its wheel"
            )
    if not hooks.complete:
        chosen = ", ".join(f"{n} = {os.environ.get(n)}" for n in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"))
        raise UserError(
            f"SGLang has not run {PLUGINS['sglang.srt.plugins']} to its end: {chosen}; expected neither to leave out "
            "rlsys, or see the log above"
        )


def check_hooks() -> None:
    """Raises RunError for a hook that SGLang could not apply, which it only logs: an engine without one works, and
    does something else than the run relies on."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    if missing := sorted(set(registry._hooks) - registry._patched):
        raise RunError(f"this SGLang has not what rlsys changes in it: {', '.join(missing)}")
    if not hasattr(importlib.import_module("sglang.srt.environ").envs, _MEETING):
        raise RunError(f"this SGLang has no {_MEETING}: its ranks would meet on all addresses")


def bind_alone() -> None:
    """Have SGLang's HTTP server share its port with nobody but the launcher of the same user, who holds it
    (launch/ports.py): SO_REUSEPORT. Its connections have limits."""
    server = importlib.import_module("uvicorn").Server
    run = server.run

    def run_on_own_socket(self: Any, sockets: list[socket.socket] | None = None) -> None:
        limit_connections(self.config, LIMITS)
        run(self, sockets or [_listen(self.config.host, self.config.port, self.config.backlog)])

    server.run = run_on_own_socket


def limit_connections(config: Any, limits: ServerLimits) -> None:
    """Put the connections of a uvicorn server behind a limiter.

    Args:
        config: uvicorn.Config, before the server runs.
        limits: of connections, heads and bodies; how large a body may be is left to the application.
    """
    if not config.loaded:
        config.load()
    limiter = ConnectionLimiter(limits)
    config.loaded_app = limiter.asgi(config.loaded_app)
    config.http_protocol_class = limiter.protocol(config.http_protocol_class)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """Raises OSError when somebody listens there: with SO_REUSEPORT two servers of one user would divide requests."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if probe.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0:
            raise OSError(errno.EADDRINUSE, f"{host}:{port}: another server listens there")
        return socket.create_server((host, port), family=probe.family, backlog=backlog, reuse_port=True)
