"""A port that a run has chosen belongs to its user: no server of another user can take it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from launch.ports import PortReservation, free_ports

STRANGER = 54777
BIND = """
import os, socket, sys
os.setresuid({uid}, {uid}, {uid})
s = socket.socket()
for option in sys.argv[2:]: s.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
try: s.bind((sys.argv[1], {port})); s.listen(); print("listens")
except OSError as e: print(e.strerror)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "options", [[], ["SO_REUSEADDR"], ["SO_REUSEPORT"], ["SO_REUSEADDR", "SO_REUSEPORT"]]
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("configured", [False, True])
def test_another_user_cannot_listen_on_a_port_of_a_run(
    configured: bool, address: str, options: list[str]
) -> None:
    reservation = PortReservation("127.0.0.1")
    (port,) = free_ports("127.0.0.1", 1) if configured else reservation.choose(1)
    if configured:
        reservation.reserve(port, 1)
    try:
        code = BIND.format(uid=STRANGER, port=port)
        process = subprocess.run(
            [sys.executable, "-c", code, address, *options], capture_output=True, text=True
        )
        assert process.stdout.strip() == "Address already in use"
    finally:
        reservation.release()


def test_two_runs_of_one_user_do_not_share_a_port() -> None:
    reservation = PortReservation("127.0.0.1")
    (port,) = reservation.choose(1)
    try:
        with socket.socket() as s, pytest.raises(OSError, match="in use"):
            s.bind(("127.0.0.1", port))
    finally:
        reservation.release()
