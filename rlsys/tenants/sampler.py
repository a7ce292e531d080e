"""Client of the engine for tenants' samples; it loads saved adapters into the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp

from rlsys.core.errors import UserError
from rlsys.core.identity import Identity
from rlsys.engine.wire import DeadEngine, EngineError, Limits, Wire
from rlsys.engine_requests import (
    DEATHS_POISONOUS,
    RESERVED_TOKENS,
    RefusedPrompt,
    check_request,
)
from rlsys.engine_requests import Limits as EngineLimits
from rlsys.tenants.messages import SampledSequence
from rlsys.tenants.requests import Sample

ADAPTERS_AT_ONCE = 8
"""Adapters in one batch of the engine; SGLang counts the base model as one of them."""
MAX_ADAPTERS = 32
"""Adapters in the engine's host memory; the least recently used one is unloaded first."""
_TRIES = 3
"""One retry after the engine's death, and one after a restarted engine has lost the adapter."""
_POLL_SECONDS = 0.5
_BAD_REQUEST = 400

log = logging.getLogger("rlsys.tenants")


class EngineGone(Exception):
    """The engine did not restart in time, or died repeatedly during the request."""


class Engine:
    """Owns the adapters in the engine."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        identity: Identity,
        limits: Limits,
        start_seconds: float,
    ) -> None:
        """Create a client.

        Args:
            url: address of the engine.
            session: HTTP session.
            identity: expected identity of the engine.
            limits: timeouts of requests.
            start_seconds: time limit of the engine's start.
        """
        self._wire = Wire(url, session, identity, limits)
        self._work, self._start_seconds = limits.work, start_seconds
        self._loaded: dict[str, Path] = {}
        """Folders of the loaded adapters by their name in the engine, the most recently used last."""
        self._busy: Counter[str] = Counter()
        self._loading = asyncio.Lock()
        self._suspect = asyncio.Lock()
        """Serializes requests that may have caused a death of the engine."""
        self.deaths = 0

    async def begin(self) -> None:
        """Wait until the engine serves; unload adapters of an earlier server process."""
        await self._healthy()
        for name in await self._names():
            await self._wire.post("/unload_lora_adapter", {"lora_name": name}, self._work)

    async def sample(
        self, sample: Sample, adapter: Path | None, on_death: Callable[[], Awaitable[int]]
    ) -> tuple[list[SampledSequence], list[float] | None]:
        """Sample a request's sequences.

        Args:
            sample: request.
            adapter: folder of the adapter; None: the base model.
            on_death: counts a death of the engine during this request, and returns their number.

        Returns:
            Sequences, and log-probs of the prompt if the request asks for them.

        Raises:
            UserError: the engine refuses the request.
            EngineGone: the engine does not respond.
        """
        deaths = 0
        for _ in range(_TRIES):
            try:
                async with self._suspect if deaths else nullcontext(), self._adapter(adapter) as name:
                    bodies = [body_of(sample, name, i) for i in range(sample.num_samples)]
                    posts = (self._wire.post("/generate", body, self._work) for body in bodies)
                    answers = await asyncio.gather(*posts)
                return self._read(answers, sample)
            except EngineError as e:
                if e.status != _BAD_REQUEST:
                    raise EngineGone(str(e)) from None
                if adapter is None or await self._has(adapter):
                    raise UserError(f"asample: {e}") from None
                self._loaded.pop(name_of(adapter), None)  # the engine has restarted
            except DeadEngine as e:
                log.warning("the engine does not respond: %r", e)
                self._loaded.clear()
                self.deaths += 1
                deaths = await on_death()
                if deaths >= DEATHS_POISONOUS:
                    raise EngineGone(f"refused: {deaths} engines died while they processed it") from None
                await self._healthy()
        raise EngineGone(f"the engine did not respond to this request in {_TRIES} attempts")

    def _read(self, answers: list[Any], sample: Sample) -> tuple[list[SampledSequence], list[float] | None]:
        with self._wire.translate_errors("/generate"):
            sequences = [_to_sequence(answer) for answer in answers]
            if not sample.prompt_logprobs:
                return sequences, None
            rows = answers[0]["meta_info"]["input_token_logprobs"]
            return sequences, [math.nan, *(float(row[0]) for row in rows[1:])]

    # -- adapters -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _adapter(self, folder: Path | None) -> AsyncIterator[str | None]:
        """Load an adapter and keep it loaded while the context is active; yield its name in the engine."""
        if folder is None:
            yield None
            return
        name = name_of(folder)
        self._busy[name] += 1
        try:
            async with self._loading:
                await self._load(name, folder)
            yield name
        finally:
            self._busy[name] -= 1

    async def _load(self, name: str, folder: Path) -> None:
        if name in self._loaded:
            self._loaded[name] = self._loaded.pop(name)
            return
        idle = [loaded for loaded in self._loaded if not self._busy[loaded]]
        for old in idle[: max(0, len(self._loaded) - MAX_ADAPTERS + 1)]:
            await self._wire.post("/unload_lora_adapter", {"lora_name": old}, self._work)
            del self._loaded[old]
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        await self._wire.post("/load_lora_adapter", body, self._work)
        self._loaded[name] = folder

    async def _has(self, folder: Path) -> bool:
        return name_of(folder) in await self._names()

    async def _names(self) -> list[str]:
        """List the engine's adapters: models with a parent."""
        with self._wire.translate_errors("/v1/models"):
            models = json.loads(await self._wire.get("/v1/models"))["data"]
            return [str(model["id"]) for model in models if model.get("parent")]

    async def _healthy(self) -> None:
        """Wait until the engine is healthy.

        Raises:
            EngineGone: it is not healthy after `start_seconds`.
        """
        until = time.monotonic() + self._start_seconds
        while time.monotonic() < until:
            try:
                status, _ = await self._wire.fetch("/health")
                if status == 200:
                    return
            except (*DeadEngine, EngineError):
                pass
            await asyncio.sleep(_POLL_SECONDS)
        raise EngineGone(f"the engine did not respond within {self._start_seconds:.0f} s")


def name_of(folder: Path) -> str:
    """Return the name of an adapter in the engine, determined by its folder."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]


def body_of(sample: Sample, adapter: str | None, number: int) -> dict[str, Any]:
    """Build the body of SGLang's /generate for one sequence.

    Args:
        sample: request.
        adapter: name of the adapter in the engine; None: the base model.
        number: index of the sequence.
    """
    params = sample.sampling_params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
    }
    sampling["max_new_tokens"] = params.max_tokens
    sampling["skip_special_tokens"] = False
    seed = _seed_of(sample) if params.seed is None else params.seed
    sampling["sampling_seed"] = (seed + number) % 2**31
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is not None:
        texts, ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
        sampling |= {"stop": texts} if texts else {}
        sampling |= {"stop_token_ids": ids} if ids else {}
        sampling["ignore_eos"] = not stop
    body = {"input_ids": sample.ids, "sampling_params": sampling, "return_logprob": True}
    if sample.prompt_logprobs and number == 0:
        body["logprob_start_len"] = 0
    return body if adapter is None else {**body, "lora_path": adapter}


def _seed_of(sample: Sample) -> int:
    """Derive the seed of a request without one; a repeated request gets the same seed."""
    name = f"{sample.sampling_session_id}:{sample.seq_id}"
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:4])


def _to_sequence(answer: Any) -> SampledSequence:
    meta = answer["meta_info"]
    rows = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r:.60}: expected stop or length")
    return SampledSequence([int(row[1]) for row in rows], [float(row[0]) for row in rows], reason == "stop")


def check_sample(sample: Sample, vocab_size: int, longest: int) -> Sample:
    """Check a request to the engine.

    Args:
        sample: request.
        vocab_size: size of the vocabulary.
        longest: maximum number of tokens of a sequence.

    Returns:
        The request with `max_tokens`.

    Raises:
        UserError: the engine would refuse the request, or crash.
    """
    ids, max_tokens = sample.ids, sample.sampling_params.max_tokens
    remaining = longest - len(ids)
    if max_tokens is None:
        params = sample.sampling_params.model_copy(update={"max_tokens": max(remaining, 1)})
        sample = sample.model_copy(update={"sampling_params": params})
    try:
        # The body that will be sent, checked by the rules of all requests to engines.
        check_request(
            EngineLimits(vocab_size, longest + RESERVED_TOKENS + 1), "/generate", body_of(sample, None, 0)
        )
    except RefusedPrompt as e:
        raise UserError(f"asample: {e}") from None
    if remaining < 1 or (max_tokens is not None and max_tokens > remaining):
        raise UserError(
            f"prompt: {len(ids)} tokens and max_tokens = {max_tokens or 1}: expected at most {longest} in total"
        )
    return sample
