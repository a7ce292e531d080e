"""Findings of the security review of 919cd76, named after the finding.

tests/findings_security.md has the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from numpy.typing import NDArray

from launch.exporter import Exporter, serve_metrics
from launch.rundir import open_run_dir
from rlsys.agents.endpoint import Endpoint
from rlsys.agents.multi_policy import REWARD_KEY, REWARD_URL, SAMPLE, EpisodeServer
from rlsys.config import Config
from rlsys.convert.torch_dist import DistReader
from rlsys.core.errors import RunError, UserError
from rlsys.core.identity import ANONYMOUS
from rlsys.core.owner import FencedError, claim
from rlsys.core.types import Prompt, Response
from rlsys.engine.wire import DEFAULT_LIMITS, make_session
from rlsys.http_server.server import guarded_app, serving, user_of_client
from rlsys.rewards.judges import JudgeError, UrlJudge
from rlsys.rewards.shapes import json_schema
from rlsys.tenants.front import LIMITS, STATUSES, Front
from rlsys.tenants.keys import Keys
from rlsys.tenants.ledger import Ledger
from rlsys.tenants.requests import OptimStep, read
from rlsys.tenants.sampler import Engine
from rlsys.tenants.service import Service
from rlsys.tenants.wire import packed
from rlsys.viewer.server import Dashboard
from rlsys.viewer.server import _pattern as dash_pattern
from rlsys.weights_relay.pieces import FileSpec, Piece, digest, encode, pieces_in
from rlsys.weights_relay.relay import OFFER, PIECE, PIECE_HEADER, TOKEN_HEADER, Relay, RelayMiddleware
from rlsys.weights_relay.store import Store, TooLarge, Undeclared

MODEL = Path(__file__).resolve().parents[2] / "configs/models/quickstart-moe"


# -- A5: connections that say nothing -------------------------------------------------------------------------

IDLE = """
import http.client, socket, sys, time
port, path = int(sys.argv[1]), sys.argv[2]
idle = []
for _ in range(120):
    s = socket.socket(); s.setblocking(False)
    try: s.connect(("127.0.0.1", port))
    except BlockingIOError: pass
    idle.append(s)
time.sleep(0.3)
for s in idle:
    try: s.send(b"GET / HTTP/1.1\\r\\n")
    except OSError: pass
until = time.monotonic() + 9
while time.monotonic() < until:
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=3)
    try:
        c.request("GET", path); print("served", c.getresponse().status); break
    except OSError: pass
"""


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """For what this process opens from now on. Without asyncio's lines, of which there are thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    log = logging.getLogger("asyncio")
    log.setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        log.setLevel(logging.NOTSET)


async def flooded(port: int, path: str) -> str:
    """What somebody is told who asks while 120 connections have said half a head, of which 60 fit."""
    argv = [sys.executable, "-c", IDLE, str(port), path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client, few_descriptors(60):
        return (await asyncio.to_thread(client.communicate))[0]


@pytest.mark.gate
async def test_security_a05_agents_are_served_beside_idle_connections() -> None:
    async with Endpoint().listening() as endpoint:
        port = int(endpoint.open().url.split(":")[2].split("/")[0])
        assert "served 401" in await flooded(port, "/x/v1/models")


@pytest.mark.gate
async def test_security_a05_an_episode_server_serves_beside_idle_connections() -> None:
    async with (
        aiohttp.ClientSession() as session,
        EpisodeServer(("a", "b"), 30, session).listening(0) as base,
    ):
        assert "served 200" in await flooded(int(base.rsplit(":", 1)[1]), "/")


@pytest.mark.gate
async def test_security_a05_the_dashboard_serves_beside_idle_connections() -> None:
    async with serving(Dashboard([], "token").app(), "127.0.0.1") as url:
        assert "served 403" in await flooded(int(url.rsplit(":", 1)[1]), "/")


@pytest.mark.gate
async def test_security_a05_the_tenants_server_serves_beside_idle_connections() -> None:
    front = Front(cast(Any, None), Keys({}), cast(Any, None))
    async with serving(front.app(), "127.0.0.1") as url:
        assert "served 200" in await flooded(int(url.rsplit(":", 1)[1]), "/api/v1/healthz")


@pytest.mark.gate
async def test_security_a05_the_exporter_serves_and_leaves_the_supervisor_its_descriptors(
    tmp_path: Path,
) -> None:
    """Without them it could not read metrics.jsonl, and the run ended."""
    log = tmp_path / "metrics.jsonl"
    log.write_text("{}")
    with serve_metrics(Exporter(cast(Any, None)), 0, tmp_path / "run", []) as port:
        flood = asyncio.create_task(flooded(port, "/metrics"))
        while not flood.done():
            assert log.read_text() == "{}"
            await asyncio.sleep(0.01)
        assert "served 200" in await flood


# -- A6, A7: tenants ------------------------------------------------------------------------------------------


def test_security_a06_the_time_for_a_shape_does_not_grow_with_its_square() -> None:
    def seconds(size: int) -> float:
        best = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            with contextlib.suppress(ValueError):
                packed(b"\xff" * size, 2**20)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(2**17) < 8 * max(seconds(2**15), 1e-4)


async def test_security_a06_a_full_disk_is_reported_in_the_response() -> None:
    async def full(_: web.Request) -> web.Response:
        raise RunError("ledger.sqlite: No space left on device")

    app = guarded_app([web.get("/", full)], LIMITS, statuses=STATUSES)
    async with TestClient(TestServer(app)) as client, client.get("/") as answer:
        assert "No space left" in await answer.text()


def test_security_a07_a_replaced_tenants_server_accepts_no_changes(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    ledger = Ledger(tmp_path / "tenants" / "bob", owner.check)
    assert ledger.accept("m", 0, "create_model", b"x")
    (request,) = ledger.unfinished()
    state = ledger.state_file(ledger.write_state("m", 0, b"state"))
    claim(tmp_path)
    changes: dict[str, Callable[[], object]] = {
        "accept": lambda: ledger.accept("m", 1, "optim_step", b"x"),
        "finish": lambda: ledger.finish(request, b"result"),
        "state": lambda: ledger.write_state("m", 1, b"state"),
        "save": lambda: ledger.write_save("tinker://m/weights/a", b"state"),
        "sweep": ledger.sweep,
        "session": lambda: ledger.add_session("s"),
    }
    for change in changes.values():
        with pytest.raises(FencedError, match="launch 1 no longer owns this run; launch 2 has taken it"):
            change()
    again = Ledger(tmp_path / "tenants" / "bob")
    assert [r.seq for r in again.unfinished()] == [0]
    assert state.exists() and len(list(state.parent.iterdir())) == 1


# -- A8: the relay --------------------------------------------------------------------------------------------


def bring(
    relay: Relay, content: NDArray[np.uint8], token: str = "token", location: tuple[int, int] = (0, 0)
) -> int:
    piece = Piece(0, len(content), 1, 0, digest(content))
    return relay.receive_piece(token, location, encode(piece, content, None, ""))


def test_security_a08_a_file_larger_than_a_machine_is_refused() -> None:
    relay = Relay()
    relay.open("token", [], 1.0)
    spec = FileSpec(2**42, 1, ("0" * 32,) * pieces_in(2**42))
    with pytest.raises(TooLarge, match=r"bytes; expected at most .*, this machine's memory"):
        relay.declare(0, [spec])


def test_security_a08_files_of_a_push_leave_descriptors_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    store = Store()
    try:
        with pytest.raises(
            TooLarge, match="declares 11 files; expected at most 10, half of this process's limit"
        ):
            store.declare([FileSpec(8, 1, ("x",))] * 30)
    finally:
        store.close()


def test_security_a08_a_sender_creates_no_file_and_changes_no_size() -> None:
    """Before: each piece said how large its file is, and a new number was a new descriptor."""
    content = np.full(100, 1, np.uint8)
    relay = Relay()
    relay.open("token", [], 1.0)
    assert relay.declare(0, [FileSpec(100, 1, (digest(content),))])["success"]
    descriptor_count = len(os.listdir("/proc/self/fd"))
    for location in ((1, 0), (0, 1), (-1, 0), (0, -1), (2**70, 0)):
        with pytest.raises(Undeclared):
            bring(relay, content, location=location)
    assert bring(relay, np.full(99, 1, np.uint8)) == 422
    assert bring(relay, np.full(2**20, 1, np.uint8)) == 422
    assert len(os.listdir("/proc/self/fd")) == descriptor_count
    assert relay.state(1)["folder"] is None
    assert bring(relay, content) == 200
    assert relay.state(1)["folder"] is not None


def test_security_a08_engines_load_only_verified_weights() -> None:
    """Before: the token was good until the next push, and a piece that came meanwhile was in the engine's file."""
    right, wrong = (np.full(100, value, np.uint8) for value in (1, 2))
    relay = Relay()
    relay.open("token", [], 1.0)
    assert not relay.declare(1, [FileSpec(100, 1, (digest(wrong),))])["success"]
    assert relay.declare(0, [FileSpec(100, 1, (digest(right),))])["success"]
    assert bring(relay, wrong) == 422
    assert relay.state(1)["folder"] is None
    assert relay.renew("another")["success"]
    assert bring(relay, right) == 403, "the first one brings nothing"
    assert bring(relay, right, "another") == 200
    assert [relay.state(files)["folder"] for files in (0, 2)] == [None, None]
    folder = Path(relay.state(1)["folder"])
    assert bring(relay, wrong, "another") == 200, "it is there: what comes is not read"
    assert (folder / "model-00000.safetensors").read_bytes() == right.tobytes()
    relay.open("next", [], 1.0)
    with pytest.raises(Undeclared):
        bring(relay, wrong, "next")
    assert (folder / "model-00000.safetensors").read_bytes() == right.tobytes()


async def test_security_a08_nested_lists_are_no_server_error() -> None:
    relay = Relay()
    relay.open("token", [], 1.0)
    sent_messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent_messages.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"[" * 100_000}

    headers = [(TOKEN_HEADER.encode(), b"token"), (PIECE_HEADER.encode(), b"[" * 2000)]
    scope = {"type": "http", "path": "/relay/pieces", "method": "POST", "headers": headers}
    statuses = []
    for path in (OFFER, PIECE):
        sent_messages.clear()
        try:
            await RelayMiddleware(cast(Any, None), relay)({**scope, "path": path}, receive, send)
        except RecursionError:
            statuses.append(500)
            continue
        statuses.append(sent_messages[0]["status"])
    assert all(400 <= status < 500 for status in statuses)


# -- A9: a meeting --------------------------------------------------------------------------------------------


async def test_security_a09_a_sample_that_arrives_again_joins_its_partner() -> None:
    """Its first arrival forgets the episode in which the second one sits."""
    async with aiohttp.ClientSession() as session:
        meeting = EpisodeServer(("a", "b"), 30, session)
        async with meeting.listening(0) as base:
            endpoint = {"url": "http://127.0.0.1:9", "reward_url": "http://127.0.0.1:9/r", "key": "k"}
            body = _arrival({"question": "x"}, endpoint)

            async def arrive(policy: str) -> int:
                async with session.post(f"{base}/{policy}", json=body) as answer:
                    return answer.status

            first = asyncio.create_task(arrive("a"))
            await _until(lambda: sum(len(e.arrivals) for e in meeting._episodes.values()) == 1)
            again = asyncio.create_task(arrive("a"))
            await first
            partner_task = asyncio.create_task(arrive("b"))
            await _until(lambda: len(list(meeting._endpoints.values())) >= 2, seconds=1.0)
            await asyncio.sleep(0.3)
            arrival_counts = [
                sum(s.arrival is not None for s in e.endpoints.values()) for e in meeting._episodes.values()
            ]
            for task in (again, partner_task):
                task.cancel()
            await asyncio.gather(again, partner_task, return_exceptions=True)
            assert arrival_counts == [2]


async def test_security_a09_samples_of_another_user_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        aiohttp.ClientSession() as session,
        EpisodeServer(("a", "b"), 30, session).listening(0) as base,
    ):
        endpoint = {"url": "http://127.0.0.1:9", "reward_url": "http://127.0.0.1:9/r", "key": "k"}
        monkeypatch.setattr(os, "geteuid", lambda: 54777)
        async with session.post(f"{base}/a", json=_arrival({"question": "x"}, endpoint)) as answer:
            assert answer.status == 403
            assert "only the user of this server" in await answer.text()


def test_security_a09_the_kernel_identifies_the_user_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            assert user_of_client(client.getsockname(), address) == os.geteuid()
            assert user_of_client(("127.0.0.1", 1), address) is None


def _arrival(row: dict[str, Any], place: dict[str, str]) -> dict[str, Any]:
    """As an agent's environment tells it."""
    env = {
        "OPENAI_BASE_URL": place["url"],
        REWARD_KEY: place["key"],
        REWARD_URL: place["reward_url"],
        SAMPLE: "1",
    }
    return {"task": row, "seed": 1, "env": env}


async def _until(true: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        await asyncio.sleep(0.01)


# -- A10: who may read a run ----------------------------------------------------------------------------------


def test_security_a10_a_run_folder_is_private_unless_shared(tmp_path: Path) -> None:
    previous_umask = os.umask(0o022)
    try:
        for share, mode in ((None, 0o700), ("group", 0o750), (None, 0o700)):
            run = {"dir": tmp_path / "run", "share": share}
            config = Config.model_validate({"model": {"path": MODEL}, "run": run})
            with open_run_dir(config, lambda _: None):
                assert (tmp_path / "run").stat().st_mode & 0o777 == mode
    finally:
        os.umask(previous_umask)


# -- A11: whoever the data names is asked ---------------------------------------------------------------------


@contextmanager
def listener(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            status, headers, body = answers.get(self.path, (200, {}, b'{"type": "string"}'))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_security_a11_a_schema_of_a_row_fetches_nothing() -> None:
    score = json_schema(Config.model_validate({"model": {"path": MODEL}}))
    with listener({}) as (url, paths):
        prompt = Prompt(0, "", [1], {"schema": {"$ref": f"{url}/latest/meta-data"}})
        with pytest.raises(ValueError, match="latest/meta-data': expected a reference within the schema"):
            score(prompt, Response('"x"', finished=True))
        assert not paths
    metaschema = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert score(Prompt(0, "", [1], {"schema": metaschema}), Response('{"type": 3}', finished=True)) == 0
    assert score(Prompt(0, "", [1], {"schema": metaschema}), Response('{"type": "null"}', finished=True)) == 1


async def test_security_a11_a_judges_redirect_is_not_followed() -> None:
    with listener({}) as (inner, inner_paths):
        models = (200, {"Content-Type": "application/json"}, b'{"data": [{"id": "m"}]}')
        moved = {
            "/v1/models": models,
            "/v1/chat/completions": (307, {"Location": f"{inner}/v1/chat/completions"}, b""),
        }
        with listener(moved) as (outer, _):
            with contextlib.suppress(JudgeError):  # no verdict is right
                await UrlJudge(outer)("a prompt and its answer")
            assert not inner_paths


def test_security_a11_the_metadata_of_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "made"), "w")

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Code(), protocol))
        with pytest.raises(UserError, match=r"it contains \w+.open; expected only types of the format"):
            DistReader(tmp_path)
    names = (
        "torch.load",
        "torch.distributed.checkpoint.filesystem.FileSystemWriter",
        "os.system",
        "torch.os.system",
    )
    for module, _, name in (n.rpartition(".") for n in names):
        (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
        with pytest.raises(UserError, match="expected only types of the format"):
            DistReader(tmp_path)
    assert not (tmp_path / "made").exists()


# -- A14, A15: minor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["(" * 2000 + ")" * 2000, "a{99999999999}"])
def test_security_a14_an_invalid_dashboard_pattern_raises_a_user_error(text: str) -> None:
    try:
        dash_pattern(text)
    except UserError:
        return
    except (RecursionError, OverflowError) as e:
        raise AssertionError(repr(e)[:80]) from None


@pytest.mark.parametrize(
    "adam", [{"learning_rate": 1e308}, {"weight_decay": 1e308}, {"beta2": 0.0, "eps": 5e-324}]
)
def test_security_a15_an_optimizer_step_that_makes_a_model_nan_is_refused(adam: dict[str, float]) -> None:
    body = json.dumps({"adam_params": adam, "model_id": "m", "seq_id": 1}).encode()
    try:
        read(OptimStep, body)
        is_accepted = True
    except UserError:
        is_accepted = False
    assert not is_accepted


# -- A21: adapters ---------------------------------------------------------------------------------------------


async def test_security_a21_a_sample_of_the_base_model_does_not_wait_for_adapters(tmp_path: Path) -> None:
    """Places count requests: those of many adapters, of which an engine decodes a few at once, take all."""
    adapters: list[str | None] = []
    free = asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        adapter = (await request.json()).get("lora_path")
        adapters.append(adapter)
        if adapter is not None:
            await free.wait()
        meta = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "length"}}
        return web.json_response({"meta_info": meta})

    async def done(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/load_lora_adapter", done)
    async with TestServer(app) as server, make_session() as session:
        engine = Engine(str(server.make_url("")).rstrip("/"), session, ANONYMOUS, DEFAULT_LIMITS, 10.0)
        ledger = Ledger(tmp_path)
        with ThreadPoolExecutor(1) as thread:
            service = Service({"bob": ledger}, cast(Any, None), thread, engine, 16, lambda _: None)
            running = asyncio.create_task(service.run())
            await asyncio.sleep(0)
            bob = service.tenants["bob"]
            for i in range(17):
                path = None if i == 16 else f"tinker://m/sampler_weights/{i}"
                if path is not None:
                    ledger.add_save(path, "m", i, 0)
                await service.new_sampler(bob, f"s:sample:{i}", path)
                body = {
                    "sampling_session_id": f"s:sample:{i}",
                    "seq_id": 0,
                    "prompt": {"chunks": [{"tokens": [1]}]},
                    "sampling_params": {"max_tokens": 1},
                }
                await service.submit(bob, f"s:sample:{i}", 0, "sample", json.dumps(body).encode())
            await _until(lambda: None in adapters, seconds=1.0)
            try:
                assert None in adapters
            finally:
                free.set()
                await _until(lambda: not bob.pending)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
