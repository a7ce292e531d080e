"""Engine: samples for tenants from the engine, into which it loads the tenants' saved adapters."""

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
"""Largest number of adapters in a batch of the engine. SGLang counts the base model as one of them."""
MAX_ADAPTERS = 32
"""Largest number of adapters in the engine's host memory. The least recently used one is unloaded first."""
_ATTEMPTS = 3
"""Number of attempts: the first, one after the engine's death, one after the restarted engine lost the adapter."""
_POLL_SECONDS = 0.5
_BAD_REQUEST = 400

log = logging.getLogger("rlsys.tenants")


class EngineGone(Exception):
    """Raised if the engine did not restart in time, or died repeatedly during the request."""


class Engine:
    """Client of the engine. Owns the adapters in the engine.

    Attributes:
        deaths: number of requests during which the engine did not respond.
    """

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
            url: URL of the engine.
            session: HTTP session.
            identity: expected identity of the engine.
            limits: timeouts of requests.
            start_seconds: time limit for a restart of the engine, in seconds.
        """
        self._wire = Wire(url, session, identity, limits)
        self._work, self._start_seconds = limits.work, start_seconds
        self._loaded: dict[str, Path] = {}
        """Name of a loaded adapter in the engine -> its folder. The most recently used adapter is the last."""
        self._busy: Counter[str] = Counter()
        """Name of an adapter -> number of running requests with it."""
        self._loading = asyncio.Lock()
        self._suspect = asyncio.Lock()
        """Serializes requests that may have caused a death of the engine."""
        self.deaths = 0

    async def begin(self) -> None:
        """Wait until the engine is healthy, and unload the adapters of an earlier server process."""
        await self._wait_healthy()
        for name in await self._adapter_names():
            await self._wire.post("/unload_lora_adapter", {"lora_name": name}, self._work)

    async def sample(
        self, sample: Sample, adapter: Path | None, on_death: Callable[[], Awaitable[int]]
    ) -> tuple[list[SampledSequence], list[float] | None]:
        """Sample the sequences of a request.

        Args:
            sample: the request.
            adapter: folder of the adapter; None: the base model.
            on_death: counts a death of the engine during this request, and returns the number of these deaths.

        Returns:
            The sequences, and the log-probs of the prompt; None: not requested.

        Raises:
            UserError: the engine refuses the request.
            EngineGone: the engine does not respond, died repeatedly, or failed on the request.
        """
        deaths = 0
        for _ in range(_ATTEMPTS):
            try:
                async with self._suspect if deaths else nullcontext(), self._adapter(adapter) as name:
                    bodies = [build_body(sample, name, i) for i in range(sample.num_samples)]
                    posts = (self._wire.post("/generate", body, self._work) for body in bodies)
                    answers = await asyncio.gather(*posts)
                return self._read(answers, sample)
            except EngineError as e:
                if e.status != _BAD_REQUEST:
                    raise EngineGone(str(e)) from None
                if adapter is None or name_of(adapter) in await self._adapter_names():
                    raise UserError(f"asample: {e}") from None
                self._loaded.pop(name_of(adapter), None)  # the engine has restarted
            except DeadEngine as e:
                log.warning("the engine does not respond: %r", e)
                self._loaded.clear()
                self.deaths += 1
                deaths = await on_death()
                if deaths >= DEATHS_POISONOUS:
                    raise EngineGone(
                        f"refused: the engine died {deaths} times while it processed the request"
                    ) from None
                await self._wait_healthy()
        raise EngineGone(f"the engine did not respond to this request in {_ATTEMPTS} attempts")

    def _read(self, answers: list[Any], sample: Sample) -> tuple[list[SampledSequence], list[float] | None]:
        """Return the sequences of the engine's answers, and the log-probs of the prompt if requested."""
        with self._wire.translate_errors("/generate"):
            sequences = [_to_sequence(answer) for answer in answers]
            if not sample.prompt_logprobs:
                return sequences, None
            rows = answers[0]["meta_info"]["input_token_logprobs"]
            return sequences, [math.nan, *(float(row[0]) for row in rows[1:])]

    # -- adapters -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _adapter(self, folder: Path | None) -> AsyncIterator[str | None]:
        """Keep an adapter loaded while the context is active. Yield its name in the engine; None: the base model."""
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
        """Load an adapter, and before that unload idle ones so that at most MAX_ADAPTERS are loaded."""
        if name in self._loaded:
            self._loaded[name] = self._loaded.pop(name)  # moves it to the end
            return
        idle_names = [loaded for loaded in self._loaded if not self._busy[loaded]]
        for idle_name in idle_names[: max(0, len(self._loaded) - MAX_ADAPTERS + 1)]:
            await self._wire.post("/unload_lora_adapter", {"lora_name": idle_name}, self._work)
            del self._loaded[idle_name]
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        await self._wire.post("/load_lora_adapter", body, self._work)
        self._loaded[name] = folder

    async def _adapter_names(self) -> list[str]:
        """Return the names of the engine's adapters, which are its models with a parent."""
        with self._wire.translate_errors("/v1/models"):
            models = json.loads(await self._wire.get("/v1/models"))["data"]
            return [str(model["id"]) for model in models if model.get("parent")]

    async def _wait_healthy(self) -> None:
        """Wait until the engine is healthy.

        Raises:
            EngineGone: the engine is not healthy after `start_seconds`.
        """
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            try:
                status, _ = await self._wire.fetch("/health")
                if status == 200:
                    return
            except (*DeadEngine, EngineError):
                pass
            await asyncio.sleep(_POLL_SECONDS)
        raise EngineGone(f"the engine was not healthy within {self._start_seconds:.0f} s")


def name_of(folder: Path) -> str:
    """Return the name of an adapter in the engine, a hash of its folder's path."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]


def build_body(sample: Sample, adapter: str | None, number: int) -> dict[str, Any]:
    """Build the body of SGLang's /generate for one sequence.

    Args:
        sample: the request.
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
    """Derive the seed of a request without a seed from its session and number, which a repetition has, too."""
    name = f"{sample.sampling_session_id}:{sample.seq_id}"
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:4])


def _to_sequence(answer: Any) -> SampledSequence:
    """Convert an answer of SGLang's /generate.

    Raises:
        ValueError: the sequence did not end by a stop condition or the limit of tokens.
    """
    meta = answer["meta_info"]
    rows = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason = {reason!r:.60}: expected stop or length")
    return SampledSequence([int(row[1]) for row in rows], [float(row[0]) for row in rows], reason == "stop")


def check_sample(sample: Sample, vocab_size: int, longest: int) -> Sample:
    """Check a request for samples, and set `max_tokens` if it is missing.

    Args:
        sample: the request.
        vocab_size: size of the vocabulary.
        longest: largest number of tokens of a sequence.

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
        # Checks the body that is sent later by the rules of all requests to engines.
        check_request(
            EngineLimits(vocab_size, longest + RESERVED_TOKENS + 1), "/generate", build_body(sample, None, 0)
        )
    except RefusedPrompt as e:
        raise UserError(f"asample: {e}") from None
    if remaining < 1 or (max_tokens is not None and max_tokens > remaining):
        raise UserError(
            f"prompt: {len(ids)} tokens and max_tokens = {max_tokens or 1}: expected at most {longest} in total"
        )
    return sample
