"""What the supervisor asks of the rollout process: whether it is there, and how it is."""

from __future__ import annotations

import http.client

from rlsys.core.owner import KEY_HEADER, Owner
from rlsys.core.sockets import UnixConnection, exchange

NO_ANSWER, OK, NOT_YET = 0, 200, 503
SECONDS = 1.0


def probe(owner: Owner, path: str, data: bytes | None = None, timeout: float = SECONDS) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no answer, or another user listens: the caller asks again. With
    `data`: a POST."""
    connection = UnixConnection(owner.rollout_socket, timeout)
    try:
        return exchange(connection, "GET" if data is None else "POST", path, data, {KEY_HEADER: owner.key})
    except (OSError, http.client.HTTPException):
        return NO_ANSWER, b""
