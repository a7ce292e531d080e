"""Asks the engine with a tenant's adapter, which it reads from the folder that was saved."""

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
from rlsys.tenants.messages import Sampled
from rlsys.tenants.requests import Sample

ADAPTERS_AT_ONCE = 8
"""In one batch of the engine; for SGLang the model without any is one of them."""
MOST_ADAPTERS = 32
"""That the engine keeps in host memory; the one that was asked least recently goes first."""
_TRIES = 3
"""One for the engine's death, and one for each adapter that an engine which began anew has not loaded."""
_LOOK_SECONDS = 0.5
_REFUSED = 400

log = logging.getLogger("rlsys.tenants")


class EngineGone(Exception):
    """It did not come back in time, or died under the request and under its second try."""


class Engine:
    """Owns which adapters are in the engine. `patience`: seconds that its start may take."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, identity: Identity, limits: Limits, patience: float
    ) -> None:
        self._wire = Wire(url, session, identity, limits)
        self._work, self._patience = limits.work, patience
        self._loaded: dict[str, Path] = {}
        """By the engine's name for it; the one that was asked last stands last."""
        self._busy: Counter[str] = Counter()
        self._loading = asyncio.Lock()
        self._suspect = asyncio.Lock()
        """Of the request that may be what the engine died of: of such ones, one at a time is in it."""
        self.deaths = 0

    async def begin(self) -> None:
        """Wait until it serves. Adapters of a server before this one leave."""
        await self._healthy()
        for name in await self._names():
            await self._wire.post("/unload_lora_adapter", {"lora_name": name}, self._work)

    async def sample(
        self, asked: Sample, adapter: Path | None, died: Callable[[], Awaitable[int]]
    ) -> tuple[list[Sampled], list[float] | None]:
        """The answers, and the prompt's log-probs if they are wanted. `died`: counts an engine's death under this
        request, and returns how many there were. Raises UserError for what the engine refuses, EngineGone."""
        deaths = 0
        for _ in range(_TRIES):
            try:
                async with self._suspect if deaths else nullcontext(), self._adapter(adapter) as name:
                    bodies = [body_of(asked, name, i) for i in range(asked.num_samples)]
                    posts = (self._wire.post("/generate", body, self._work) for body in bodies)
                    answers = await asyncio.gather(*posts)
                return self._read(answers, asked)
            except EngineError as e:
                if e.status != _REFUSED:
                    raise EngineGone(str(e)) from None
                if adapter is None or await self._has(adapter):
                    raise UserError(f"asample: {e}") from None
                self._loaded.pop(name_of(adapter), None)  # the engine began anew
            except DeadEngine as e:
                log.warning("the engine does not answer: %r", e)
                self._loaded.clear()
                self.deaths += 1
                deaths = await died()
                if deaths >= DEATHS_POISONOUS:
                    raise EngineGone(f"refused: {deaths} engines died while they worked on it") from None
                await self._healthy()
        raise EngineGone(f"the engine did not answer this request in {_TRIES} attempts")

    def _read(self, answers: list[Any], asked: Sample) -> tuple[list[Sampled], list[float] | None]:
        with self._wire.translate_errors("/generate"):
            found = [_sampled(answer) for answer in answers]
            if not asked.prompt_logprobs:
                return found, None
            rows = answers[0]["meta_info"]["input_token_logprobs"]
            return found, [math.nan, *(float(row[0]) for row in rows[1:])]

    # -- adapters -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _adapter(self, folder: Path | None) -> AsyncIterator[str | None]:
        """The engine's name of it, which stays loaded meanwhile."""
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
        idle = [held for held in self._loaded if not self._busy[held]]
        for old in idle[: max(0, len(self._loaded) - MOST_ADAPTERS + 1)]:
            await self._wire.post("/unload_lora_adapter", {"lora_name": old}, self._work)
            del self._loaded[old]
        body = {"lora_name": name, "lora_path": str(folder.absolute())}
        await self._wire.post("/load_lora_adapter", body, self._work)
        self._loaded[name] = folder

    async def _has(self, folder: Path) -> bool:
        return name_of(folder) in await self._names()

    async def _names(self) -> list[str]:
        """Of its adapters: models that have a parent."""
        with self._wire.translate_errors("/v1/models"):
            models = json.loads(await self._wire.get("/v1/models"))["data"]
            return [str(model["id"]) for model in models if model.get("parent")]

    async def _healthy(self) -> None:
        """Until it answers. Raises EngineGone after as long as a start may take."""
        until = time.monotonic() + self._patience
        while time.monotonic() < until:
            try:
                status, _ = await self._wire.fetch("/health")
                if status == 200:
                    return
            except (*DeadEngine, EngineError):
                pass
            await asyncio.sleep(_LOOK_SECONDS)
        raise EngineGone(f"the engine did not answer within {self._patience:.0f} s")


def name_of(folder: Path) -> str:
    """What the engine calls an adapter: of one folder, always the same."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]


def body_of(asked: Sample, adapter: str | None, number: int) -> dict[str, Any]:
    """SGLang's, of one of the answers."""
    params = asked.sampling_params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
    }
    sampling["max_new_tokens"] = params.max_tokens
    sampling["skip_special_tokens"] = False
    seed = _seed_of(asked) if params.seed is None else params.seed
    sampling["sampling_seed"] = (seed + number) % 2**31
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is not None:
        texts, ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
        sampling |= {"stop": texts} if texts else {}
        sampling |= {"stop_token_ids": ids} if ids else {}
        sampling["ignore_eos"] = not stop
    body = {"input_ids": asked.ids, "sampling_params": sampling, "return_logprob": True}
    if asked.prompt_logprobs and number == 0:
        body["logprob_start_len"] = 0
    return body if adapter is None else {**body, "lora_path": adapter}


def _seed_of(asked: Sample) -> int:
    """Of a request that brings none: the same one when it is made again."""
    name = f"{asked.sampling_session_id}:{asked.seq_id}"
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:4])


def _sampled(answer: Any) -> Sampled:
    meta = answer["meta_info"]
    rows = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ValueError(f"it ended by {reason!r:.60}")
    return Sampled([int(row[1]) for row in rows], [float(row[0]) for row in rows], reason == "stop")


def check_sample(asked: Sample, vocab_size: int, room: int) -> Sample:
    """With its number of tokens. Raises UserError for what the engine cannot answer, or would die of. `room`: the
    longest sequence."""
    ids, most = asked.ids, asked.sampling_params.max_tokens
    left = room - len(ids)
    if most is None:
        params = asked.sampling_params.model_copy(update={"max_tokens": max(left, 1)})
        asked = asked.model_copy(update={"sampling_params": params})
    try:
        # As it will be sent, by the rules that all requests to engines keep to.
        check_request(
            EngineLimits(vocab_size, room + RESERVED_TOKENS + 1), "/generate", body_of(asked, None, 0)
        )
    except RefusedPrompt as e:
        raise UserError(f"asample: {e}") from None
    if left < 1 or (most is not None and most > left):
        raise UserError(f"prompt: {len(ids)} tokens and {most or 1} new ones, {room} is the longest sequence")
    return asked
