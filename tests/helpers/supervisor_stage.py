"""A supervisor with fake roles: small programs in real processes, with real signals."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.backends.local import LocalBackend
from launch.plan import LaunchPlan, Node, Role
from launch.probe import NO_ANSWER, SECONDS
from launch.rundir import open_run_dir
from launch.stops import StopSignals
from launch.supervisor import Supervisor
from rlsys.config import Config
from rlsys.obs.direct import opener

PRELUDE = """
import http.server, json, os, pathlib, signal, socketserver, subprocess, sys, threading, time
here = pathlib.Path({folder!r}); name = {name!r}
def note(text):
    with (here / "notes").open("a") as f: f.write(text + chr(10))
def wait_for(*texts):
    while not all(count(t) for t in texts): time.sleep(0.01)
def count(text):
    return (here / "notes").read_text().count(text)
def on_term(*_):
    note(name + " ended"); os._exit(0)
signal.signal(signal.SIGTERM, on_term)
def serve():
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
            self.wfile.write(b"{{}}"); note(name + " probed")
        def do_POST(self):
            note(name + " asked " + self.path); self.do_GET()
        def log_message(self, *_): pass
    if name == "rollout":
        owner = json.loads((here / "run/owners" / os.environ["RLSYS_EPOCH"].zfill(6)).read_text())
        path = pathlib.Path(owner["sockets"]) / "rollout"
        path.unlink(missing_ok=True)
        server = socketserver.UnixStreamServer(str(path), Answer)
    else:
        http.server.HTTPServer.allow_reuse_address = True
        server = http.server.HTTPServer(("127.0.0.1", {port}), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
note(name + " began " + str(os.getpid()))
"""
SERVE_FOREVER = "serve()\nwhile True: signal.pause()"


class Recorder:
    """Fake display that records phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def entry(self, entry: dict[str, Any], *, live: bool) -> None: ...

    def status(self, status: dict[str, Any]) -> None: ...


class StageSupervisor(Supervisor):
    """Supervisor that probes engines without keys."""

    def _probe(self, role: Role) -> tuple[int, bytes]:
        if role.kind == "rollout":
            return super()._probe(role)
        try:
            with opener.open(role.ready_url, timeout=SECONDS) as answer:
                return answer.status, answer.read()
        except OSError:
            return NO_ANSWER, b""


class Stage:
    """A run folder, and the fake roles that append to its notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.display = Recorder()
        self.config = Config.model_validate(
            {
                "model": {"path": "none"},
                "run": {"dir": folder / "run"},
                "launch": {"grace_seconds": 5, "max_restarts": 1},
            }
        )
        (folder / "notes").touch()

    def role(self, kind: Any, body: str, *, serves: bool = False, start_timeout: float = 60) -> Role:
        port = free_port() if serves else 0
        name = "engine-0" if kind == "engine" else kind
        code = PRELUDE.format(folder=str(self.folder), name=name, port=port) + body
        url = "/status" if kind == "rollout" else f"http://127.0.0.1:{port}/status"
        return Role(
            name,
            kind,
            [sys.executable, "-c", code],
            ready_url=url if serves else None,
            start_timeout=start_timeout,
        )

    def run(
        self,
        *roles: Role,
        check: Callable[[], None] = lambda: None,
        lost_nodes: Callable[[], list[int]] = list,
    ) -> None:
        """Run the supervisor until it ends. `lost_nodes`: fake of the scheduler's report of lost nodes."""
        nodes = [Node(f"n{i}") for i in range(1 + max((role.node for role in roles), default=0))]
        with StopSignals().listening() as stop, open_run_dir(self.config, self.display.phase) as run_dir:
            backend = LocalBackend(self.config, run_dir.lock_fd)
            backend.lost_nodes = lost_nodes  # type: ignore[method-assign]
            plan = LaunchPlan(list(roles), nodes)
            StageSupervisor(self.config, plan, backend, run_dir, self.display, stop, check).run()

    @property
    def notes(self) -> list[str]:
        return (self.folder / "notes").read_text().splitlines()

    def pids(self) -> list[int]:
        return [int(note.split()[-1]) for note in self.notes if " began " in note]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true. The timeout is far above the expected time and asserts no speed."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
