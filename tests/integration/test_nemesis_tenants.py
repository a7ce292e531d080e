"""Seeded schedules of faults on the server of `rlsys tenants`, and on the link to it, while two tenants train.

The server's process is the real one; a stand-in answers as its engine. A third tenant does the same without faults
afterwards: each result, each saved state and each exported adapter has to be its own to the byte. So no accepted
request is lost, none is applied twice, and no weights are wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from aiohttp import web

from launch.ports import free_ports
from rlsys.core.owner import claim
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import guarded_app, serving_in_thread
from rlsys.tenants.keys import key_of
from rlsys.tenants.ledger import FILE_NAME
from tests.helpers import trainer_cases as cases
from tests.helpers.process_faults import ServerProcess
from tests.helpers.proxy import Proxy, port_of
from tests.helpers.servers import ROOT
from tests.integration.test_nemesis_dashboard import kind_of
from tests.integration.test_nemesis_services import draw
from tests.integration.test_tenants_front import passes, step

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

FAULTS = (
    "killed", "stopped", "disk full", "second owner", "cut", "delayed", "doubled", "flipped", "none",
)  # fmt: skip
UNDER_FAULTS = ("alice", "bob")
QUIET = "carol"
FAULT_SECONDS, QUIET_SECONDS = 2.0, 60.0
"""Time limits of a request while a fault lasts, and afterwards."""
START_SECONDS = 300.0
"""A guard, no claim."""
PASSES = 2
"""Backward passes before an optimizer step."""


@contextmanager
def engine() -> Iterator[str]:
    """Serve what the server asks of an engine without samples."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app = guarded_app([web.get("/health", health), web.get("/v1/models", models)], ServerLimits(16))
    with serving_in_thread(app, "127.0.0.1", 0, "engine") as url:
        yield url


class Server(ServerProcess):
    """`rlsys.tenants.serve`, started again when it ends, as the supervisor does; behind a link."""

    status: Callable[[str], int]
    """Sends a request to a URL, and returns its status."""

    def __init__(self, folder: Path, engine_url: str) -> None:
        self.run, self._engine = folder / "run", engine_url
        self.run.mkdir()
        config = {
            "model": {"path": str(cases.write_model(folder / "model"))},
            "run": {"dir": str(self.run)},
            "trainer": {"token_budget": cases.BUDGET, "lora": {"rank": 4, "alpha": 8}},
            "rollout": {"max_response_tokens": 64},
            "weights": {"method": "adapter"},
        }
        (self.run / "config.yaml").write_text(yaml.safe_dump(config))
        self.log = folder / "serve.log"
        self.port, self._starts = 0, 0
        self.link = Proxy(lambda: self.port)
        self.take_over()

    @property
    def direct(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def linked(self) -> str:
        return f"http://127.0.0.1:{self.link.port}"

    def take_over(self) -> None:
        """Start it for a new launch, which owns the folder from now on."""
        self._owner = claim(self.run)
        self.port = free_ports("127.0.0.1", 1)[0]
        self.start()

    def command(self) -> list[str]:
        words = [word for name in (*UNDER_FAULTS, QUIET) for word in ("--tenant", name)]
        return [
            sys.executable, "-m", "rlsys.tenants.serve", "--config", str(self.run / "config.yaml"),
            "--engine", self._engine, "--host", "127.0.0.1", "--port", str(self.port), *words,
        ]  # fmt: skip

    def start(self) -> None:
        self._starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, stdout=log, stderr=log,
                env={**os.environ, **self._owner.environment(self._starts)},
            )  # fmt: skip

    def second_owner(self) -> None:
        """Start a process of a new launch, which owns the folder; the former one must refuse requests."""
        former, url = self.process, self.direct
        self.take_over()
        assert self.status(url) != 200, "a server accepts requests although another launch owns the folder"
        former.kill()
        former.wait()

    def heal(self) -> None:
        super().heal()
        self.wait()

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                self.start()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.direct}/api/v1/healthz", timeout=FAULT_SECONDS).close()
                return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-3000:])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()


class Tenant:
    """A client that sends its requests until each is accepted, and asks until each has its result."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self.name = server, name
        self._key = key_of(server.run, name)
        self.refusals = Counter[str]()
        session = self.post(server.direct, "create_session", {})["session_id"]
        lora = {"rank": 4, "seed": 5}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": lora}
        response = self.post(server.direct, "create_model", body)
        self.model = self.result(server.direct, response["request_id"])["model_id"]
        self.requests: list[tuple[str, Any]] = []
        """All of the model, in the order of their numbers, which begin with 1."""
        self.results: list[Any] = []

    def post(self, url: str, path: str, body: Any, seconds: float = QUIET_SECONDS) -> Any:
        """Send it as one block on a connection that stays open, so that a link can send all of it twice."""
        plain = isinstance(body, bytes)
        data = body if plain else json.dumps(body).encode()
        lines = [
            f"POST /api/v1/{path} HTTP/1.1", "Host: localhost", f"X-API-Key: {self._key}",
            f"Content-Type: application/{'x-protobuf' if plain else 'json'}", f"Content-Length: {len(data)}",
        ]  # fmt: skip
        with socket.create_connection(("127.0.0.1", port_of(url)), seconds) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
            answer = HTTPResponse(connection)
            answer.begin()
            payload = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        content = json.loads(payload) if is_json else payload
        if answer.status != 200:
            assert answer.status == 400 or isinstance(content, dict), (answer.status, content)
            raise HTTPError(url, answer.status, str(content), answer.headers, None)
        return content

    def attempt(self, path: str, body: Any) -> None:
        """Send it while a fault may last."""
        with self.refused():
            self.post(self._server.linked, path, body, FAULT_SECONDS)

    @contextmanager
    def refused(self) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            raise
        except Exception as e:  # noqa: BLE001  (of a link with faults: no connection, a status, no HTTP)
            self.refusals[kind_of(e)] += 1

    def status(self, url: str) -> int:
        """Of the next request, which is one of the model."""
        try:
            self.post(url, *self.requests[-1], FAULT_SECONDS)
        except HTTPError as e:
            return e.code
        except OSError:
            return 0
        return 200

    def result(self, url: str, request_id: str) -> Any:
        while True:
            response = self.post(url, "retrieve_future", {"request_id": request_id})
            if not isinstance(response, dict) or response.get("type") != "try_again":
                return response

    def all_results(self) -> list[Any]:
        """Of all its requests, as the server tells them now, without the names of this tenant's model."""
        results = (
            self.result(self._server.linked, f"{self.model}:{i}") for i in range(1, 1 + len(self.requests))
        )
        return [
            json.loads(json.dumps(each).replace(self.model, "")) if isinstance(each, dict) else each
            for each in results
        ]

    def train(self, number: int, fault: str, rng: random.Random) -> None:
        """One optimizer step, saved and exported; the fault begins before one of its requests or after the last."""
        first = len(self.requests) + 1
        ids = [3 + (number + i) % 90 for i in range(12)]
        model, name = self.model, f"step-{number}"
        save = {"model_id": model, "path": name}
        planned: list[tuple[str, Any]] = [
            ("forward_backward", passes(model, first + i, [ids[i], *ids])) for i in range(PASSES)
        ]
        seq = first + PASSES
        planned += [
            ("optim_step", step(model, seq)),
            ("save_weights", {**save, "seq_id": seq + 1, "type": "save_weights"}),
            ("save_weights_for_sampler", {**save, "seq_id": seq + 2, "type": "save_weights_for_sampler"}),
        ]
        fault_index = rng.randrange(len(planned) + 1)
        self._server.status = self.status
        for i, request in enumerate(planned):
            self.requests.append(request)
            if i == fault_index:
                self._server.inject_fault(fault, rng)
            self.attempt(*request)
        if fault_index == len(planned):
            self._server.inject_fault(fault, rng)
        with self.refused():
            self.post(self._server.linked, "retrieve_future", {"request_id": f"{model}:{seq}"}, FAULT_SECONDS)
        self._server.heal()
        for i, request in enumerate(planned):
            self.send(first + i, *request)

    def send(self, seq: int, path: str, body: Any) -> None:
        """Send it once more, until it is accepted and has its result."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with self.refused():
                accepted = self.post(self._server.linked, path, body)
                assert accepted == {"request_id": f"{self.model}:{seq}"}
                result = self.result(self._server.linked, accepted["request_id"])
                assert not (isinstance(result, dict) and "error" in result), result
                return
            self._server.wait()
        raise AssertionError((path, dict(self.refusals), self._server.log.read_text()[-3000:]))

    def files(self) -> dict[str, bytes]:
        """What it has saved, by the path below its model's folder."""
        folder = self._server.run / "tenants" / self.name / "saved" / self.model.replace(":", "-")
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def rows(self) -> tuple[Counter[tuple[str, str]], int]:
        """Requests by kind and outcome, and the optimizer steps in the model's state."""
        path = self._server.run / "tenants" / self.name / FILE_NAME
        with contextlib.closing(sqlite3.connect(path)) as db:
            rows = db.execute("SELECT kind, outcome FROM requests WHERE seq > 0").fetchall()
            ((updates,),) = db.execute("SELECT updates FROM models").fetchall()
        return Counter(rows), updates


def run_schedule(folder: Path, seed: int, more: int) -> None:
    rng = random.Random(seed)
    schedule = draw(rng, FAULTS, more)
    print(f"{seed}: {', '.join(schedule)}")
    with ExitStack() as stack:
        server = Server(folder, stack.enter_context(engine()))
        stack.callback(server.close)
        server.wait()
        tenants, steps = [Tenant(server, name) for name in UNDER_FAULTS], Counter[str]()
        for fault in schedule:
            tenant = rng.choice(tenants)
            steps[tenant.name] += 1
            tenant.train(steps[tenant.name], fault, rng)
            print(f"{fault}: {tenant.name}, {dict(tenant.refusals)}")
        tenant_results = [tenant.all_results() for tenant in tenants]
        server.inject_fault("killed", rng)
        server.heal()
        quiet = Tenant(server, QUIET)
        for number in range(1, 1 + max(steps.values())):
            quiet.train(number, "none", rng)
        expected, files = quiet.all_results(), quiet.files()
        for tenant, results in zip(tenants, tenant_results, strict=True):
            n = steps[tenant.name]
            assert results == expected[: len(results)] and tenant.all_results() == results
            assert len(results) == n * (PASSES + 3)
            saved = tenant.files()
            assert len(saved) == 3 * n and saved == {name: files[name] for name in saved}
            kinds = {"forward_backward": n * PASSES} | dict.fromkeys(
                ("optim_step", "save_weights", "save_weights_for_sampler"), n
            )
            assert tenant.rows() == (Counter({(kind, "done"): count for kind, count in kinds.items()}), n)
        log = server.log.read_text()
        assert "Traceback" not in log, log[-5000:]


def test_each_request_of_a_tenant_is_applied_once(tmp_path: Path) -> None:
    run_schedule(tmp_path, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_each_request_of_a_tenant_is_applied_once_in_longer_schedules(seed: int, tmp_path: Path) -> None:
    run_schedule(tmp_path, seed, 12)
