"""A fake SGLang server on a TCP socket of this process, for tests of the bytes that the front forwards.

A token is a function of its position, so that a response does not depend on its division into requests.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

CONTEXT = 200
"""Maximal number of tokens of prompt and response."""


def token_at(position: int) -> int:
    return (position + 1) % 100


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


class HttpEngine:
    """A fake engine that records its requests."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Path and body of each generation request."""
        self.raw_bodies: list[bytes] = []
        self.hold_at: int | None = None
        """Number of output tokens after which a request waits for `release`; None: requests do not wait."""
        self.release = asyncio.Event()
        self.aborts = 0
        self.fail_with: int | None = None
        """Status of all generation requests; None: they succeed."""
        self.loads: list[str] = []
        """Folders of loaded weights."""
        self.calls: list[str] = []
        """Names of calls that change the state of the server, in order."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.keys: dict[str, set[str]] = {}
        """Path -> Authorization headers of the requests."""
        self.secrets: dict[str, str] = {}
        """Secret fields of /server_info."""
        self._server: TestServer | None = None

    async def start(self) -> str:
        @web.middleware
        async def record_key(request: web.Request, handler: Any) -> web.StreamResponse:
            self.keys.setdefault(request.path, set()).add(request.headers.get("Authorization", ""))
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[record_key])
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._load)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        for path in ("/flush_cache", "/pause_generation", "/continue_generation"):
            app.router.add_post(path, self._accept)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        self._server = TestServer(app)
        await self._server.start_server()
        return str(self._server.make_url("")).rstrip("/")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def _accept(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.strip("/"))
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "nowhere",
                "max_req_input_len": 194,
                "incremental_streaming_output": True,
                **self.secrets,
            }
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": list(range(len((await request.json())["prompt"])))})

    async def _abort(self, _: web.Request) -> web.Response:
        self.aborts += 1
        self.release.set()
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        self.calls.append("update_weights_from_disk")
        body = await request.json()
        if body["model_path"] == "bad":
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        self.loads.append(body["model_path"])
        await self.may_load.wait()
        self.version = int(body["weight_version"])
        return web.json_response({"success": True, "message": ""})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.raw_bodies.append(await request.read())
        body = json.loads(self.raw_bodies[-1])
        self.requests.append((request.path, body))
        if self.fail_with is not None:
            return web.json_response({"error": {"message": "broken"}}, status=self.fail_with)
        prompt = body.get("input_ids") or list(range(len(body.get("text", "four"))))
        params = body.get("sampling_params") or {}
        budget = (params[0] if isinstance(params, list) else params).get("max_new_tokens")
        budget = min(budget or body.get("max_tokens") or 8, CONTEXT - len(prompt))
        aborts, output_ids = self.aborts, list[int]()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body.get("stream"):
            await response.prepare(request)
        reason: str | None = None
        while reason is None:
            if self.hold_at is not None and len(output_ids) >= self.hold_at:
                await self.release.wait()
            output_ids.append(token_at(len(prompt) + len(output_ids) - 1))
            aborted = self.aborts != aborts
            reason = "abort" if aborted else "length" if len(output_ids) == budget else None
            if body.get("stream"):
                chunk = self._answer(request.path, prompt, output_ids, reason, only_last=True)
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if not body.get("stream"):
            return web.json_response(self._answer(request.path, prompt, output_ids, reason))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(
        self, path: str, prompt: list[int], output_ids: list[int], reason: str | None, only_last: bool = False
    ) -> dict[str, Any]:
        ids = output_ids[-1:] if only_last else output_ids
        if path != "/generate":
            content = (
                {"text": letters(ids)} if path == "/v1/completions" else {"delta": {"content": letters(ids)}}
            )
            return {"id": "x", "choices": [{"index": 0, **content, "finish_reason": reason}]}
        meta = {
            "id": f"id{len(self.requests)}",
            "finish_reason": {"type": reason} if reason else None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output_ids),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-i / 8, i, None] for i in ids],
        }
        return {"text": letters(ids), "output_ids": ids, "meta_info": meta}
