"""Installation of a relay in an HTTP application (Starlette or FastAPI)."""

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
    """Add a relay's routes and middleware to an application that does not serve yet.

    Args:
        app: the application.
        protect: makes an endpoint require the admin key.

    Returns:
        The relay.
    """
    relay = Relay()
    calls = {"open": _open, "declare": _declare, "renew": _renew, "state": _state, "feed": _feed}
    for name, call in calls.items():
        endpoint = protect(_endpoint(relay, call))
        app.router.routes.insert(0, Route(f"/relay/{name}", endpoint, methods=["POST"]))
    build: Any = app.build_middleware_stack
    # The application calls build_middleware_stack when it starts, so the relay is outside of middleware added later.
    app.build_middleware_stack = lambda: RelayMiddleware(build(), relay)  # type: ignore[method-assign]
    return relay


def _endpoint(relay: Relay, call: Callable[[Relay, Any], dict[str, Any]]) -> Endpoint:
    """Return an endpoint that passes the JSON body of a request to `call`, and sends what it returns."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await request.json()
            return JSONResponse(await asyncio.to_thread(call, relay, body))
        except TooLarge as e:
            return JSONResponse({"success": False, "message": str(e)}, status_code=TOO_LARGE)
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            answer = {"success": False, "message": f"{request.url.path}: invalid request: {e!r:.200}"}
            return JSONResponse(answer, status_code=BAD_REQUEST)

    return endpoint


def _open(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.open(str(body["token"]), _chain(body), float(body["seconds"]))


def _declare(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.declare(int(body["first"]), [decode_file_spec(spec) for spec in body["files"]])


def _renew(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.renew(str(body["token"]))


def _state(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.state(int(body["files"]))


def _feed(relay: Relay, body: Any) -> dict[str, Any]:
    return relay.feed(_chain(body), float(body["seconds"]))


def _chain(body: Any) -> list[Hop]:
    return [Hop(str(url), str(token)) for url, token in body["line"]]
