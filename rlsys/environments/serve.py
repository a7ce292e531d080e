"""Process of an environment service: an HTTP server for its leases.

    GET  /health                                  -> {"leases"}
    POST /open   {"lease", "task", "seed"}        -> {"messages", "tools"}
    POST /step   {"lease", "number", "action"}    -> {"messages", "reward", "done", "right"}
    POST /close  {"lease"}                        -> {}

The client chooses the id `lease` and counts its turns from 0 (`number`). Every request may be repeated. A refusal is
{"error", "wait"} with a status:

    400  malformed request           413  body too large
    401  wrong key                   422  the environment raised an exception
    404  unknown lease or path       503  no free lease; retry after `wait` seconds
    409  not the next turn

The process listens on a Unix socket of the run's user. Agents reach it through an address of the rollout process
(rlsys/generators/environment_services.py). The parent process owns the listening socket, so that connections wait
there while this process restarts. The process exits when its standard input ends.
"""

from __future__ import annotations

import argparse
import hmac
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlsys.environments.contract import Action, Environment, RequestRefused
from rlsys.environments.leases import MAX_ABANDONED, Leases

KEY = "RLSYS_ENVIRONMENT_KEY"
EXIT_ABANDONED = 3
"""Exit code of a process with MAX_ABANDONED hanging steps; the parent process restarts it."""
MAX_BODY_BYTES = 16 * 2**20
"""Largest body of a request, in bytes."""
CONNECTORS = {
    "gymnasium": "rlsys.environments.connectors.gymnasium_games",
    "reasoning_gym": "rlsys.environments.connectors.reasoning_games",
    "mcp": "rlsys.environments.connectors.mcp_tools",
    "verifiers": "rlsys.environments.connectors.verifiers_chats",
    "openenv": "rlsys.environments.connectors.openenv_client",
}
"""Connector -> its module, which has a function `make` that creates the environment."""


def load_connector(connector: str) -> Any:
    """Import the function that creates an environment.

    Args:
        connector: a name in CONNECTORS, `path/to/file.py:function`, or `package.module:function`.

    Raises:
        ImportError: the file is not a Python file, or the module does not exist.
    """
    source, _, name = connector.rpartition(":")
    if not source:
        return importlib.import_module(CONNECTORS[connector]).make
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    spec = importlib.util.spec_from_file_location("rlsys_own_environment", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class Handler(BaseHTTPRequestHandler):
    """Handler of one request. `serve` creates a subclass with the leases and the key."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds for a line of the request, and for each part of its body
    leases: Leases
    key: str

    def do_GET(self) -> None:
        self._reply(lambda _: {"leases": len(self.leases)})

    def do_POST(self) -> None:
        self._reply(self._answer)

    def _reply(self, respond: Any) -> None:
        """Check the key, and send the result of `respond` for the request's JSON, or a refusal."""
        self.close_connection = True  # clients use a connection once
        status, answer = 200, dict[str, Any]()
        try:
            authorization = self.headers.get("Authorization") or ""
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode()):
                raise RequestRefused(401, "wrong key")  # before the body is read
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 <= length <= MAX_BODY_BYTES:
                raise RequestRefused(
                    413, f"Content-Length: {length}: expected at most {MAX_BODY_BYTES} bytes"
                )
            answer = respond(json.loads(self.rfile.read(length) or b"{}"))
        except RequestRefused as e:
            status, answer = e.status, {"error": e.reason, "wait": e.wait}
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            status, answer = 400, {"error": f"{type(e).__name__}: {e}"}
        data = json.dumps(answer, default=_plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header(
            "Connection", "close"
        )  # otherwise a client may send its next request on this connection
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        lease = str(request["lease"])
        if self.path == "/open":
            return asdict(self.leases.open(lease, dict(request["task"]), int(request["seed"])))
        if self.path == "/step":
            action = Action(str(request["action"]["text"]), tuple(request["action"].get("calls", ())))
            return asdict(self.leases.step(lease, int(request["number"]), action))
        if self.path == "/close":
            self.leases.close(lease)
            if self.leases.abandoned >= MAX_ABANDONED:
                print(f"the steps of {MAX_ABANDONED} closed leases hang; restarting the process", flush=True)
                os._exit(EXIT_ABANDONED)
            return {}
        raise RequestRefused(404, f"{self.path}: expected /health, /open, /step or /close")

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log line of each request."""


def _plain(value: Any) -> Any:
    """Convert an object that JSON does not know: NumPy numbers and arrays to numbers and lists, others to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Server(ThreadingHTTPServer):
    """HTTP server on a Unix socket, with a thread per connection."""

    address_family = socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


def serve(
    environment: Environment, listener: socket.socket, max_leases: int, idle_seconds: float, key: str
) -> Server:
    """Create a server; the caller runs its `serve_forever`.

    Args:
        environment: opens the episodes.
        listener: the listening Unix socket.
        max_leases: largest number of leases at once.
        idle_seconds: time without a step after which an episode is closed, in seconds.
        key: key that every request must contain.
    """
    leases = Leases(environment, max_leases, idle_seconds)
    handler = type("LeaseHandler", (Handler,), {"leases": leases, "key": key})
    server = Server(listener.getsockname(), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("connector")
    parser.add_argument("--params", type=json.loads, default={})
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--leases", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the environment goes to the log
    try:
        environment = load_connector(args.connector)(**args.params)
    except Exception as e:  # noqa: BLE001  (reported to the parent process)
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answers, flush=True)
        sys.exit(2)
    server = serve(
        environment, socket.socket(fileno=args.socket), args.leases, args.idle, os.environ.pop(KEY)
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()  # until the parent process exits
    os._exit(0)
