"""Requests of the supervisor to the rollout process: readiness and status."""

from __future__ import annotations

import http.client

from rlsys.core.owner import KEY_HEADER, Owner
from rlsys.core.sockets import UnixConnection, exchange

NO_ANSWER, OK, NOT_YET = 0, 200, 503
SECONDS = 1.0


def probe(owner: Owner, path: str, data: bytes | None = None, timeout: float = SECONDS) -> tuple[int, bytes]:
    """Send a request, and return status and body. With `data` it is a POST.

    The status is 0 if there is no response, or another user's process listens: the caller tries again.
    """
    connection = UnixConnection(owner.rollout_socket, timeout)
    try:
        return exchange(connection, "GET" if data is None else "POST", path, data, {KEY_HEADER: owner.key})
    except (OSError, http.client.HTTPException):
        return NO_ANSWER, b""
