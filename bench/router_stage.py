"""Servers behind the routers of bench/router.py: one that answers at once, and engines that hold their requests.

python bench/router_stage.py --instant --port P     serve until the process is ended
python bench/router_stage.py --held N               hold N samples in `rlsys.router`; prints JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import psutil
from aiohttp import web

from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, Segment, Status
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router

PROMPT = 32
"""Tokens of a prompt."""
VOCAB = 128
FIRST, ALL = 16, 64
"""Numbers of tokens that a held sample gets at once, and in total."""
ENGINES, GROUP_SIZE = 4, 8


# A server that answers at once


async def serve_instantly(port: int) -> None:
    """Serve SGLang's /generate, and the requests that a router makes to a new engine. A stream has one event."""

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        n = body["sampling_params"]["max_new_tokens"]
        finish = {"type": "length", "length": n}
        meta = {"finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": n}
        meta |= {"weight_version": "0", "output_token_logprobs": [[-0.5, 5, None]] * n}
        answer = {"text": "", "output_ids": [5] * n, "meta_info": meta}
        if not body.get("stream"):
            return web.json_response(answer)
        events = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    def fixed(value: dict[str, Any]) -> Any:
        async def handle(_: web.Request) -> web.Response:
            return web.json_response(value)

        return handle

    app = web.Application()
    app.router.add_post("/generate", generate)
    info = {"model_path": "none", "weight_version": "0", "max_req_input_len": 1000}
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        app.router.add_get(path, fixed(info))
    app.router.add_get("/health", fixed({}))
    app.router.add_get("/v1/models", fixed({"object": "list", "data": [{"id": "none", "object": "model"}]}))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


# Engines that hold their requests


class HeldEngine(EngineClient):
    """An engine in this process that holds its requests.

    A request gets FIRST tokens at once, and the others when `finish` is called; `abort` ends it with one more token.
    """

    def __init__(self, url: str, session: Any) -> None:
        super().__init__(url, session)
        self._held: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._version = 0

    async def generate(
        self, ids: list[int], *, max_new_tokens: int, **_: Any
    ) -> AsyncGenerator[Segment, None]:
        future, first = self._held, min(FIRST, max_new_tokens)
        yield self._held_segment(first, None, 0)
        reason = await future
        last = 1 if reason == "abort" else max_new_tokens - first
        yield self._held_segment(last, reason, len(ids))

    def _held_segment(self, n: int, reason: str | None, prompt: int) -> Segment:
        return Segment([5] * n, [-0.5] * n, [VersionSpan(self._version, 0, n)], reason, 0, prompt)

    def finish(self, reason: str = "length") -> None:
        """End all held requests with this finish reason."""
        future, self._held = self._held, asyncio.get_running_loop().create_future()
        future.set_result(reason)

    async def abort(self, rid: str | None) -> None:
        self.finish("abort")

    async def weight_label(self) -> str:
        return str(self._version)

    async def set_weight_version(self, version: int | str) -> None:
        self._version = int(version)

    async def generated_tokens(self) -> int:
        return 0

    async def flush(self, *, paused: bool = False) -> None: ...

    async def begin_weight_update(self) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def continue_generation(self) -> None: ...


async def hold(samples: int) -> dict[str, float]:
    """Start samples on ENGINES engines, interrupt and resume them, and let them end.

    Args:
        samples: number of samples.

    Returns:
        seconds to start, interrupt and resume all samples, and the memory per sample in flight and parked, in KiB,
        when each has PROMPT + FIRST tokens.
    """
    async with make_session() as session:
        engines = [HeldEngine(f"http://engine{i}:1", session) for i in range(ENGINES)]
        router = Router(
            list(engines), vocab_size=VOCAB, context_length=4096, stop_ids=[], bounds=Bounds(1.0, 1.0)
        )
        await router.begin_push(1)
        await router.end_push(1, [])
        router.resume()
        memory = psutil.Process().memory_info
        bytes_before = memory().rss
        seconds: dict[str, float] = {}
        held = [Sample(i, i // GROUP_SIZE, i % GROUP_SIZE, [5] * PROMPT, seed=i + 1) for i in range(samples)]
        start = time.monotonic()
        tasks = [
            asyncio.create_task(router.generate(s, max_response_tokens=ALL, temperature=1.0)) for s in held
        ]
        await _until_received(router, FIRST * samples)
        seconds["start_s"], bytes_in_flight = time.monotonic() - start, memory().rss
        start = time.monotonic()
        await router.interrupt()
        seconds["interrupt_s"], bytes_parked = time.monotonic() - start, memory().rss
        assert all(s.status is Status.PARKED for s in held)
        start = time.monotonic()
        router.resume()
        await _until_received(router, (2 * FIRST + 1) * samples)
        seconds["resume_s"] = time.monotonic() - start
        for engine in engines:
            engine.finish()
        await asyncio.gather(*tasks)
    assert all(len(s.response_ids) == ALL and s.resumes == 1 for s in held)
    kib = {
        "kib_per_sample_in_flight": (bytes_in_flight - bytes_before) / samples / 1024,
        "kib_per_sample_parked": (bytes_parked - bytes_before) / samples / 1024,
    }
    return {"samples": samples, **seconds, **kib}


async def _until_received(router: Router, tokens: int) -> None:
    """Wait until the router has received this number of tokens."""
    while router.stats()["received_tokens"] < tokens:
        await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instant", action="store_true", help="serve /generate, and answer at once")
    parser.add_argument("--port", type=int, default=0, help="port of --instant")
    parser.add_argument("--held", type=int, metavar="N", help="hold N samples")
    args = parser.parse_args()
    if args.instant:
        asyncio.run(serve_instantly(args.port))
    else:
        print(json.dumps(asyncio.run(hold(args.held))))


if __name__ == "__main__":
    main()
