"""What is meant for this machine goes nowhere else: no proxy, no redirect, and nonsense is told as such."""

from __future__ import annotations

import socketserver
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from launch.probe import probe
from launch.readiness import engine_is_up
from rlsys.core.errors import RunError
from rlsys.core.identity import Identity
from rlsys.core.owner import Owner, claim
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.core.types import Prompt
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.weight_calls import Call
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.reader import RunReader
from rlsys.obs import coordinator
from rlsys.obs.direct import opener
from rlsys.weights.receivers import post


class Server(HTTPServer):
    """Answers every request with `status`, `headers` and `body`, and remembers the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.headers, self.body = 200, dict[str, str](), b""
        self.seen: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server | UnixServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(self.path)
        self.send_response(self.server.status)
        for name, value in {**self.server.headers, "Content-Length": str(len(self.server.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


class UnixServer(socketserver.ThreadingUnixStreamServer):
    """The same on a Unix socket."""

    def __init__(self, path: Path, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(str(path), Handler)
        self.status, self.headers, self.body, self.seen = status, headers, body, list[str]()


@contextmanager
def coordinator_that_answers(run: Path, status: int, headers: dict[str, str], body: bytes) -> Iterator[Owner]:
    sockets = make_folder()
    owner = claim(run, sockets)
    coordinator.publish_address(owner)
    with UnixServer(owner.rollout_socket, status, headers, body) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield owner
        finally:
            server.shutdown()
            remove_folder(sockets)


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """The one that is meant, and another one."""
    pair = Server(), Server()
    for server in pair:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield pair
    for server in pair:
        server.shutdown()
        server.server_close()


def test_requests_bypass_proxies_of_the_environment(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    meant, proxy = servers
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    meant.body = b'{"success": true}'
    with opener.open(f"{meant.url}/status", timeout=5) as answer:
        assert answer.status == 200
    post(EngineAddress(meant.url, 1, 0, "key"), Call("/begin", {}), 60)
    assert meant.seen == ["/status", "/begin"]
    assert proxy.seen == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_key_follows_a_redirect(servers: tuple[Server, Server], status: int, tmp_path: Path) -> None:
    meant, redirect_target = servers
    meant.status, meant.headers = status, {"Location": f"{redirect_target.url}/elsewhere"}
    with pytest.raises(urllib.error.HTTPError):
        opener.open(f"{meant.url}/status", timeout=5)
    with pytest.raises(RunError, match=f"{meant.url}/begin: HTTP status {status}"):
        post(EngineAddress(meant.url, 1, 0, "key"), Call("/begin", {}), 60)
    assert not engine_is_up(meant.url, Identity("owner:1", "api", "admin"))
    assert redirect_target.seen == []
    with coordinator_that_answers(tmp_path, status, meant.headers, b"") as owner:
        assert probe(owner, "/status") == (status, b"")
        with pytest.raises(coordinator.CoordinatorUnreachable):
            coordinator.query_coordinator(tmp_path, "status")
    assert redirect_target.seen == []


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"\xff\xfe", b"", b"[1, 2]", b"null"])
def test_a_response_not_from_sglang_is_reported(servers: tuple[Server, Server], body: bytes) -> None:
    """Before: a JSONDecodeError or an AttributeError, without the address."""
    meant, _ = servers
    meant.body = body
    with pytest.raises(RunError, match=f"{meant.url}/begin: the response is .*; expected a JSON object"):
        post(EngineAddress(meant.url, 1, 0), Call("/begin", {}), 60)


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"\xff\xfe", b"[1, 2]"])
def test_a_foreign_server_at_the_coordinator_address_is_reported(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.ledger.reader.is_local", lambda _: False)  # else it looks into the file
    reader = RunReader(tmp_path)
    with coordinator_that_answers(tmp_path, 200, {}, body):
        for ask in (reader.status, reader.ledger):
            with pytest.raises(coordinator.CoordinatorUnreachable, match="is not a coordinator"):
                ask()


def test_a_reader_on_a_local_disk_ignores_a_foreign_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.ledger.store.is_local", lambda _: True)
    monkeypatch.setattr("rlsys.ledger.reader.is_local", lambda _: True)
    buffer = RolloutBuffer(tmp_path / "rollouts.sqlite", "run", 8)
    buffer.issue(Prompt(0, "", [1], {}), [1])
    buffer.flush()
    buffer.close()
    with coordinator_that_answers(tmp_path, 200, {}, b"nonsense"):
        assert RunReader(tmp_path).ledger().issued_groups == 1
