"""What a tenant's requests cost the others, on the real server's process: turns of training, and slow bodies."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rlsys.tenants.keys import key_of
from rlsys.tenants.ledger import FILE_NAME
from tests.integration.test_nemesis_tenants import Server, Tenant, engine
from tests.integration.test_tenants_front import passes

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

MODELS, REQUESTS = 4, 12
SLOW_BODIES = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ExitStack() as stack:
        server = Server(tmp_path_factory.mktemp("neighbours"), stack.enter_context(engine()))
        stack.callback(server.close)
        server.wait()
        yield server


def times(server: Server, *models: Tenant) -> list[tuple[float, float]]:
    """When each pass of models of one tenant was accepted and finished, in the order of the latter."""
    path = server.run / "tenants" / models[0].name / FILE_NAME
    query = "SELECT accepted, finished FROM requests WHERE series = ? AND kind = 'forward_backward'"
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = [row for each in models for row in db.execute(query, (each.model,))]
    return sorted(rows, key=lambda row: row[1])


def test_training_of_one_tenant_does_not_starve_another(server: Server) -> None:
    alice, bobs = Tenant(server, "alice"), [Tenant(server, "bob") for _ in range(MODELS)]
    for seq in range(REQUESTS, 0, -1):  # the first of each model comes last: from then on all are ready
        for bob in bobs:
            bob.post(server.direct, "forward_backward", passes(bob.model, seq, [3, 5, 7, *range(9, 40)]))
    accepted = alice.post(server.direct, "forward_backward", passes(alice.model, 1, [3, 5, 7]))
    assert isinstance(alice.result(server.direct, accepted["request_id"]), bytes)
    for bob in bobs:
        bob.result(server.direct, f"{bob.model}:{REQUESTS}")
    ((accepted_at, finished_at),) = times(server, alice)
    finished = [end for _, end in times(server, *bobs)]
    assert len(finished) == MODELS * REQUESTS and finished[-1] > finished_at, "alice did not wait behind all"
    assert len([end for end in finished if accepted_at < end < finished_at]) <= 2


def test_stalled_request_bodies_do_not_block_other_tenants(server: Server) -> None:
    alice, key = Tenant(server, "alice"), key_of(server.run, "bob")
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n"
        f"Content-Type: application/x-protobuf\r\nContent-Length: {2**24}\r\n\r\n."
    )
    with ExitStack() as stack:
        for _ in range(SLOW_BODIES):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(head.encode())
        for seq in range(1, 4):
            accepted = alice.post(server.direct, "forward_backward", passes(alice.model, seq, [3, 5, 7]))
            assert isinstance(alice.result(server.direct, accepted["request_id"]), bytes)
