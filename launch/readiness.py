"""Readiness of engines. The launcher verifies the server at an engine's address before it sends a key."""

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


class PortInUse(RunError):
    """Another server listens on the address of an engine of this run."""


def engine_is_up(url: str, identity: Identity) -> bool:
    """Return whether the engine at `url` is up.

    An engine of this run refuses requests without a key. Only to a server that refuses such a request, this function
    sends the key, which is valid for this engine only.

    Args:
        url: URL of the engine.
        identity: keys of the engine.

    Raises:
        PortInUse: another server answers.
        RunError: the engine accepts requests without a key.
    """
    if _get(f"{url}/health") != (200, None):
        return False
    if (anonymous_answer := _get(f"{url}/model_info")) is None:
        return False
    status, label = anonymous_answer
    if label is not None and identity.parse_label(label) is not None:
        raise RunError(f"{url}: this engine accepts requests without a key; check engine.extra_args")
    if status != 401:
        raise PortInUse(
            f"{url} belongs to another server: to a request without a key it responds with status {status} and "
            f"{'no weight version' if label is None else f'weight version {label}'}; expected status 401"
        )
    if (answer := _get(f"{url}/model_info", identity.headers("/model_info"))) is None:
        return False
    status, label = answer
    if label is None or identity.parse_label(label) is None:
        raise PortInUse(
            f"{url} belongs to another server: to a request with this engine's key it responds with status {status} "
            f"and {'no weight version' if label is None else f'weight version {label}'}"
        )
    return True


def listens(url: str) -> bool:
    """Return whether a server listens at the address of `url`."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), PROBE_TIMEOUT).close()
    except OSError:
        return False
    return True


def _get(url: str, headers: dict[str, str] | None = None) -> tuple[int, str | None] | None:
    """Return the status of the response, and the field `weight_version` of its body.

    Returns:
        None without a response. The second item is None if the body has no such field.
    """
    try:
        request = urllib.request.Request(url, headers=headers or {})
        with opener.open(request, timeout=PROBE_TIMEOUT) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, None
    except (OSError, http.client.HTTPException):
        return None
    try:
        content = json.loads(body)
    except ValueError:
        return status, None
    if not isinstance(content, dict) or "weight_version" not in content:
        return status, None
    return status, str(content["weight_version"])
