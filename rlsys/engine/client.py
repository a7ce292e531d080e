"""One SGLang server as an asyncio object. Speaks SGLang's own HTTP API; knows nothing of samples or policies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rlsys.config.rollout import Truncation
from rlsys.core.identity import ANONYMOUS, Identity
from rlsys.core.types import Segment
from rlsys.engine.chunks import check_log_probs, decode_chunk, read_chunk, read_routes
from rlsys.engine.hooks.peer_weights import GIVE, TAKE
from rlsys.engine.sse import events
from rlsys.engine.weight_calls import load_by, load_from_disk
from rlsys.engine.wire import BAD_ANSWER, UNPLANNED, DeadEngine, EngineError, Limits, Stranger, Wire, parse
from rlsys.segments.route_records import ROUTES_PARAM

IDLE_SECONDS = 30.0
_VERSION_DIGITS = 18
_GENERATED = "sglang:generation_tokens_total"

_STREAMED = {"stream": True, "return_logprob": True}
_UNKNOWN = -1
"""Version of weights that are nobody's, or of another run."""


class Aborted(Exception):
    """The request came back unfinished because somebody asked for it."""


class EngineClient(Wire):
    """Raises EngineError for a refusal and one of `DeadEngine` when nobody answers."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        tp: int = 1,
        index: int | None = None,
        identity: Identity = ANONYMOUS,
        limits: Limits = UNPLANNED,
        adapter: str | None = None,
        pool: str | None = None,
    ) -> None:
        """`index`: its number in the run's layout, if it is there; else `pool`, of engine.pools the one that it has
        joined. `identity`: whose it must be. `adapter`: which of its adapters answers; None: its model alone."""
        super().__init__(url, session, identity, limits)
        self.tp = tp
        self.index = index
        self.pool = pool
        self._adapter = {} if adapter is None else {"lora_path": adapter}

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
        tops: int = 0,
        sampling: Mapping[str, object] = MappingProxyType({}),
        store_routes: bool = True,
    ) -> AsyncGenerator[Segment, None]:
        """Segments of new tokens as they come; the last one alone has `finish`, and routes if they are asked for.

        `routes_from`: the first position whose routed experts are wanted. What precedes the last token of `ids` has
        been read before, and a new pass over it may have chosen others. `cache_key`: requests share cached prefixes
        only with those of the same key. `truncation`: each token's `mu` is then its log-prob among the ids that
        sampling kept, which segments name. `stop_texts`: looked for in what this request makes, so not across its
        beginning. `tops`: so many of the most probable ids in the place of each token are told as well. `sampling`:
        further parameters, by SGLang's names. `store_routes`: an engine of a run may write the routes to a file.

        `rid` must not be in use on this server, nor be the beginning of one that is. When the last segment has
        `prompt_tokens` 0, the server dropped the request from its queue and did not count its tokens in
        `generated_tokens`. Raises one of `DeadEngine` also when the stream ends without a finish.
        """
        params: dict[str, Any] = {**sampling, "max_new_tokens": max_new_tokens, "temperature": temperature}
        params |= {"skip_special_tokens": False, "stop_token_ids": list(stop_ids)}
        if seed is not None:
            params["sampling_seed"] = seed
        body = {"input_ids": ids, "rid": rid, "sampling_params": params, **_STREAMED, **self._adapter}
        if routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
            if store_routes:
                params["custom_params"] = {ROUTES_PARAM: True}
        if cache_key is not None:
            body["extra_key"] = cache_key
        if tops:
            body["top_logprobs_num"] = tops
        if stop_texts:
            params["stop"] = list(stop_texts)
        if truncation is not None:
            params |= truncation._asdict()
            body["return_sampling_mask"] = True
        async with self.request("POST", "/generate", json=body) as answer:
            if answer.status != 200:
                text = (await answer.text())[:300]
                raise EngineError(f"{self.url}/generate: {answer.status} {text}", answer.status)
            received = 0
            async for event in events(answer.content.iter_any()):
                if event.startswith(b"data: ") and not event.startswith(b"data: [DONE]"):
                    segment = self._segment(event, truncation is not None, received, len(ids), routes_from)
                    received += len(segment.ids)
                    if received > max_new_tokens:  # one that never ends would hold up an interrupt for ever
                        more = f"{received} tokens where {max_new_tokens} were asked for"
                        raise EngineError(f"{self.url}/generate: not an answer of SGLang: {more}", BAD_ANSWER)
                    yield segment
                    if segment.finish is not None:
                        return
            raise aiohttp.ClientPayloadError(f"{self.url}/generate: ended in the middle of {rid}")

    def _segment(
        self, event: bytes, truncated: bool, received: int, prompt: int, routes_from: int | None
    ) -> Segment:
        """An event of the stream. `prompt`, `received`: tokens sent, and those of the events before this one."""
        with self.understanding("/generate"):
            chunk = decode_chunk(memoryview(event)[6:])
            segment = read_chunk(chunk, received, self._version_of, truncated)
            if routes_from is not None and segment.prompt_tokens and chunk.meta_info is not None:
                tokens = received + len(segment.ids)
                segment.routes = read_routes(chunk.meta_info, prompt, tokens, routes_from)
        return segment

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all. Its `generate` ends with finish "abort" and all tokens so far.

        An abort that comes before its request is registered is silently lost: the caller repeats it.
        """
        await self.post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause_generation(self, mode: str) -> None:
        """Make no more tokens, but keep the requests: "retract" frees their KV cache (it is computed again when they
        go on), "in_place" keeps it. New requests wait. Control requests are answered.
        """
        await self.post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Harmless when it was not paused."""
        await self.post("/continue_generation", {"torch_empty_cache": False})

    async def begin_weight_update(self) -> None:
        """From now on it takes tensors, of whoever knows this update's `epoch`. An update that was begun and never
        ended (its trainer died) is ended."""
        self.epoch = time.time_ns()  # those of another process, before this one, are smaller
        try:
            await self.post("/begin_weight_update", {})
        except EngineError:
            await self.end_weight_update()
            await self.post("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """The engine may put all tensors into another layout now."""
        await self.post("/end_weight_update", {}, self.limits.work)

    async def release_memory(self) -> None:
        """Give back the memory of weights, cache and CUDA graphs, while nothing runs; the first two lose what they
        hold. Not twice."""
        tags = {"tags": ["kv_cache", "weights", "cuda_graph"]}
        await self.post("/release_memory_occupation", tags, self.limits.work)

    async def resume_memory(self, of: Literal["weights", "kv_cache"]) -> None:
        """Take back what `release_memory` gave, CUDA graphs with the cache; a scheduler that did not give it dies of
        this."""
        tags = {"tags": [of] if of == "weights" else [of, "cuda_graph"]}
        await self.post("/resume_memory_occupation", tags, self.limits.work)

    async def set_weight_version(self, version: int | str) -> None:
        """A word instead of a number marks a server whose weights are nobody's."""
        label = self.identity.label(version)
        await self.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def checksums(self) -> list[dict[str, str]]:
        """Of each tensor-parallel rank: its name of a tensor -> a hash of the bytes that it holds."""
        answer = await self.post("/weights_checker", {"action": "checksum"}, self.limits.work)
        with self.understanding("/weights_checker"):
            return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def update_weights_from_disk(self, folder: str, version: int) -> None:
        """Load a safetensors folder that it can read. When it cannot: EngineError, and its old weights stay."""
        call = load_from_disk(folder, self.identity.label(version))
        await self.post(call.path, call.body, self.limits.work)

    async def give_weights(self) -> None:
        """Between begin and end of an update: write them for another engine (rlsys.engine.hooks.peer_weights)."""
        await self._pass_weights(GIVE)

    async def take_weights(self) -> None:
        """The other side."""
        await self._pass_weights(TAKE)

    async def _pass_weights(self, loader: str) -> None:
        call = load_by(loader, self.tp)
        await self.post(call.path, call.body, self.limits.work)

    async def info(self) -> dict[str, Any]:
        """What it says of itself: `model_path`, `max_req_input_len`, ..."""
        info = parse(await self.get("/server_info"))
        return info if isinstance(info, dict) else {}

    async def tokenize(self, text: str) -> list[int]:
        """As its own `/generate` does."""
        answer = await self.post("/tokenize", {"model": "", "prompt": text})
        with self.understanding("/tokenize"):
            tokens: list[int] = list(answer["tokens"])
        return tokens

    async def flush(self, *, paused: bool = False) -> None:
        """Empty the prefix cache, once nothing runs. EngineError when something still does after IDLE_SECONDS.

        A paused one with retracted requests never counts as idle, but may be flushed at once.
        """
        await self.post(f"/flush_cache?timeout={0 if paused else IDLE_SECONDS}", {})

    async def slow_down(self, seconds: float | None) -> None:
        """Sleep before every forward pass (SGLang's own switch, for tests and benches)."""
        await self.post("/slow_down", {"forward_sleep_time": seconds})

    async def healthy(self) -> bool:
        """Whether it answers within two seconds, as an engine of its owner."""
        try:
            async with asyncio.timeout(2):
                async with self.request("GET", "/health") as answer:
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
        info = parse(await self.get("/model_info"))
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(
                f"{self.url} answers, but is no SGLang server: its /model_info has no weight_version"
            )
        return self._own(str(info["weight_version"]))

    def _own(self, label: str) -> str:
        """A label without its owner. Raises Stranger when that is somebody else."""
        if (what := self.identity.parse_label(label)) is None:
            raise Stranger(
                f"{self.url} is no engine of this run: it calls its weights {label[:100]!r}", BAD_ANSWER
            )
        return what

    async def generated_tokens(self) -> int:
        """Tokens of all requests that ended since its start, aborted ones included (its own Prometheus counter)."""
        lines = (await self.get("/metrics")).splitlines()
        with self.understanding("/metrics"):
            return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_GENERATED)))

    async def token_logprobs(self, ids: list[int], rid: str | None = None) -> list[float]:
        """Log-probs of `ids[1:]`, each given what precedes it: `[len(ids) - 1]`. Generates one further token.

        `rid`: as in `generate`; raises Aborted when it was aborted, and then no token was made. Without it nobody
        here can have aborted it: EngineError.
        """
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
        body |= self._adapter if rid is None else {**self._adapter, "rid": rid}
        answer = await self.post("/generate", body, self.limits.work)
        with self.understanding("/generate"):
            meta = answer["meta_info"]
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                if rid is None:
                    raise EngineError(
                        f"{self.url}/generate: somebody has aborted all its requests", BAD_ANSWER
                    )
                raise Aborted(f"{self.url}/generate: {rid} was aborted")
            self._own(str(meta.get("weight_version")))
            found, _ = check_log_probs(float(entry[0]) for entry in meta["input_token_logprobs"][1:])
            if len(found) != len(ids) - 1:
                raise ValueError(f"{len(found)} log-probs of {len(ids) - 1} tokens")
            return found

    async def most_probable(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], top_k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The `top_k` most probable ids in the place of each response token, and their log-probs at temperature 1:
        `[len(response_ids), top_k]` both.

        SGLang divides the logits of what it is given by no temperature (0.5.23).
        """
        body = {
            "input_ids": [*prompt_ids, *response_ids], "return_logprob": True, "top_logprobs_num": top_k,
            "logprob_start_len": len(prompt_ids) - 1, "sampling_params": {"max_new_tokens": 0},
            **self._adapter,
        }  # fmt: skip
        answer = await self.post("/generate", body, self.limits.work)
        with self.understanding("/generate"):
            rows = answer["meta_info"]["input_top_logprobs"][1:]
            logp = np.array([[entry[0] for entry in row] for row in rows], np.float32)
            ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
            if ids.shape != (shape := (len(response_ids), top_k)):
                raise ValueError(f"log-probs {list(ids.shape)}, expected {list(shape)}")
            check_log_probs(logp.ravel().tolist())
            return ids, np.minimum(logp, 0)

    def _version_of(self, label: str) -> int:
        """Of weights that made tokens; of another run's, none that anybody has pushed."""
        what = self.identity.parse_label(label)
        return _UNKNOWN if what is None else _version(what)


def _version(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else _UNKNOWN
