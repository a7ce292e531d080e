"""The run's key goes to the run's own rollout process, and to nobody who listens in its place (security A3)."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from rlsys.core.owner import claim
from rlsys.obs import coordinator
from tests.helpers.strangers import rogue_server


def test_a_listener_on_a_killed_coordinators_port_never_receives_the_key(tmp_path: Path) -> None:
    """The file that a killed rollout process leaves names an address; who listens there now is not known."""
    owner = claim(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening, rogue_server(listening) as received:
        stale_address = {
            "epoch": owner.epoch,
            "host": socket.gethostname(),
            "port": listening.getsockname()[1],
        }
        (tmp_path / coordinator.FILE_NAME).write_text(json.dumps(stale_address))
        with contextlib.suppress(coordinator.CoordinatorUnreachable):
            coordinator.query_coordinator(tmp_path, "status", 5)
    assert owner.key.encode() not in b"".join(received)
