"""Whose an engine is: strangers on its port, other runs' weights, keys that nobody else reads (review 4, 19, 23)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError

from launch import ports
from launch.plan import LaunchPlan, Role
from launch.ports import PortReservation
from launch.readiness import PortInUse, engine_is_up
from rlsys.cli import main
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.identity import Identity, config_path, engine_identity, read_keys, write_config
from rlsys.core.owner import Owner
from tests.helpers.router_rig import A, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.supervisor_stage import PRELUDE, SERVE_FOREVER, Stage, free_port

OURS, THEIRS = Identity("ours:3"), Identity("theirs:1")


# -- other weights (4) ---------------------------------------------------------------------------------------


@pytest.mark.virtual_clock
@pytest.mark.parametrize("theirs", [Identity(), THEIRS], ids=["of nobody", "of another run"])
async def test_an_engine_with_weights_of_another_run_is_declared_dead(theirs: Identity) -> None:
    """A zombie, or a run on the same port, pushes its version 1. Before: a whole sample of its weights was ours."""
    engine = ScriptedEngine(A, label=OURS.label(0))
    async with routing(engine, identity=OURS) as rig:
        await asyncio.sleep(2)
        await rig.push()
        engine.weights, engine.version = 1001, theirs.label(1)
        task = rig.start(sample(1, seed=5))
        await asyncio.sleep(5)
        assert not task.done()
        assert rig.router.engine_states()[A].startswith("dead: http://a:1 is not an engine of this run")
        engine.restart()
        await asyncio.sleep(60)
        await rig.push(only_stale=True)
        check(await task, versions={1})


@pytest.mark.virtual_clock
async def test_an_engine_of_another_run_receives_no_weights() -> None:
    engine = ScriptedEngine(A, label=THEIRS.label(7))
    async with routing(engine, identity=OURS, push_timeout_s=5) as rig:
        with pytest.raises(RunError, match=r"no engine was ready for weight version 1.*'theirs:1:7'"):
            await rig.push()
        assert engine.calls == []


@pytest.mark.virtual_clock
async def test_tokens_from_foreign_weights_during_a_push_are_discarded() -> None:
    engine = ScriptedEngine(A, label=OURS.label(0))
    async with routing(engine, identity=OURS, interruption="retract") as rig:
        await rig.push()
        task = rig.start(s := sample())
        await asyncio.sleep(0.1)
        await rig.router.begin_push(2)
        await asyncio.sleep(0.1)  # what the engine had made before it paused has come
        had = len(s.response_ids)
        engine.update_open = False
        engine.weights, engine.version = 1001, THEIRS.label(2)
        engine._continue_generation({})
        await asyncio.sleep(0.5)
        (state,) = rig.router._pool.engines
        state.set_version(2)
        await asyncio.sleep(0.5)
        assert len(s.response_ids) == had
        task.cancel()


# -- who answers at the port ---------------------------------------------------------------------------------


@contextmanager
def server(key: str | None, label: str | None, seen: list[str] | None = None) -> Iterator[str]:
    """URL of something that answers as SGLang does, to who has its key; None: to everybody."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization", "")
            if seen is not None and authorization:
                seen.append(authorization)
            allowed = self.path == "/health" or key is None or authorization == f"Bearer {key}"
            body = (
                b""
                if self.path == "/health" or not allowed
                else json.dumps({"weight_version": label}).encode()
            )
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    http_server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http_server.server_port}"
    finally:
        http_server.shutdown()
        thread.join()
        http_server.server_close()


def test_only_an_engine_of_this_launch_is_ready(tmp_path: Path) -> None:
    """Before: any 200 on /health was."""
    owner = Owner(tmp_path, 3, "the launch's key")
    identity = engine_identity(owner, "http://e:1")
    with server(identity.api_key, identity.label(0)) as url:
        assert engine_is_up(url, identity)
    received_keys: list[str] = []
    with (
        server(None, "default", received_keys) as url,
        pytest.raises(PortInUse, match="status 200 and weight version default"),
    ):
        engine_is_up(url, identity)
    assert received_keys == [], "who opens to everybody is shown no key"
    with (
        server("another", "other:1:0") as url,
        pytest.raises(PortInUse, match="with this engine's key it responds with status 401"),
    ):
        engine_is_up(url, identity)
    foreign_identity = engine_identity(Owner(tmp_path, 4, "another launch's key"), "http://e:1")
    with server(identity.api_key, foreign_identity.label(0)) as url, pytest.raises(PortInUse):
        engine_is_up(url, identity)
    with (
        server(None, identity.label(0)) as url,
        pytest.raises(RunError, match=r"accepts requests without a key.*extra_args"),
    ):
        engine_is_up(url, identity)
    assert not engine_is_up(f"http://127.0.0.1:{free_port()}", identity)


ENGINE = """
import json
text = (here / "run" / "owners" / "engine-0.yaml").read_text(); mine = json.loads(text)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ok = self.path == "/health" or self.headers.get("Authorization") == "Bearer " + mine["api-key"]
        body = json.dumps({"weight_version": mine["weight-version"]}).encode() if self.path == "/model_info" else b""
        self.send_response(200 if ok else 401); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
port = %d
try:
    server = http.server.HTTPServer(("127.0.0.1", port), Answer)
except OSError:
    note("engine-0 found its port taken"); sys.exit(1)
note("engine-0 listens"); server.serve_forever()
"""


def engine_role(stage: Stage, port: int) -> Role:
    code = PRELUDE.format(folder=str(stage.folder), name="engine-0", port=port) + ENGINE % port
    url = f"http://127.0.0.1:{port}"
    argv = [main.sys.executable, "-c", code]
    return Role("engine-0", "engine", argv, ready_url=f"{url}/health", start_timeout=60, engine=url)


@pytest.mark.parametrize("answers", [True, False])
def test_the_launcher_retries_with_other_ports_if_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Before: a stranger's 200 made the engine ready, or its death ended the run."""
    stage, plans = Stage(tmp_path), list[int]()
    monkeypatch.setattr(main, "make_progress", lambda *_: _showing(stage))
    with server(None, "default") as url, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        occupied_port = int(url.rpartition(":")[2]) if answers else silent.getsockname()[1]

        def plan(_: Any) -> LaunchPlan:
            plans.append(occupied_port if not plans else free_port())
            rollout = stage.role("rollout", SERVE_FOREVER, serves=True)
            return LaunchPlan([engine_role(stage, plans[-1]), rollout, stage.role("trainer", TRAINER)])

        main.supervise(stage.config, plan)
    assert len(plans) == 2
    assert any("retrying with other ports" in phase for phase in stage.display.phases)
    assert "engine-0 listens" in stage.notes


def test_the_launcher_stops_if_its_ports_are_used_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    launch = stage.config.launch.model_copy(update={"max_restarts": 1})
    config = stage.config.model_copy(update={"launch": launch})
    monkeypatch.setattr(main, "make_progress", lambda *_: _showing(stage))
    with server(None, "default") as url:
        roles = [engine_role(stage, int(url.rpartition(":")[2])), stage.role("trainer", TRAINER)]
        with pytest.raises(PortInUse):
            main.supervise(config, lambda _: LaunchPlan(roles))
    assert sum("retrying with other ports" in phase for phase in stage.display.phases) == 1


TRAINER = "while not count('engine-0 listens'): time.sleep(0.01)"


@contextmanager
def _showing(stage: Stage) -> Iterator[Any]:
    yield stage.display


def test_a_configured_port_in_use_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    monkeypatch.setattr(main, "make_progress", lambda *_: _showing(stage))
    with server(None, "default") as url:
        port = int(url.rpartition(":")[2])
        engine = stage.config.engine.model_copy(update={"port": port})
        config = stage.config.model_copy(update={"engine": engine})
        roles = [engine_role(stage, port), stage.role("trainer", TRAINER)]
        with pytest.raises(
            UserError, match=rf"engine\.port = {port}: port {port} of .* is in use; 0 chooses a free one"
        ):
            main.supervise(config, lambda _: LaunchPlan(roles))


def test_two_runs_that_start_together_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a port that was chosen was free for others until its engine bound it, half a minute later."""

    class Same:
        def __init__(self) -> None:
            self.next = iter(range(21000, 30000))

        def randrange(self, *_: int) -> int:
            return next(self.next)

    chosen = []
    reservations = [PortReservation("127.0.0.1"), PortReservation("127.0.0.1")]
    for reservation in reservations:
        monkeypatch.setattr(ports, "_random", Same())
        chosen.append(reservation.choose(3))
    assert not set(chosen[0]) & set(chosen[1])
    with socket.socket() as engine:  # who it is for may bind it, as servers do
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        engine.bind(("127.0.0.1", chosen[0][0]))
        engine.listen(1)
        socket.create_connection(("127.0.0.1", chosen[0][0])).close()
    for reservation in reservations:
        reservation.release()


# -- keys (19, 23) -------------------------------------------------------------------------------------------


def test_keys_are_in_a_file_of_mode_0600_and_on_no_command_line(tmp_path: Path) -> None:
    stage, port = Stage(tmp_path), free_port()
    command_lines: list[list[str]] = []
    trainer = TRAINER + "\nwhile not (here / 'looked').exists(): time.sleep(0.01)"

    def look() -> None:
        while "engine-0 listens" not in stage.notes:
            pass
        command_lines.extend(p.cmdline() for p in psutil.Process().children(recursive=True))
        (tmp_path / "looked").touch()

    looking = threading.Thread(target=look)
    looking.start()
    stage.run(engine_role(stage, port), stage.role("trainer", trainer))
    looking.join()
    path = config_path(tmp_path / "run", "engine-0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    engine_config = yaml.safe_load(path.read_text())
    assert set(engine_config) == {"api-key", "admin-api-key", "weight-version"}
    secrets = (engine_config["api-key"], engine_config["admin-api-key"])
    assert command_lines, "the engine ran"
    assert not any(secret in word for secret in secrets for words in command_lines for word in words)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            assert not any(secret in file.read_text(errors="replace") for secret in secrets), file
    assert stat.S_IMODE((tmp_path / "run" / "logs" / "engine-0.log").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "arg", ["--api-key=x", "--admin-api-key", "--admin-a", "--config", "--weight-version", "--port"]
)
def test_keys_in_the_config_are_refused(arg: str) -> None:
    """Before: they lay in config.yaml, mode 0644."""
    with pytest.raises(ValidationError, match=r"rlsys sets this argument"):
        Config.model_validate({"model": {"path": "m"}, "engine": {"extra_args": [arg]}})
    Config.model_validate({"model": {"path": "m"}, "engine": {"extra_args": ["--context-length", "9", "-x"]}})


def test_every_engine_and_every_launch_has_keys_of_its_own(tmp_path: Path) -> None:
    a, b = Owner(tmp_path, 1, "first"), Owner(tmp_path, 2, "second")
    identities = [engine_identity(o, url) for o in (a, b) for url in ("http://e:1", "http://e:2")]
    keys = [key for identity in identities for key in (identity.api_key, identity.admin_key)]
    assert len(set(keys)) == len(keys)
    assert identities[0].owner == identities[1].owner != identities[2].owner
    assert identities[0].parse_label(identities[1].label(5)) == "5"
    assert identities[0].parse_label(identities[2].label(5)) is None
    assert identities[0].parse_label("5") is None
    assert not any(key in repr(identities) for key in keys)


def test_keys_of_engines_that_others_started(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_config(path, Identity("o:1", "12345", "67890"))
    read = read_keys(path)
    assert (read.api_key, read.admin_key, read.owner) == ("12345", "67890", "")
    assert read.headers("/generate") == {"Authorization": "Bearer 12345"}
    assert read.headers("/abort_request") == {"Authorization": "Bearer 67890"}
    path.chmod(0o644)
    with pytest.raises(UserError, match="readable by other users; expected mode 0600"):
        read_keys(path)
    path.chmod(0o600)
    path.write_text("api-key:")
    with pytest.raises(UserError, match="expected api-key and admin-api-key"):
        read_keys(path)
    with pytest.raises(UserError, match="No such file"):
        read_keys(tmp_path / "none.yaml")


def test_a_disk_that_takes_no_keys_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "engine-0.yaml"
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=rf"^{path}: No space left on device$"):
        write_config(path, Identity("o:1", "12345", "67890"))
    monkeypatch.undo()
    missing = tmp_path / "gone" / "engine-0.yaml"
    with pytest.raises(RunError, match=r"gone/engine-0\.yaml: No such file or directory$"):
        write_config(missing, Identity("o:1", "12345", "67890"))
