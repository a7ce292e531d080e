"""asyncio client of one SGLang server: SGLang's own HTTP API, without samples and policies."""

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
from rlsys.engine.hooks.peer_weights import READ_LOADER, WRITE_LOADER
from rlsys.engine.sse import events
from rlsys.engine.weight_calls import load_from_disk, run_loader
from rlsys.engine.wire import (
    BAD_ANSWER,
    DEFAULT_LIMITS,
    DeadEngine,
    EngineError,
    ForeignServer,
    Limits,
    Wire,
    parse,
)
from rlsys.segments.route_records import ROUTES_PARAM

IDLE_SECONDS = 30.0
_VERSION_DIGITS = 18
_GENERATED = "sglang:generation_tokens_total"

_DATA = b"data: "
_STREAMED = {"stream": True, "return_logprob": True}
_UNKNOWN = -1
"""Version of weights without a label of this run."""


class Aborted(Exception):
    """Raised when a request ended early because a caller aborted it."""


class EngineClient(Wire):
    """Client of one engine.

    Methods raise EngineError if the engine refuses a request, and an error of `DeadEngine` if it does not respond.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        tp: int = 1,
        index: int | None = None,
        identity: Identity = ANONYMOUS,
        limits: Limits = DEFAULT_LIMITS,
        adapter: str | None = None,
        pool: str | None = None,
    ) -> None:
        """Create a client without sending a request.

        Args:
            url: Base URL of the engine's HTTP server.
            session: Session of make_session().
            tp: Tensor-parallel size of the engine.
            index: Number of the engine in the run's layout; None for an engine that joined during the run.
            identity: Owner that the engine must have, and its keys.
            limits: Time limits of responses.
            adapter: Name of the adapter that generates; None for the base model.
            pool: Name of the pool in engine.pools that the engine joined.
        """
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
        """Stream segments of new tokens. Only the last segment has `finish`, and routed experts if requested.

        If the last segment has `prompt_tokens` 0, the server aborted the request in its queue, and
        `generated_tokens` does not count its tokens.

        Args:
            ids: Token ids of the prompt, followed by tokens that earlier requests of the sample generated.
            rid: Request id. It must not be in use on this server, nor be a prefix of one in use.
            max_new_tokens: Limit of generated tokens.
            temperature: Sampling temperature.
            seed: Sampling seed; None on an engine that is not deterministic.
            stop_ids: Token ids that end the response.
            routes_from: First position whose routed experts are returned; None for no experts. The prefill of a
                prefix may select other experts than the passes that sampled it.
            cache_key: Requests share cached prefixes only with requests of the same key.
            truncation: top_k, top_p and min_p. `mu` is then the log-prob under the sampling mask, which segments
                contain.
            stop_texts: Texts that end the response. They match only within the tokens of this request.
            tops: Number of most probable ids returned for each generated token.
            sampling: Additional parameters by SGLang's names.
            store_routes: Let an engine of a run write the routed experts to a file.

        Raises:
            EngineError: The engine refuses the request, or its response is malformed.
            DeadEngine: The engine does not respond, or the stream ends without a finish.
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
                raise EngineError(f"{self.url}/generate: HTTP {answer.status}: {text}", answer.status)
            received = 0
            async for event in events(answer.content.iter_any()):
                if event.startswith(_DATA) and not event.startswith(_DATA + b"[DONE]"):
                    segment = self._segment(event, truncation is not None, received, len(ids), routes_from)
                    received += len(segment.ids)
                    if received > max_new_tokens:  # an endless stream would block an interrupt forever
                        error = f"{received} tokens; expected at most {max_new_tokens}"
                        raise EngineError(f"{self.url}/generate: malformed response: {error}", BAD_ANSWER)
                    yield segment
                    if segment.finish is not None:
                        return
            raise aiohttp.ClientPayloadError(
                f"{self.url}/generate: the stream of request {rid} ended without a finish reason"
            )

    def _segment(
        self, event: bytes, has_mask: bool, received_tokens: int, prompt_tokens: int, routes_from: int | None
    ) -> Segment:
        """Decode an event.

        Args:
            event: One server-sent event, which begins with `data: `.
            has_mask: Whether the engine returns a sampling mask.
            received_tokens: Number of tokens in earlier events.
            prompt_tokens: Number of prompt tokens.
            routes_from: See `generate`.
        """
        with self.translate_errors("/generate"):
            chunk = decode_chunk(memoryview(event)[len(_DATA) :])
            segment = read_chunk(chunk, received_tokens, self._version_of, has_mask)
            if routes_from is not None and segment.prompt_tokens and chunk.meta_info is not None:
                tokens = received_tokens + len(segment.ids)
                segment.routes = read_routes(chunk.meta_info, prompt_tokens, tokens, routes_from)
        return segment

    async def abort(self, rid: str | None) -> None:
        """Abort one request. Its `generate` then ends with the finish reason "abort" and all tokens so far.

        SGLang ignores an abort that arrives before its request is registered, so the caller must repeat it.

        Args:
            rid: Request id; None to abort all requests.
        """
        await self.post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause_generation(self, mode: str) -> None:
        """Pause generation and keep the requests. New requests are queued; control requests are served.

        Args:
            mode: "retract" frees the KV cache of the requests, which is recomputed when they continue; "in_place"
                keeps it.
        """
        await self.post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Resume generation. Do nothing if the engine is not paused."""
        await self.post("/continue_generation", {"torch_empty_cache": False})

    async def begin_weight_update(self) -> None:
        """Begin a weight update under a new `epoch`, after ending an update that an earlier trainer did not end.

        The engine then accepts only tensors with this epoch (fence.py).
        """
        self.epoch = time.time_ns()  # larger than the epochs of earlier processes
        try:
            await self.post("/begin_weight_update", {})
        except EngineError:
            await self.end_weight_update()
            await self.post("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """End a weight update. The engine then converts the tensors to the layout that its kernels need."""
        await self.post("/end_weight_update", {}, self.limits.work)

    async def release_memory(self) -> None:
        """Release the memory of weights, KV cache and CUDA graphs of an idle engine.

        The contents of weights and cache are lost. Do not call it again before `resume_memory`.
        """
        tags = {"tags": ["kv_cache", "weights", "cuda_graph"]}
        await self.post("/release_memory_occupation", tags, self.limits.work)

    async def resume_memory(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory again after `release_memory`. "kv_cache" includes the CUDA graphs.

        The scheduler of an engine dies if it has not released this memory.
        """
        tags = {"tags": [part] if part == "weights" else [part, "cuda_graph"]}
        await self.post("/resume_memory_occupation", tags, self.limits.work)

    async def set_weight_version(self, version: int | str) -> None:
        """Set the label of the engine's weights: a version, or a word for weights that are no version."""
        label = self.identity.label(version)
        await self.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def checksums(self) -> list[dict[str, str]]:
        """Return one mapping for each tensor-parallel rank: tensor name -> hash of the bytes of its local shard."""
        answer = await self.post("/weights_checker", {"action": "checksum"}, self.limits.work)
        with self.translate_errors("/weights_checker"):
            return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def update_weights_from_disk(self, folder: str, version: int) -> None:
        """Make the engine load a safetensors folder.

        Args:
            folder: Path of the folder on the engine's host.
            version: Version of the weights.

        Raises:
            EngineError: The engine cannot read the folder; it keeps its weights.
        """
        call = load_from_disk(folder, self.identity.label(version))
        await self.post(call.path, call.body, self.limits.work)

    async def write_peer_weights(self) -> None:
        """Have the engine write its weights for another engine (hooks/peer_weights.py), within a weight update."""
        await self._run_loader(WRITE_LOADER)

    async def read_peer_weights(self) -> None:
        """Have the engine load the weights that another engine wrote, within a weight update."""
        await self._run_loader(READ_LOADER)

    async def _run_loader(self, loader: str) -> None:
        call = run_loader(loader, self.tp)
        await self.post(call.path, call.body, self.limits.work)

    async def info(self) -> dict[str, Any]:
        """Return SGLang's server info, such as `model_path` and `max_req_input_len`."""
        info = parse(await self.get("/server_info"))
        return info if isinstance(info, dict) else {}

    async def tokenize(self, text: str) -> list[int]:
        """Tokenize a text as the engine's `/generate` does."""
        answer = await self.post("/tokenize", {"model": "", "prompt": text})
        with self.translate_errors("/tokenize"):
            tokens: list[int] = list(answer["tokens"])
        return tokens

    async def flush(self, *, paused: bool = False) -> None:
        """Empty the prefix cache when the engine is idle.

        Args:
            paused: Whether the engine is paused. With retracted requests it never becomes idle, but can be flushed
                at once.

        Raises:
            EngineError: The engine is not idle within IDLE_SECONDS.
        """
        await self.post(f"/flush_cache?timeout={0 if paused else IDLE_SECONDS}", {})

    async def slow_down(self, seconds: float | None) -> None:
        """Make the engine sleep before each forward pass (SGLang's own option, for tests and benchmarks)."""
        await self.post("/slow_down", {"forward_sleep_time": seconds})

    async def healthy(self) -> bool:
        """Return whether the server responds within two seconds and belongs to the owner."""
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
        """Return the weight version that the server reports; -1 if its label is no number, as before a push."""
        return _version(await self.weight_label())

    async def weight_label(self) -> str:
        """Return the weight label that the server reports, without its owner.

        Raises:
            ForeignServer: The weights belong to another run, or the server refuses this run's key.
            EngineError: The server reports no label, so it is not an SGLang server.
        """
        info = parse(await self.get("/model_info"))
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.url} is not an SGLang server: its /model_info has no weight_version")
        return self._version_label(str(info["weight_version"]))

    def _version_label(self, label: str) -> str:
        """Return a label without its owner.

        Raises:
            ForeignServer: The label has another owner.
        """
        if (version := self.identity.parse_label(label)) is None:
            raise ForeignServer(
                f"{self.url} is not an engine of this run: the label of its weights is {label[:100]!r}",
                BAD_ANSWER,
            )
        return version

    async def generated_tokens(self) -> int:
        """Return the engine's Prometheus counter of generated tokens.

        It includes all requests that have ended since the engine's start, also aborted ones.
        """
        lines = (await self.get("/metrics")).splitlines()
        with self.translate_errors("/metrics"):
            return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_GENERATED)))

    async def token_logprobs(self, ids: list[int], rid: str | None = None) -> list[float]:
        """Return the log-probs of `ids[1:]`, `[len(ids) - 1]`. The engine also generates one token.

        Args:
            ids: Token ids.
            rid: Request id as in `generate`; None for a request that this process never aborts.

        Raises:
            Aborted: The request `rid` was aborted, and no token was generated.
            EngineError: The engine refuses the request, or aborted it although `rid` is None.
        """
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
        body |= self._adapter if rid is None else {**self._adapter, "rid": rid}
        answer = await self.post("/generate", body, self.limits.work)
        with self.translate_errors("/generate"):
            meta = answer["meta_info"]
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                if rid is None:
                    raise EngineError(f"{self.url}/generate: another client aborted all requests", BAD_ANSWER)
                raise Aborted(f"{self.url}/generate: request {rid} was aborted")
            self._version_label(str(meta.get("weight_version")))
            log_probs, _ = check_log_probs(float(entry[0]) for entry in meta["input_token_logprobs"][1:])
            if len(log_probs) != len(ids) - 1:
                raise ValueError(f"{len(log_probs)} log-probs; expected {len(ids) - 1}")
            return log_probs

    async def most_probable(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], top_k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the `top_k` most probable ids at each response position, and their log-probs at temperature 1.

        SGLang applies no temperature to input log-probs (0.5.23).

        Args:
            prompt_ids: Token ids of the prompt.
            response_ids: Token ids of the response.
            top_k: Number of ids at each position; 0 for the ids of the response itself.

        Returns:
            Ids int32 and log-probs float32, both `[len(response_ids), max(top_k, 1)]`.
        """
        body = {
            "input_ids": [*prompt_ids, *response_ids], "return_logprob": True, "top_logprobs_num": top_k,
            "logprob_start_len": len(prompt_ids) - 1, "sampling_params": {"max_new_tokens": 0},
            **self._adapter,
        }  # fmt: skip
        answer = await self.post("/generate", body, self.limits.work)
        with self.translate_errors("/generate"):
            meta = answer["meta_info"]
            rows = (
                meta["input_top_logprobs"][1:] if top_k else [[e] for e in meta["input_token_logprobs"][1:]]
            )
            logp = np.array([[entry[0] for entry in row] for row in rows], np.float32)
            ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
            if ids.shape != (shape := (len(response_ids), max(top_k, 1))):
                raise ValueError(f"log-probs of shape {list(ids.shape)}; expected {list(shape)}")
            if not top_k:
                sampled_ids = np.array(response_ids, np.int32)[:, None]
                different = ids != sampled_ids
                # SGLang 0.5.23 reports the last id of the vocabulary as 0, with its correct log-prob.
                if ids[different].any() or len(np.unique(sampled_ids[different])) > 1:
                    raise ValueError("log-probs of other ids; expected those of the response")
                ids = sampled_ids
            check_log_probs(logp.ravel().tolist())
            return ids, np.minimum(logp, 0)

    def _version_of(self, label: str) -> int:
        """Return the version of the weights that sampled tokens; -1 for weights of another run."""
        version = self.identity.parse_label(label)
        return _UNKNOWN if version is None else _version(version)


def _version(text: str) -> int:
    """Return the version of a label without its owner; -1 if the label is no number."""
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else _UNKNOWN
