"""No sample of a tenant ends the engine of all: odd values of each parameter to the real `rlsys tenants`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.odd_requests import EDGES, PROMPT, SAMPLING, Raw
from tests.helpers.sessions import command_line
from tests.integration.test_tenants_run import MODEL, Server

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
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        self._sampler = self.post("create_sampling_session", body)[1]["sampling_session_id"]
        self._seq = 0

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self._key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                content = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
                return answer.status, json.loads(content) if is_json else content
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def sample(self, params: str) -> tuple[int, Any]:
        """Of `params` as JSON: the refusal, or what came of it."""
        self._seq += 1
        fields = (
            f'"sampling_session_id": "{self._sampler}", "seq_id": {self._seq}, "sampling_params": {params}'
        )
        body = f'{{{fields}, "prompt": {{"chunks": [{{"tokens": {json.dumps(PROMPT)}}}]}}}}'.encode()
        status, answer = self.post("asample", body)
        while status == 200 and isinstance(answer, dict) and "request_id" in answer:
            status, answer = self.post("retrieve_future", {"request_id": answer["request_id"]})
        return status, answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("tenants-odd") / "run", ["bob"])
    yield server
    server.end()


def engines(server: Server) -> set[int]:
    children = psutil.Process(server._process.pid).children(recursive=True)
    return {p.pid for p in children if "rlsys.engine.server" in command_line(p)}


def test_every_odd_sample_is_answered_and_the_engine_lives(server: Server, tmp_path: Path) -> None:
    bob, initial_engines, wrong = Tenant(server, "bob"), engines(server), []
    assert initial_engines
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
    assert engines(server) == initial_engines
