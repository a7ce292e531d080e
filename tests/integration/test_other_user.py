"""Another user of the machine attacks a run, `rlsys tenants`, `rlsys dash`, `rlsys router` and `rlsys meet`.

All of them are real and at work. The attacks are in tests/helpers/intruder.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from launch.ports import free_ports
from rlsys.core.identity import config_path
from tests.helpers import intruder
from tests.helpers.intruder import Attack, Target
from tests.helpers.listeners import Listener, listeners
from tests.helpers.servers import ROOT, running_router
from tests.helpers.sessions import RLSYS, Session, check_ledger, command_line, step_lines
from tests.integration.test_tenants_run import Server as TinkerServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user"),
]

UID = 54777
NEVER = "1000"
"""Steps of the run: it is at work as long as the attack takes."""
OVERRIDES = ("rollout.max_response_tokens=64", "eval.interval=1000", "launch.grace_seconds=10")
SHARED = ("/dev/shm/", "/tmp/", "/var/tmp/", "/run/")
OWNER_SECONDS = 60.0
"""Time limit of a request of the servers' own user during the attack: a guard, no claim."""
MAX_LOG_BYTES = 8 * 2**20
OPEN_PATHS = {
    r"rlsys\.engine\.server|sglang": ("/health", "/ready", "/health_generate", "/metrics"),
    r"cli\.main tenants|tenants\.serve": ("/api/v1/healthz",),
    r"cli\.main router": ("/health", "/ready", "/metrics"),
    r"cli\.main meet": ("/",),
    r"cli\.main train": ("/", "/metrics"),
}
"""Command line of a server -> what anybody may read."""


class Stage:
    """All servers, with the requests of their own user."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.run = folder, folder / "run"
        self.exporter = free_ports("127.0.0.1", 1)[0]
        self.session = self.train(NEVER)
        stack.callback(self.session.kill)
        (folder / "tinker").mkdir()
        self.tinker = TinkerServer(folder / "tinker" / "run", ["alice", "bob"])
        stack.callback(self.tinker.end)
        self.session.wait_for_steps(1)
        self._key = self.tinker.key_file("alice").read_text().strip()
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text("clients-" + "t" * 32)
        keys = str(config_path(self.run, "engine-0"))
        (self.engine,) = (
            f"http://{listener.address}"
            for listener in self.listeners()
            if "rlsys.rollout.service" not in listener.command and self._is_engine(listener)
        )
        options = ("--engine", self.engine, "--engine-keys", keys, "--token-file", str(token_file))
        self.router = stack.enter_context(running_router(folder, *options))
        self._token = token_file.read_text()
        self.meeting = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        self._commands = [
            self._start("dash", str(self.run)),
            self._start("meet", "examples/relay/relay.py:play", "--policy", "a", "--policy", "b", "--port",
                        self.meeting.rpartition(":")[2]),
        ]  # fmt: skip
        for process in self._commands:
            stack.callback(process.wait)
            stack.callback(process.terminate)
        assert self._commands[0].stdout is not None
        self.dashboard, _, self._dash_token = (
            self._commands[0].stdout.readline().strip().partition("/?token=")
        )
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(f"{self.dashboard}/?token={self._dash_token}").close()
        self._of_dashboard = opener
        self.owner_requests: dict[str, Callable[[], object]] = {
            "exporter": lambda: self.get(f"http://127.0.0.1:{self.exporter}/metrics"),
            "tinker": lambda: self.get(
                f"{self.tinker.url}/api/v1/get_server_capabilities", {"X-API-Key": self._key}
            ),
            "router": lambda: self.get(
                f"{self.router}/v1/models", {"Authorization": f"Bearer {self._token}"}
            ),
            "meeting": lambda: self.get(self.meeting),
            "dashboard": lambda: self._of_dashboard.open(
                f"{self.dashboard}/api/runs", timeout=OWNER_SECONDS
            ).close(),
        }
        while True:
            try:
                self.get(self.meeting)
                break
            except OSError:
                time.sleep(0.1)

    def train(self, steps: str) -> Session:
        return Session(self.run, f"trainer.steps={steps}", f"launch.metrics_port={self.exporter}", *OVERRIDES)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"{words[0]}.log").open("wb") as log:
            return subprocess.Popen([*RLSYS, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)

    def get(self, url: str, headers: dict[str, str] | None = None) -> None:
        urllib.request.urlopen(
            urllib.request.Request(url, headers=headers or {}), timeout=OWNER_SECONDS
        ).close()

    def trees(self) -> list[psutil.Process]:
        """All processes of all servers."""
        test_process = psutil.Process()
        return [
            p
            for p in test_process.children(recursive=True)
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]

    def listeners(self) -> set[Listener]:
        return {listener for child in psutil.Process().children() for listener in listeners(child.pid)}

    def _is_engine(self, one: Listener) -> bool:
        """Whether it is the HTTP server of the run's engine."""
        run = str(self.run) + "/"
        if one.kind != "tcp" or "rlsys.engine.server" not in one.command or run not in one.command + "/":
            return False
        try:
            self.get(f"http://{one.address}/health")
        except (OSError, ValueError):
            return False
        return True

    def secrets(self) -> set[str]:
        keys = [self._key, self._token, self._dash_token]
        for run in (self.run, self.tinker.run):
            engine = json.loads(config_path(run, "engine-0").read_text())
            keys += [engine["api-key"], engine["admin-api-key"]]
        return set(keys)

    def target(self) -> Target:
        listeners = self.listeners()
        sockets = {one.address for one in listeners if one.kind == "unix" and one.address.startswith("/")}
        assert not [one for one in listeners if one.kind == "unix" and not one.address.startswith("/")]
        servers = []
        for one in sorted((one for one in listeners if one.kind == "tcp"), key=lambda one: one.command):
            opened = next((paths for words, paths in OPEN_PATHS.items() if re.search(words, one.command)), ())
            name = re.sub(r"\S*/bin/python\S* (-m )?", "", one.command)[:40]
            host = one.host.removeprefix("::ffff:")
            port = int(one.address.rpartition(":")[2])
            servers.append(intruder.Server(f"{name} :{port}", host, port, opened))
        folders = [str(self.run), str(self.tinker.run), *sorted({str(Path(path).parent) for path in sockets})]
        return Target(
            UID, tuple(p.pid for p in self.trees()), tuple(servers), tuple(sorted(sockets)), tuple(folders),
            tuple(sorted(self._open_files())), (str(self.folder / "tmp"),), tuple(sorted(self.secrets())),
        )  # fmt: skip

    def _open_files(self) -> set[str]:
        """Files in folders that all users share, of any process: open or mapped."""
        files = set[str]()
        for process in self.trees():
            try:
                links = [os.readlink(f) for f in Path(f"/proc/{process.pid}/fd").iterdir()]
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            files |= {
                f for f in [*links, *re.findall(r" (/\S+)$", maps, re.MULTILINE)] if f.startswith(SHARED)
            }
        return files


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """In a folder that others can enter, as a home directory may be."""
    folder = Path(tempfile.mkdtemp(prefix="other-user-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    try:
        with ExitStack() as stack:
            yield Stage(folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attack(target: Target) -> list[Attack]:
    command = [sys.executable, "-I", intruder.__file__]
    payload = json.dumps(asdict(target))
    process = subprocess.run(
        command, input=payload, capture_output=True, text=True, cwd="/",
        start_new_session=True,  # within a session, SIGCONT may be sent to processes of other users
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return [Attack(**json.loads(line)) for line in process.stdout.splitlines()]


def check_attack(stage: Stage) -> None:
    """Attack all servers while their own user works with them."""
    for log in (*stage.folder.glob("*.log"), *stage.folder.glob("tinker/*.log")):
        log.chmod(0o600)  # of this test: their mode is that of a shell's redirection
    target = stage.target()
    initial_processes = {(p.pid, p.create_time()): " ".join(command_line(p))[:120] for p in stage.trees()}
    assert len(target.servers) >= 6 and target.sockets and len(target.processes) > 10
    stop_event, refused, slowest = threading.Event(), list[str](), dict[str, float]()

    def ask_as_owner() -> None:
        while not stop_event.wait(0.5):
            for name, ask in stage.owner_requests.items():
                start = time.monotonic()
                try:
                    ask()
                except (OSError, urllib.error.URLError) as e:
                    refused.append(f"{name}: {e}")
                slowest[name] = max(slowest.get(name, 0.0), time.monotonic() - start)

    owner = threading.Thread(target=ask_as_owner)
    owner.start()
    start = time.monotonic()
    try:
        attack_results = attack(target)
    finally:
        stop_event.set()
        owner.join()
    print(f"{time.monotonic() - start:.0f} s of attack; slowest requests of the owner: {slowest}")
    for result in attack_results:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
        print(f"| {result.name} | {result.expected} | {outcomes} | {len(result.faults)} |")
    hits = [f"{result.name}: {hit}" for result in attack_results for hit in result.faults]
    assert not hits, "\n".join(hits[:60])
    assert not refused, refused[:20]
    final_processes = {(p.pid, p.create_time()) for p in stage.trees()}
    ended_processes = [
        command for process, command in initial_processes.items() if process not in final_processes
    ]
    assert not ended_processes
    sizes = {str(f.relative_to(stage.folder)): f.stat().st_size for f in stage.folder.rglob("*.log")}
    print(f"logs: {sizes}")
    assert sum(sizes.values()) < MAX_LOG_BYTES, sizes


def test_another_user_can_neither_read_data_nor_disrupt_a_run(stage: Stage) -> None:
    check_attack(stage)
    stage.session.wait_for_steps(step_lines(stage.run) + 2)
    stage.session.send(signal.SIGINT)
    assert stage.session.end()[0] == 130
    last = stage.train(str(step_lines(stage.run) + 1))
    try:
        code, output = last.end()
    finally:
        last.kill()
    assert code == 0, output
    check_ledger(stage.run)
