"""Service and client: every command over HTTP, errors as they were raised, and how the process starts and ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rlsys.config import Config, dump_config, load_config
from rlsys.core.errors import RunError, UserError
from rlsys.core.identity import engine_identity
from rlsys.core.owner import KEY_HEADER, START_HEADER, claim, current_owner
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.core.weight_updates import Canary
from rlsys.data.quickstart_model import write_model
from rlsys.rollout.client import RolloutClient
from rlsys.worker.assembly import read_model_limits
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import APRIL, ids, make_config, rig, settle, slow_group_zero
from tests.helpers.service_rig import OWNER, served, ticking


async def test_a_step_over_http_returns_the_results_of_the_manager(tmp_path: Path) -> None:
    config = make_config(tmp_path, **APRIL, eval={"prompts": 4})
    async with rig(config, slow_group_zero) as r, served(r) as client:
        await ticking(r, client.wait_ready, 5.0)
        await ticking(r, client.restore, 0)
        ticket = await ticking(r, client.begin_push)
        assert (ticket.weight_version, ticket.engines[0].url) == (1, "http://engine:1")
        metrics = await ticking(r, client.end_push, ticket, [Canary([1, 2], [-0.1])], [{"norm": "0f"}])
        assert metrics["push_canary_mean"] == 1e-8
        batch = await ticking(r, client.take, 1)
        assert batch is not None
        again = await r.manager.take(1)
        assert again is not None and batch.groups == again.groups
        assert isinstance(batch.metrics["tokens"], int)
        assert load_tokens(tmp_path, batch.groups)[0].samples[0].mu[1] == -1 / 7
        await ticking(r, client.end_push, await ticking(r, client.begin_push), [], [])
        assert (await ticking(r, client.evaluate)).prompts == 4
        assert await ticking(r, client.begin_evaluation) is True
        evaluation = await ticking(r, client.end_evaluation, True)
        assert evaluation.result is not None and evaluation.result.weight_version == 2
        assert not (await ticking(r, client.end_evaluation, False)).result
        await ticking(r, client.commit, 1)
        r.router.stale_engines = ["http://engine:2"]
        if (again := await ticking(r, client.take, 2)) is not None:
            assert ids(again.groups) == ids(r.buffer.read_step(2)[1])
        status = await ticking(r, client.status)
        assert status["engines_ready"] is True
        assert status["weight_version"] == r.buffer.versions.newest
        assert status["engines"] == {"http://engine:1": "version 2"}


async def test_errors_are_raised_in_the_client_and_logged_by_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        with pytest.raises(UserError, match="has 0 train steps, but the checkpoint has 9"):
            await ticking(r, client.restore, 9)
        with pytest.raises(RunError, match=r"take\(1\) after 0 steps"):
            await ticking(r, client.take, 1)
    error_messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [line.split(":")[0] for line in error_messages] == ["/restore", "/take"]
    assert "but the checkpoint has 9" in error_messages[0] and "take(1) after 0 steps" in error_messages[1]


async def test_an_unexpected_error_refers_to_the_log(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        await ticking(r, client.restore, 0)
        r.manager.commit = None  # type: ignore[method-assign, assignment]
        with pytest.raises(RunError, match=r"rollout process: commit failed: TypeError: .*; see rollout.log"):
            await ticking(r, client.commit, 1)


def test_a_service_that_does_not_respond_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not ready after 0\.01 s: it does not respond"):
        RolloutClient(tmp_path / "rollout", "").wait_ready(0.01)


async def test_waiting_for_engines_names_them(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r, served(r, lambda: False) as client:
        with pytest.raises(RunError, match=r"its engines are .*engine:1"):
            await ticking(r, client.wait_ready, 0.01)


async def test_a_take_of_a_disconnected_trainer_does_not_block_the_next_one(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        await ticking(r, client.restore, 0)
        await r.start()
        _, writer = await asyncio.open_unix_connection(client._socket)
        body = b"\x81\xaatrain_step\x01"
        headers = f"Host: x\r\n{KEY_HEADER}: {OWNER.key}\r\n{START_HEADER}: 1\r\nContent-Length: {len(body)}"
        writer.write(f"POST /take HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        await writer.drain()
        while not r.manager._command.locked():
            await asyncio.sleep(0.001)
        writer.close()
        while r.manager._command.locked():
            await asyncio.sleep(0.001)
        await settle()
        assert r.buffer.last_taken_step == 0
        await r.start()
        batch = await ticking(r, client.take, 1)
        assert batch is not None
        assert ids(batch.groups) == [0, 1]


def test_model_limits_are_read_from_the_model_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128, "max_position_embeddings": 512}))
    assert read_model_limits(tmp_path) == (128, 512)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json: cannot read vocab_size .*KeyError: 'vocab_size'"):
        read_model_limits(tmp_path)


# The process


class Healthy(BaseHTTPRequestHandler):
    """As much of an engine as a service without work asks for. `label`: what it calls its weights."""

    label = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"sglang:generation_tokens_total 0.0\n")
        if self.path == "/model_info":
            self.wfile.write(json.dumps({"weight_version": self.label}).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def healthy_engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model")
    config = Config.model_validate({"run": {"dir": folder}, "model": {"path": folder / "model"}})
    (folder / "config.yaml").write_text(dump_config(config))
    return folder / "config.yaml"


@contextmanager
def service(config: Path, engine: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a new launch, whose engine this is; it does not outlive the test."""
    argv = [sys.executable, "-m", "rlsys.rollout.service", "--config", str(config)]
    owner = claim(load_config(config).run.dir, sockets := make_folder())
    Healthy.label = engine_identity(owner, engine).label(0)
    env = os.environ | owner.environment(start=1)
    with subprocess.Popen([*argv, "--engine", engine], stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()
            remove_folder(sockets)


def test_an_error_at_the_start_ends_the_process(run_config: Path) -> None:
    """Before: the reward's process was just starting, and asyncio waited for it without a word."""
    owner = claim(load_config(run_config).run.dir, run_config.parent / "missing")
    argv = [sys.executable, "-m", "rlsys.rollout.service", "--config", str(run_config)]
    process = subprocess.run(
        [*argv, "--engine", "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=120, env=os.environ | owner.environment(start=1),
    )  # fmt: skip
    assert process.returncode == 1 and "No such file or directory" in process.stderr


def test_the_process_serves_and_ends_cleanly_at_sigterm(run_config: Path) -> None:
    with healthy_engine() as engine, service(run_config, engine) as process:
        owner = current_owner(load_config(run_config).run.dir)
        assert owner is not None
        client = RolloutClient(owner.rollout_socket, owner.key)
        client.wait_ready(120)
        client.restore(0)
        assert client.status()["issued"] == 0
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0, log
        assert "Traceback" not in log
    assert (load_config(run_config).run.dir / "rollouts.sqlite").exists()
