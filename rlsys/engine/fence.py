"""In front of an engine's HTTP server: weights are taken only from the push that was begun last.

A trainer that was paused in the middle of a push, and comes back when another has taken its place, still has its
ticket and the engines' keys. What it sends would land between the tensors of its successor. So each push of an engine
has an epoch: `begin_weight_update` brings it, the ticket carries it, and calls with another one are refused (HTTP
409). Calls without an epoch pass: they are of no run (`rlsys router`, a person with curl).
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
"""Beginnings of paths. A group may always be left: NCCL's end waits for the other side's."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Fence:
    """An ASGI application around another one. Owns the epoch; None before the first push that has one."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._epoch: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (told := dict(scope["headers"]).get(HEADER.encode())) is not None:
            path = scope["path"]
            if path == BEGIN:
                self._epoch = told
            elif path.startswith(_FENCED) and told != self._epoch:
                await _refuse(
                    send, f"push {told.decode('ascii', 'replace')} is over: another one has begun since"
                )
                return
        await self._app(scope, receive, send)


async def _refuse(send: Send, why: str) -> None:
    body = json.dumps({"success": False, "message": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 409, "headers": headers})
    await send({"type": "http.response.body", "body": body})
