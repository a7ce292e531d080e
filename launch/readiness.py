"""Is it our engine that answers at its address? Whoever else got that port is told apart before he sees a key."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from rlsys.core.errors import RunError
from rlsys.core.identity import Identity
from rlsys.obs.direct import opener

PROBE_TIMEOUT = 1.0


class PortTaken(RunError):
    """Another server has the address that an engine of this run was to have."""


def engine_answers(url: str, whose: Identity) -> bool:
    """Whether the engine is up. Raises PortTaken when another server answers there, RunError when the engine opens to
    everybody.

    An engine of this run refuses who has no key. Only a server that does so is shown one, and it opens nothing but
    that engine.
    """
    if _get(f"{url}/health") != (200, None) or (stranger := _get(f"{url}/model_info")) is None:
        return False
    status, label = stranger
    if label is not None and whose.what(label) is not None:
        raise RunError(f"{url}: this engine opens without a key; see engine.extra_args")
    if status != 401:
        raise PortTaken(
            f"{url} belongs to another server: it answers {status} and {label or 'no weight version'}"
        )
    if (answer := _get(f"{url}/model_info", whose.headers("/model_info"))) is None:
        return False
    status, label = answer
    if label is None or whose.what(label) is None:
        raise PortTaken(f"{url} belongs to another server: it answers {status} to this run's key")
    return True


def listens(url: str) -> bool:
    """Whether anybody does there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), PROBE_TIMEOUT).close()
    except OSError:
        return False
    return True


def _get(url: str, headers: dict[str, str] | None = None) -> tuple[int, str | None] | None:
    """Status, and the weight version in the answer if there is one; None when nobody answers."""
    try:
        request = urllib.request.Request(url, headers=headers or {})
        with opener.open(request, timeout=PROBE_TIMEOUT) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, None
    except (OSError, http.client.HTTPException):
        return None
    try:
        found = json.loads(body)
    except ValueError:
        return status, None
    return status, str(found["weight_version"]) if isinstance(
        found, dict
    ) and "weight_version" in found else None
