"""An engine's warm-up on a GPU: SGLang runs it when the model is loaded, before its server listens.

Kernels are compiled at their first use, which takes 9 to 24 s each. So the start, whose limit counts that in, makes
the calls of a push and of a rollout once: a canary's log-probs, sampling from a seed, checksums of all weights. Later
starts find the kernels in the folder of launch/environment.py: kernel_folder().
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from typing import Any

import psutil

from rlsys.errors import RunError

NAME = "rlsys"
"""SGLang's argument --warmups."""
_LENGTHS = (1, 17, 64, 256)
"""Tokens of prompts: kernels are compiled apart for lengths of 1 and for multiples of 16."""
_RESPONSE = 4

log = logging.getLogger(__name__)


class StartTimes:
    """Seconds of the phases of this process's start."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self._phases: list[tuple[str, float]] = []

    def end_of(self, phase: str) -> None:
        now = time.time()
        self._phases.append((phase, now - self._last))
        self._last = now

    def __str__(self) -> str:
        total = sum(seconds for _, seconds in self._phases)
        return f"start {total:.1f} s: " + ", ".join(f"{phase} {s:.1f}" for phase, s in self._phases)


start_times = StartTimes()


def register() -> None:
    """Before SGLang's launcher, in its first process, which serves HTTP."""
    importlib.import_module("sglang.srt.entrypoints.warmup").warmup(NAME)(warm_up)


def requests(vocabulary: int, longest: int) -> list[dict[str, Any]]:
    """As EngineClient.token_logprobs and EngineClient.generate ask, of prompts that fit `longest` tokens."""
    made = []
    for length in _LENGTHS:
        if length + _RESPONSE >= longest:
            break
        ids = [i % vocabulary for i in range(length)]
        for tokens, seed in ((1, {}), (_RESPONSE, {"sampling_seed": 0})):
            sampling = {"max_new_tokens": tokens, "temperature": 1.0, **seed}
            start = {"logprob_start_len": 0} if tokens == 1 else {}
            made.append({"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **start})
    return made


async def warm_up(_: str, manager: Any) -> None:
    """`manager`: SGLang's TokenizerManager. Raises RunError when the engine has no checksums."""
    start_times.end_of("model, memory and CUDA graphs")
    structures = importlib.import_module("sglang.srt.managers.io_struct")

    async def generate(body: dict[str, Any]) -> None:
        async for _ in manager.generate_request(structures.GenerateReqInput(**body), None):
            pass

    longest = min(filter(None, (manager.context_len, manager.max_req_input_len)))
    bodies = requests(manager.model_config.vocab_size, longest)
    for body in bodies:
        await generate(body)
    await asyncio.gather(*(generate(body) for body in bodies))  # several at once
    success, message, _, _ = await manager.check_weights(structures.CheckWeightsReqInput(action="checksum"))
    if not success:
        raise RunError(f"the engine computes no checksums of its weights: {message}")
    await manager.flush_cache()
    start_times.end_of("warm-up")
    log.info("%s", start_times)
