"""Requests of the supervisor to the rollout process, for its readiness and status."""

from __future__ import annotations

import http.client

from rlsys.core.owner import KEY_HEADER, Owner
from rlsys.core.sockets import UnixConnection, exchange

NO_ANSWER, OK, NOT_YET = 0, 200, 503
"""Status of a request: no response; ready; not ready yet, the body describes the progress."""
SECONDS = 1.0
"""Default time limit of a request."""


def probe(owner: Owner, path: str, data: bytes | None = None, timeout: float = SECONDS) -> tuple[int, bytes]:
    """Send a request to the rollout process.

    Args:
        owner: identity of the launch.
        path: path of the request.
        data: body of a POST request; None for a GET request.
        timeout: time limit in seconds.

    Returns:
        status and body of the response; NO_ANSWER and no body without a response, or if another user's process
            listens on the socket.
    """
    connection = UnixConnection(owner.rollout_socket, timeout)
    try:
        return exchange(connection, "GET" if data is None else "POST", path, data, {KEY_HEADER: owner.key})
    except (OSError, http.client.HTTPException):
        return NO_ANSWER, b""
