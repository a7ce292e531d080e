"""Installation of a relay in an HTTP application (Starlette or FastAPI): routes for the trainer and other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlsys.weights_relay.feeder import Hop
from rlsys.weights_relay.pieces import decode_file_spec
from rlsys.weights_relay.relay import BAD_REQUEST, TOO_LARGE, Relay, RelayMiddleware
from rlsys.weights_relay.store import TooLarge

Endpoint = Callable[[Request], Any]


def install(app: Starlette, protect: Callable[[Endpoint], Endpoint]) -> Relay:
    """Add the relay's routes before the application serves. `protect`: sets the key that an endpoint requires."""
    relay = Relay()
    calls = {"open": _open, "declare": _declare, "renew": _renew, "state": _state, "feed": _feed}
    for name, call in calls.items():
        endpoint = protect(_endpoint(relay, call))
        app.router.routes.insert(0, Route(f"/relay/{name}", endpoint, methods=["POST"]))
    build: Any = app.build_middleware_stack
    # Outermost, around later middleware and the check of keys.
    app.build_middleware_stack = lambda: RelayMiddleware(build(), relay)  # type: ignore[method-assign]
    return relay


def _endpoint(relay: Relay, call: Callable[[Relay, Any], dict[str, Any]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            body = await request.json()
            return JSONResponse(await asyncio.to_thread(call, relay, body))
        except TooLarge as e:
            return JSONResponse({"success": False, "message": str(e)}, status_code=TOO_LARGE)
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            answer = {"success": False, "message": f"invalid request to a relay: {e!r:.200}"}
            return JSONResponse(answer, status_code=BAD_REQUEST)

    return endpoint


def _open(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.open(str(body["token"]), _line(body), float(body["seconds"]))


def _declare(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.declare(int(body["first"]), [decode_file_spec(spec) for spec in body["files"]])


def _renew(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.renew(str(body["token"]))


def _state(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.state(int(body["files"]))


def _feed(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.feed(_line(body), float(body["seconds"]))


def _line(body: Any) -> list[Hop]:
    return [Hop(str(url), str(token)) for url, token in body["line"]]
