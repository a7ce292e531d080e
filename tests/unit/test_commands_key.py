"""The run's key goes to the run's own rollout process, and to nobody who listens in its place (security A3)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsys.obs import coordinator
from rlsys.owner import claim


@contextmanager
def stranger(listening: socket.socket) -> Iterator[list[bytes]]:
    """Takes what is sent to the socket, and answers as the rollout process would."""
    received: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(5)
                    received.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield received
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_who_has_the_port_of_a_killed_coordinator_does_not_get_the_key(tmp_path: Path) -> None:
    """The file that a killed rollout process leaves names an address; who listens there now is not known."""
    owner = claim(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening, stranger(listening) as received:
        left = {"epoch": owner.epoch, "host": socket.gethostname(), "port": listening.getsockname()[1]}
        (tmp_path / coordinator.FILE_NAME).write_text(json.dumps(left))
        with contextlib.suppress(coordinator.Silent):
            coordinator.ask(tmp_path, "status", 5)
    assert owner.key.encode() not in b"".join(received)
