"""The process of an environment: HTTP in front of its leases.

    GET  /health                                  -> {"leases", "most"}
    POST /open   {"lease", "task", "seed"}        -> {"messages", "tools"}
    POST /step   {"lease", "number", "action"}    -> {"messages", "reward", "done", "right"}
    POST /close  {"lease"}                        -> {}

`lease` is a name that the client chooses; `number` counts its turns from 0. All of them may be asked again. A refusal
is {"error"} with its status: 401 a wrong key, 404 no such lease, 409 another turn is due, 422 the environment raised,
503 not now.

It listens on a Unix socket of the run's user. Agents ask it by an address that the rollout process gives to each
(rlsys/generators/environment_services.py). The listening socket is the parent's: while this process is started anew,
connections wait there. It ends with its standard input.
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

from rlsys.environments.contract import Action, Environment, Refused
from rlsys.environments.leases import ABANDONED, Leases

KEY = "RLSYS_ENVIRONMENT_KEY"
LARGEST = 16 * 2**20
"""Bytes of a question."""
CONNECTORS = {
    "gymnasium": "rlsys.environments.connectors.gymnasium_games",
    "reasoning_gym": "rlsys.environments.connectors.reasoning_games",
    "mcp": "rlsys.environments.connectors.mcp_tools",
    "verifiers": "rlsys.environments.connectors.verifiers_chats",
    "openenv": "rlsys.environments.connectors.openenv_client",
}
"""Each has a function `make`."""


def find(connector: str) -> Any:
    """What makes the environment: a connector of ours, `path/to/file.py:function`, or `package.module:function`."""
    where, _, name = connector.rpartition(":")
    if not where:
        return importlib.import_module(CONNECTORS[connector]).make
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    spec = importlib.util.spec_from_file_location("rlsys_own_environment", where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


class Handler(BaseHTTPRequestHandler):
    """One request; the class is made for one set of leases."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds for a line of the request, and for each piece of its body
    leases: Leases
    key: str

    def do_GET(self) -> None:
        self._reply(lambda _: {"leases": len(self.leases)})

    def do_POST(self) -> None:
        self._reply(self._answer)

    def _reply(self, answer: Any) -> None:
        status, told, self.close_connection = 200, dict[str, Any](), True  # its client asks once on each
        try:
            asked = self.headers.get("Authorization") or ""
            if not hmac.compare_digest(asked.encode(), f"Bearer {self.key}".encode()):
                raise Refused(401, "a wrong key")  # before anything of a stranger's is read
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 <= length <= LARGEST:
                raise Refused(413, f"{length} bytes, expected at most {LARGEST}")
            told = answer(json.loads(self.rfile.read(length) or b"{}"))
        except Refused as e:
            status, told = e.status, {"error": e.reason, "wait": e.wait}
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            status, told = 400, {"error": f"{type(e).__name__}: {e}"}
        data = json.dumps(told, default=_plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        # Else a client may send its next request into a closed connection.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        lease = str(asked["lease"])
        if self.path == "/open":
            return asdict(self.leases.open(lease, dict(asked["task"]), int(asked["seed"])))
        if self.path == "/step":
            action = Action(str(asked["action"]["text"]), tuple(asked["action"].get("calls", ())))
            return asdict(self.leases.step(lease, int(asked["number"]), action))
        if self.path == "/close":
            self.leases.close(lease)
            if self.leases.abandoned >= ABANDONED:
                print(f"{ABANDONED} steps hang; this process ends, to be started anew", flush=True)
                os._exit(3)
            return {}
        raise Refused(404, f"there is no {self.path}; there are /health, /open, /step and /close")

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a line for each request."""


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays, as they are in observations."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Server(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of ours."""


def serve(environment: Environment, listening: socket.socket, most: int, idle: float, key: str) -> Server:
    """Answers on a socket that listens; `serve_forever` is the caller's."""
    handler = type("LeaseHandler", (Handler,), {"leases": Leases(environment, most, idle), "key": key})
    server = Server(listening.getsockname(), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
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
    os.dup2(2, 1)  # what the environment prints goes to the log
    try:
        environment = find(args.connector)(**args.params)
    except Exception as e:  # noqa: BLE001  (told to who started us)
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=answers, flush=True)
        sys.exit(2)
    server = serve(
        environment, socket.socket(fileno=args.socket), args.leases, args.idle, os.environ.pop(KEY)
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()  # until whoever started us is gone
    os._exit(0)
