"""Scores of prompt tokens from the reference engine."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlsys.core.errors import RunError
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.planning.prompt_scores import ReferenceScores


class Policy:
    """Engines of the policy, which respond at once."""

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        return [0.0] * (len(ids) - 1)


async def test_the_error_about_an_unavailable_engine_has_its_last_error() -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=500, text="no memory")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fail)
    async with TestServer(app) as server, make_session() as session:
        url = str(server.make_url("")).rstrip("/")
        scores = ReferenceScores(Policy(), EngineClient(url, session), (), timeout_s=0.5)  # type: ignore[arg-type]
        with pytest.raises(RunError, match=rf"{url} was unavailable for 0\.5 s; last error: .*no memory"):
            await scores([1, 2, 3])
