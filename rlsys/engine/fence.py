"""Fence: ASGI middleware of an engine's HTTP server that accepts weights from the newest push only.

A trainer that was suspended during a push, and resumes after it was replaced, still has its WeightUpdate and
the keys of the engines. Its tensors would mix with those of its successor. Therefore each push has an epoch for
each engine: `begin_weight_update` sets it, the WeightUpdate contains it, and calls with another epoch are
refused (HTTP 409). Calls without an epoch are accepted, because they belong to no run (`rlsys router`, or a user
with curl).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = "rlsys-push"
BEGIN = "/begin_weight_update"
_FENCED = (
    "/end_weight_update",
    "/update_weights_from_",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/relay/",
)
"""Prefixes of fenced paths. A call to leave a group is never fenced: NCCL closes a communicator on both sides."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Fence:
    """ASGI middleware. Owns the epoch of the newest push; None before the first push with an epoch."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._epoch: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (epoch := dict(scope["headers"]).get(HEADER.encode())) is not None:
            path = scope["path"]
            if path == BEGIN:
                self._epoch = epoch
            elif path.startswith(_FENCED) and epoch != self._epoch:
                await _refuse(
                    send, f"push {epoch.decode('ascii', 'replace')} was superseded: a newer push has begun"
                )
                return
        await self._app(scope, receive, send)


async def _refuse(send: Send, reason: str) -> None:
    """Send an error response in SGLang's format."""
    body = json.dumps({"success": False, "message": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 409, "headers": headers})
    await send({"type": "http.response.body", "body": body})
