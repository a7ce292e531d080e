"""HTTP servers of scripted engines, for rollout workers in separate processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from rlsys.core.types import Sample
from tests.helpers.scripted_engine import ScriptedEngine, logprob, token


@asynccontextmanager
async def serve_engines(*engines: ScriptedEngine) -> AsyncIterator[None]:
    """Serve engines at free ports of 127.0.0.1, and set their `url`."""
    runners = []
    try:
        for engine in engines:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", _handler(engine))
            runner = web.AppRunner(app, shutdown_timeout=0, access_log=None, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


def _handler(engine: ScriptedEngine):  # type: ignore[no-untyped-def]
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if engine.dead:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=500)
        if not body.get("stream"):
            status, text = await engine.answer(request.path_qs, body)
            return web.Response(status=status, text=text)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        stream = engine.stream(body)
        try:
            async for line in stream:
                await answer.write(line + b"\n")
        except aiohttp.ClientPayloadError:  # the engine died
            assert request.transport is not None
            request.transport.abort()
        finally:
            await stream.aclose()
        return answer

    return handle


def check_sample(sample: Sample) -> None:
    """Assert that each token and log-prob is the scripted one for its position and weight version."""
    first = len(sample.prompt_ids)
    ids, mu = list(sample.response_ids), list(sample.mu)
    assert len(ids) == sample.tokens > 0
    for i, version in enumerate(sample.versions()):
        assert mu[i] == logprob(sample.seed, first + i, version)
        assert ids[i] in (2, token(sample.seed, first + i, version))
