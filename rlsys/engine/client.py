"""One SGLang server as an asyncio object. Speaks SGLang's own HTTP API; knows nothing of samples or policies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from rlsys.types import Segment, VersionSpan

# Servers close idle connections after a few seconds; reusing one just then fails. Ours give up earlier.
KEEPALIVE_SECONDS = 1.5
CONTROL_TIMEOUT = 60.0
_GENERATED = "sglang:generation_tokens_total"

DeadEngine = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What aiohttp raises when the server is gone or does not answer."""


class EngineError(Exception):
    """The server answered, with a refusal."""


def make_session() -> aiohttp.ClientSession:
    """One session for all engines of a process; without a limit of its own on connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )


class EngineClient:
    """Raises EngineError for a refusal and one of `DeadEngine` when nobody answers."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, tp: int = 1) -> None:
        self.url = url.rstrip("/")
        self.tp = tp
        self._session = session

    async def generate(
        self, ids: list[int], *, rid: str, max_new_tokens: int, temperature: float, seed: int | None
    ) -> AsyncIterator[Segment]:
        """Segments as they come; only the last one has `finish` set.

        `rid` must not be in use on this server. Every segment's tokens are new ones (incremental streaming).
        """
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "skip_special_tokens": False,
        }
        if seed is not None:
            sampling["sampling_seed"] = seed
        body = {
            "input_ids": ids,
            "rid": rid,
            "stream": True,
            "return_logprob": True,
            "sampling_params": sampling,
        }
        async with self._session.post(f"{self.url}/generate", json=body) as answer:
            if answer.status != 200:
                raise EngineError(f"{self.url}/generate: {answer.status} {(await answer.text())[:300]}")
            async for line in answer.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield _segment(json.loads(line[6:]), self.url)

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all. Its `generate` ends with finish "abort" and all tokens so far.

        An abort that comes before its request is registered is silently lost: the caller repeats it.
        """
        await self._post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def begin_weight_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def set_weight_version(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def flush(self) -> None:
        """Empty the prefix cache. Refused while requests run."""
        await self._post("/flush_cache", {})

    async def slow_down(self, seconds: float | None) -> None:
        """Sleep before every forward pass (SGLang's own switch, for tests and benches)."""
        await self._post("/slow_down", {"forward_sleep_time": seconds})

    async def healthy(self) -> bool:
        """Whether it answers at all, within two seconds."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(2)) as answer:
                return answer.status == 200
        except DeadEngine:
            return False

    async def weight_version(self) -> int:
        """The version that the server reports. -1 when it is not a number: never pushed to."""
        async with self._session.get(f"{self.url}/model_info", timeout=_control()) as answer:
            text = str((await answer.json()).get("weight_version"))
        return int(text) if text.isdecimal() else -1

    async def generated_tokens(self) -> int:
        """Tokens generated since its start, aborted requests included (its own Prometheus counter)."""
        async with self._session.get(f"{self.url}/metrics", timeout=_control()) as answer:
            lines = (await answer.text()).splitlines()
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_GENERATED)))

    async def token_logprobs(self, ids: list[int]) -> list[float]:
        """Log-probs of `ids[1:]`, each given what precedes it: `[len(ids) - 1]`. Generates one further token."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
        answer = await self._post("/generate", body)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(self.url + path, json=body, timeout=_control()) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise EngineError(f"{self.url}{path}: {answer.status} {text[:300]}")
        try:
            data = json.loads(text) if text else None
        except ValueError:
            return text  # some endpoints answer in plain words
        if isinstance(data, dict) and data.get("success") is False:
            raise EngineError(f"{self.url}{path}: {data.get('message')}")
        return data


def _control() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=CONTROL_TIMEOUT)


def _segment(chunk: dict[str, Any], url: str) -> Segment:
    if "meta_info" not in chunk:
        raise EngineError(f"{url}/generate: {chunk.get('error', chunk)}")
    meta = chunk["meta_info"]
    reason = meta.get("finish_reason")
    if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
        raise EngineError(f"{url}/generate: {reason['status_code']} {reason.get('message')}")
    ids = chunk["output_ids"]
    return Segment(
        ids=ids,
        mu=[entry[0] for entry in meta.get("output_token_logprobs") or []],
        spans=[VersionSpan(int(meta["weight_version"]), 0, len(ids))],
        finish=reason["type"] if reason else None,
        cached_tokens=meta.get("cached_tokens") or 0,
        prompt_tokens=meta.get("prompt_tokens") or 0,
    )
