"""One SGLang server as an asyncio object. Speaks SGLang's own HTTP API; knows nothing of samples or policies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from rlsys.engine.chunks import Refused, decode_chunk, read_chunk, read_routes
from rlsys.engine.sse import events
from rlsys.engine.weight_calls import load_from_disk
from rlsys.errors import RunError
from rlsys.identity import NOBODY, Identity
from rlsys.route_records import ASK
from rlsys.types import Segment, Truncation

# Servers close idle connections after a few seconds; reusing one just then fails. Ours give up earlier.
KEEPALIVE_SECONDS = 1.5
IDLE_SECONDS = 30.0
RESERVED_TOKENS = 6
"""SGLang refuses a prompt that leaves fewer tokens than this of what it can hold (the context, or its KV pool)."""
_JSON = {"Content-Type": "application/json"}
_VERSION_DIGITS = 18
_GENERATED = "sglang:generation_tokens_total"

DeadEngine = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What aiohttp raises when the server is gone or does not answer."""


NobodyListens = aiohttp.ClientConnectorError
"""The surest sign of death, of those: no process has the port."""


_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""What this machine lacks, not the server."""
_BAD_ANSWER = 502
_NO_KEY = (401, 403)
_UNKNOWN = -1
"""Version of weights that are nobody's, or of another run."""


class EngineError(Exception):
    """The server answered, with a refusal. `status`: the HTTP status, 500 and above when it is the server's fault."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Limits(NamedTuple):
    """Seconds that an answer may take; a run derives them (Config.answer_seconds, Config.work_seconds)."""

    answer: float = 60.0
    """Where the request only waits for its turn."""
    work: float = 600.0
    """Where it goes over all weights, or is the first pass with new ones, which may compile."""


UNPLANNED = Limits()
"""For engines of which no config tells how large their model is."""


class Stranger(EngineError):
    """Whoever answers there is no engine of this run."""


class Aborted(Exception):
    """The request came back unfinished because somebody asked for it."""


def make_session() -> aiohttp.ClientSession:
    """One session for all engines of a process; without a limit of its own on connections."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
        json_serialize=_body,
    )


class EngineClient:
    """Raises EngineError for a refusal and one of `DeadEngine` when nobody answers."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        tp: int = 1,
        index: int | None = None,
        identity: Identity = NOBODY,
        limits: Limits = UNPLANNED,
    ) -> None:
        """`index`: its number in the run's layout, if it is there. `identity`: whose it must be."""
        self.url = url.rstrip("/")
        self.tp = tp
        self.index = index
        self.identity = identity
        self._session = session
        self._limits = limits

    async def generate(
        self,
        ids: list[int],
        *,
        rid: str,
        max_new_tokens: int,
        temperature: float,
        seed: int | None,
        stop_ids: Sequence[int],
        routes_from: int | None = None,
        cache_key: str | None = None,
        truncation: Truncation | None = None,
        stop_texts: Sequence[str] = (),
    ) -> AsyncGenerator[Segment, None]:
        """Segments as they come; only the last one has `finish` set, and routes if they are asked for.

        `routes_from`: the first position whose routed experts are wanted. What precedes the last token of `ids` has
        been read before, and a new pass over it may have chosen others. `cache_key`: requests share cached prefixes
        only with those of the same key. `truncation`: each token's `mu` is then its log-prob among the ids that
        sampling kept, which segments name. `stop_texts`: looked for in what this request makes, so not across its
        beginning.

        `rid` must not be in use on this server, nor be the beginning of one that is. Every segment's tokens are
        new ones (incremental streaming). When the last one has `prompt_tokens` 0, the server dropped the request
        from its queue and did not count its tokens in `generated_tokens`. Raises one of `DeadEngine` also when
        the stream ends without a finish.
        """
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "skip_special_tokens": False,
            "stop_token_ids": list(stop_ids),
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
        if routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
            sampling["custom_params"] = {ASK: True}
        if cache_key is not None:
            body["extra_key"] = cache_key
        if stop_texts:
            sampling["stop"] = list(stop_texts)
        if truncation is not None:
            sampling |= truncation._asdict()
            body["return_sampling_mask"] = True
        async with self._request("POST", "/generate", json=body) as answer:
            if answer.status != 200:
                text = (await answer.text())[:300]
                raise EngineError(f"{self.url}/generate: {answer.status} {text}", answer.status)
            received = 0
            async for event in events(answer.content.iter_any()):
                if event.startswith(b"data: ") and not event.startswith(b"data: [DONE]"):
                    with self._understanding("/generate"):
                        chunk = decode_chunk(memoryview(event)[6:])
                        segment = read_chunk(chunk, received, self._version_of, truncation is not None)
                        received += len(segment.ids)
                        # One that never ends would hold up an interrupt for ever.
                        if received > max_new_tokens:
                            raise ValueError(f"{received} tokens where {max_new_tokens} were asked for")
                        if routes_from is not None and segment.prompt_tokens and chunk.meta_info is not None:
                            segment.routes = read_routes(chunk.meta_info, len(ids), received, routes_from)
                    yield segment
                    if segment.finish is not None:
                        return
            raise aiohttp.ClientPayloadError(f"{self.url}/generate: ended in the middle of {rid}")

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all. Its `generate` ends with finish "abort" and all tokens so far.

        An abort that comes before its request is registered is silently lost: the caller repeats it.
        """
        await self._post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause_generation(self, mode: str) -> None:
        """Make no more tokens, but keep the requests: "retract" frees their KV cache (it is computed again when they
        go on), "in_place" keeps it. New requests wait. Control requests are answered.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Harmless when it was not paused."""
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def begin_weight_update(self) -> None:
        """From now on it takes tensors. An update that was begun and never ended (its trainer died) is ended."""
        try:
            await self._post("/begin_weight_update", {})
        except EngineError:
            await self.end_weight_update()
            await self._post("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """The engine may put all tensors into another layout now."""
        await self._post("/end_weight_update", {}, self._limits.work)

    async def release_memory(self) -> None:
        """Give back the memory of weights and cache, whose contents are lost; nothing may run. Not twice."""
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, self._limits.work)

    async def resume_memory(self, of: Literal["weights", "kv_cache"]) -> None:
        """Take back what `release_memory` gave; a scheduler that did not give it dies of this."""
        await self._post("/resume_memory_occupation", {"tags": [of]}, self._limits.work)

    async def set_weight_version(self, version: int | str) -> None:
        """A word instead of a number marks a server whose weights are nobody's."""
        label = self.identity.label(version)
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def checksums(self) -> list[dict[str, str]]:
        """Of each tensor-parallel rank: its name of a tensor -> a hash of the bytes that it holds."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, self._limits.work)
        with self._understanding("/weights_checker"):
            return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def update_weights_from_disk(self, folder: str, version: int) -> None:
        """Load a safetensors folder that it can read. When it cannot: EngineError, and its old weights stay."""
        call = load_from_disk(folder, self.identity.label(version))
        await self._post(call.path, call.body, self._limits.work)

    async def info(self) -> dict[str, Any]:
        """What it says of itself: `model_path`, `max_req_input_len`, ..."""
        info = _parse(await self._get("/server_info"))
        return info if isinstance(info, dict) else {}

    async def tokenize(self, text: str) -> list[int]:
        """As its own `/generate` does."""
        answer = await self._post("/tokenize", {"model": "", "prompt": text})
        with self._understanding("/tokenize"):
            tokens: list[int] = list(answer["tokens"])
        return tokens

    def open(self, path: str, body: bytes) -> Any:
        """POST a JSON body as it is; a context manager of aiohttp's response."""
        headers = {**_JSON, **self.identity.headers(path)}
        return self._session.post(self.url + path, data=body, headers=headers, allow_redirects=False)

    async def fetch(self, path: str) -> tuple[int, bytes]:
        """GET, with whatever status."""
        async with self._request("GET", path, timeout=self._timeout()) as answer:
            return answer.status, await answer.read()

    async def flush(self, *, paused: bool = False) -> None:
        """Empty the prefix cache, once nothing runs. EngineError when something still does after IDLE_SECONDS.

        A paused one with retracted requests never counts as idle, but may be flushed at once.
        """
        await self._post(f"/flush_cache?timeout={0 if paused else IDLE_SECONDS}", {})

    async def slow_down(self, seconds: float | None) -> None:
        """Sleep before every forward pass (SGLang's own switch, for tests and benches)."""
        await self._post("/slow_down", {"forward_sleep_time": seconds})

    async def healthy(self) -> bool:
        """Whether it answers within two seconds, as an engine of its owner."""
        try:
            async with asyncio.timeout(2):
                async with self._request("GET", "/health") as answer:
                    if answer.status != 200:
                        return False
                if self.identity.owner:
                    await self.weight_label()
                return True
        except (*DeadEngine, EngineError):
            return False

    async def weight_version(self) -> int:
        """The version that the server reports. -1 when it is not a number: never pushed to."""
        return _version(await self.weight_label())

    async def weight_label(self) -> str:
        """The version that the server reports, without its owner. EngineError when it reports none: no SGLang server.

        Raises Stranger for weights of another run, and for a server that this run's key does not open.
        """
        info = _parse(await self._get("/model_info"))
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(
                f"{self.url} answers, but is no SGLang server: its /model_info has no weight_version"
            )
        return self._own(str(info["weight_version"]))

    def _own(self, label: str) -> str:
        """A label without its owner. Raises Stranger when that is somebody else."""
        if (what := self.identity.what(label)) is None:
            raise Stranger(
                f"{self.url} is no engine of this run: it calls its weights {label[:100]!r}", _BAD_ANSWER
            )
        return what

    async def generated_tokens(self) -> int:
        """Tokens of all requests that ended since its start, aborted ones included (its own Prometheus counter)."""
        lines = (await self._get("/metrics")).splitlines()
        with self._understanding("/metrics"):
            return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_GENERATED)))

    async def token_logprobs(self, ids: list[int], rid: str | None = None) -> list[float]:
        """Log-probs of `ids[1:]`, each given what precedes it: `[len(ids) - 1]`. Generates one further token.

        `rid`: as in `generate`; raises Aborted when it was aborted, and then no token was made.
        """
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
        body = body if rid is None else {**body, "rid": rid}
        answer = await self._post("/generate", body, self._limits.work)
        with self._understanding("/generate"):
            meta = answer["meta_info"]
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                raise Aborted(f"{self.url}/generate: {rid} was aborted")
            self._own(str(meta.get("weight_version")))
            found = [float(entry[0]) for entry in meta["input_token_logprobs"][1:]]
            if len(found) != len(ids) - 1:
                raise ValueError(f"{len(found)} log-probs of {len(ids) - 1} tokens")
            return found

    @contextmanager
    def _understanding(self, path: str) -> Iterator[None]:
        """An answer of another form than SGLang's is this server's fault, and nobody else's."""
        try:
            yield
        except Refused as e:
            raise EngineError(f"{self.url}{path}: {e}", e.status) from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise EngineError(f"{self.url}{path}: not an answer of SGLang: {e!r:.200}", _BAD_ANSWER) from None

    def _version_of(self, label: str) -> int:
        """Of weights that made tokens; of another run's, none that anybody has pushed."""
        what = self.identity.what(label)
        return _UNKNOWN if what is None else _version(what)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **what: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer, whatever its status. A redirect is one: nobody is led elsewhere.

        Raises one of DeadEngine when nobody answers, EngineError for an answer that is no HTTP or no text, and
        RunError when this process is out of what a connection takes: no server is to blame for that.
        """
        if headers := self.identity.headers(path):
            what["headers"] = headers
        try:
            async with self._session.request(
                method, self.url + path, allow_redirects=False, **what
            ) as answer:
                if answer.status in _NO_KEY and self.identity.owner:
                    raise Stranger(
                        f"{self.url} is no engine of this run: {path} answers {answer.status} to its key",
                        _BAD_ANSWER,
                    )
                yield answer
        except DeadEngine as e:
            if isinstance(e, OSError) and e.errno in _LOCAL_ERRNOS:
                raise RunError(
                    f"no connection to {self.url}: {os.strerror(e.errno)} on this machine"
                ) from None
            raise
        except (aiohttp.ClientError, UnicodeError) as e:
            raise EngineError(f"{self.url}{path}: no server of ours: {e!r:.200}", _BAD_ANSWER) from None

    async def _get(self, path: str) -> str:
        async with self._request("GET", path, timeout=self._timeout()) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise EngineError(f"{self.url}{path}: {answer.status} {text[:300]}", answer.status)
        return text

    def _timeout(self, seconds: float | None = None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self._limits.answer if seconds is None else seconds)

    async def _post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        """`seconds`: what the answer may take; the limit of those that only wait for their turn."""
        async with self._request("POST", path, json=body, timeout=self._timeout(seconds)) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise EngineError(f"{self.url}{path}: {answer.status} {text[:300]}", answer.status)
        data = _parse(text)
        if isinstance(data, dict) and data.get("success") is False:
            raise EngineError(f"{self.url}{path}: {data.get('message')}")
        return data


def _body(body: Any) -> str:
    """Faster than the standard library's: a resumed prompt has thousands of ids."""
    return msgspec.json.encode(body).decode()


def _parse(text: str) -> Any:
    """JSON, or None: some endpoints answer with nothing or in plain words."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _version(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else _UNKNOWN
