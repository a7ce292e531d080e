"""The HTTP front of a stand-alone router with fake engines in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from rlsys.core.identity import ANONYMOUS, Identity
from rlsys.engine.wire import make_session
from rlsys.gateway.fleet import Fleet, FleetInterruption
from rlsys.gateway.front import Front, FrontLimits
from tests.helpers.http_engine import HttpEngine, token_at

PROMPT = [1, 2, 3, 4]
MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "quickstart-moe"
"""Its tokenizer has one ID per ASCII character, and special tokens below 10."""


class Rig:
    """A front, its fake engines and an HTTP client."""

    def __init__(self, engines: list[HttpEngine], urls: list[str], fleet: Fleet, client: TestClient) -> None:
        self.engines, self.urls, self.fleet, self.client = engines, urls, fleet, client

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, **kwargs) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    engines: int = 1,
    *,
    token: str | None = None,
    admin_token: str | None = None,
    identity: Identity = ANONYMOUS,
    allowed: Sequence[str] = ("127.0.0.1",),
    limits: FrontLimits | None = None,
    interruption: FleetInterruption = "abort",
    queue_seconds: float = 10.0,
    model_path: Path | None = MODEL,
) -> AsyncIterator[Rig]:
    fakes = [HttpEngine() for _ in range(engines)]
    urls = [await e.start() for e in fakes]
    async with make_session() as session:
        fleet = Fleet(
            urls,
            session,
            strategy="prefix_affinity",
            interruption=interruption,
            queue_seconds=queue_seconds,
            vocab_size=100,
            model_path=model_path,
            allowed=allowed,
            identity=identity,
        )
        app = Front(fleet, token, limits or FrontLimits(), admin_token).app()
        watch = asyncio.create_task(fleet.watch())
        async with TestClient(TestServer(app)) as client:
            rig = Rig(fakes, urls, fleet, client)
            await rig.until(lambda: fleet.limits is not None or not engines)
            yield rig
        watch.cancel()
    for engine in fakes:
        engine.release.set()
        await engine.stop()


def expected_ids(n: int, prompt_length: int = len(PROMPT)) -> list[int]:
    return [token_at(prompt_length + i - 1) for i in range(n)]


def generate(n: int = 8, **more: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": n, "sampling_seed": 3}, **more}


def parse(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(e[6:]) for e in text.split("\n\n")[:-2]]
