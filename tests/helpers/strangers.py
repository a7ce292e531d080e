"""Rogue server that listens in place of a process of the run."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rogue_server(listening: socket.socket) -> Iterator[list[bytes]]:
    """Answer requests on a listening socket as the rollout process would, and yield the received data."""
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
