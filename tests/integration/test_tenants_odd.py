"""A tenant harms no other one on the real `rlsys tenants`: odd values of each parameter, and floods of requests."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.odd_requests import EDGES, PROMPT, SAMPLING, Raw
from tests.helpers.sessions import command_line
from tests.integration.test_tenants_run import ANSWERS, MODEL, Client, Server, clients, imitation

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
OF_TINKER = (
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "stop",
    "sampling_seed",
    "min_p",
    "no_such_parameter",
)
SECONDS = 90.0


class Tenant:
    """Tinker's requests by plain HTTP: its client would not send odd ones."""

    def __init__(self, server: Server, name: str) -> None:
        self._url, self._key = server.url, server.key_file(name).read_text().strip()
        self.session = self.post("create_session", {})[1]["session_id"]
        asked = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        self._sampler = self.post("create_sampling_session", asked)[1]["sampling_session_id"]
        self._seq = 0

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self._key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                told = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
                return answer.status, json.loads(told) if is_json else told
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def begin_sample(self, params: str, samples: int) -> int:
        """Ask for samples, and leave them there; the status."""
        return self.post("asample", self._body(params, samples))[0]

    def _body(self, params: str, samples: int = 1) -> bytes:
        self._seq += 1
        told = f'"sampling_session_id": "{self._sampler}", "seq_id": {self._seq}, "sampling_params": {params}'
        prompt = f'"prompt": {{"chunks": [{{"tokens": {json.dumps(PROMPT)}}}]}}'
        return f'{{{told}, {prompt}, "num_samples": {samples}}}'.encode()

    def sample(self, params: str) -> tuple[int, Any]:
        """Of `params` as JSON: the refusal, or what came of it."""
        status, answer = self.post("asample", self._body(params))
        while status == 200 and isinstance(answer, dict) and "request_id" in answer:
            status, answer = self.post("retrieve_future", {"request_id": answer["request_id"]})
        return status, answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("tenants-odd") / "run", ["alice", "bob"])
    yield made
    made.end()


def engines(server: Server) -> set[int]:
    children = psutil.Process(server._process.pid).children(recursive=True)
    return {p.pid for p in children if "rlsys.engine.server" in command_line(p)}


def test_every_odd_sample_is_answered_and_the_engine_lives(server: Server, tmp_path: Path) -> None:
    bob, before, wrong = Tenant(server, "bob"), engines(server), []
    assert before
    plain = json.dumps({"max_tokens": 8, "seed": 7})
    status, expected = bob.sample(plain)
    assert status == 200 and isinstance(expected, bytes)
    table = [(n, v) for n in OF_TINKER for v in (*EDGES.get(n, ()), *SAMPLING.get(n, ()))]
    for i, (name, value) in enumerate(table):
        text = str(value) if isinstance(value, Raw) else json.dumps(value)
        most = "" if name == "max_new_tokens" else '"max_tokens": 2, '
        status, answer = bob.sample(f'{{{most}"{NAMES.get(name, name)}": {text}}}')
        if not 200 <= status < 500 or (isinstance(answer, dict) and answer.get("category") == "server"):
            wrong.append((name, str(value)[:50], status, str(answer)[:200]))
        if i % 10 == 9:
            assert bob.sample(plain) == (200, expected), (name, value)
    assert not wrong
    assert engines(server) == before


FLOODS = 64
SLOW_BODIES = 200


class Flood:
    """Requests of one tenant: many samples at once, bodies that come byte by byte, connections that stay idle."""

    def __init__(self, server: Server, name: str) -> None:
        self._tenant, self._ended = Tenant(server, name), threading.Event()
        self._key = server.key_file(name).read_text().strip()
        self._port = int(server.url.rpartition(":")[2])
        self.statuses = Counter[int]()
        self._threads = [threading.Thread(target=run) for run in (self._sample, self._hold)]
        for thread in self._threads:
            thread.start()

    def _sample(self) -> None:
        while not self._ended.is_set():
            for _ in range(FLOODS):
                self.statuses[self._tenant.begin_sample('{"max_tokens": 200}', 128)] += 1
            self._ended.wait(0.5)

    def _hold(self) -> None:
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {self._key}\r\n"
        head += "Content-Type: application/x-protobuf\r\nContent-Length: 30000000\r\n\r\n"
        with ExitStack() as stack:
            held = [
                stack.enter_context(socket.create_connection(("127.0.0.1", self._port)))
                for _ in range(SLOW_BODIES)
            ]
            for connection in held[::2]:
                connection.sendall(head.encode())
            while not self._ended.wait(0.25):
                for connection in held[::2]:
                    with suppress(OSError):
                        connection.send(b"x")

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def trained(client: Client, model: str) -> list[Any]:
    """Losses and gradient norms of some steps of a new model."""
    client("create", model=model, base=MODEL, rank=16, seed=5)
    data = [imitation(answer) for answer in ANSWERS.values()]
    return [client("train", model=model, data=data, loss="cross_entropy", lr=4e-3) for _ in range(6)]


def test_a_tenant_trains_beside_one_that_floods_the_server(server: Server) -> None:
    with clients(server, "alice") as (alice,):
        start = time.monotonic()
        quiet = trained(alice, "quiet")
        middle = time.monotonic()
        flood = Flood(server, "bob")
        try:
            beside = trained(alice, "beside")
        finally:
            flood.end()
        ratio = (time.monotonic() - middle) / (middle - start)
    print(f"{ratio:.1f} times as long as alone; statuses of the flood {dict(flood.statuses)}")
    assert beside == quiet
    assert flood.statuses[200] > 0 and set(flood.statuses) <= {200, 429}
