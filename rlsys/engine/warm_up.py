"""Warm-up of an engine on a GPU. SGLang runs it after the model is loaded and before the server listens.

Kernels are compiled at their first use, which takes 9 to 24 s each. The time limit of the start includes this time;
those of pushes and rollouts do not. The warm-up therefore makes each call of a push and of a rollout once: log-probs
of a canary, seeded sampling, and checksums of all weights. Later starts load the kernels from the folder
`kernel_folder` of launch/environment.py.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from typing import Any

import psutil

from rlsys.core.errors import RunError

NAME = "rlsys"
"""Value of SGLang's argument --warmups."""
_LENGTHS = (1, 17, 64, 256)
"""Prompt lengths in tokens. Kernels are compiled separately for length 1 and for multiples of 16."""
_RESPONSE_TOKENS = 4

log = logging.getLogger(__name__)


class StartTimes:
    """Measures the durations of the phases of this process's start, in seconds."""

    def __init__(self) -> None:
        self._last = psutil.Process().create_time()
        self._phases: list[tuple[str, float]] = []

    def end_phase(self, phase: str) -> None:
        """Record the time since the end of the previous phase."""
        end = time.time()
        self._phases.append((phase, end - self._last))
        self._last = end

    def __str__(self) -> str:
        total = sum(seconds for _, seconds in self._phases)
        return f"start {total:.1f} s: " + ", ".join(f"{phase} {s:.1f}" for phase, s in self._phases)


start_times = StartTimes()


def register() -> None:
    """Register the warm-up with SGLang, in the process that serves HTTP, before SGLang's launcher runs."""
    importlib.import_module("sglang.srt.entrypoints.warmup").warmup(NAME)(warm_up)


def warm_up_requests(vocabulary: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of requests like those of EngineClient.token_logprobs and EngineClient.generate.

    Args:
        vocabulary: Number of token ids.
        max_tokens: Largest number of tokens of prompt and response together.
    """
    bodies = []
    for length in _LENGTHS:
        if length + _RESPONSE_TOKENS >= max_tokens:
            break
        ids = [i % vocabulary for i in range(length)]
        for tokens, seed in ((1, {}), (_RESPONSE_TOKENS, {"sampling_seed": 0})):
            sampling = {"max_new_tokens": tokens, "temperature": 1.0, **seed}
            start = {"logprob_start_len": 0} if tokens == 1 else {}
            bodies.append({"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **start})
    return bodies


async def warm_up(_: str, manager: Any) -> None:
    """Run the warm-up. Called by SGLang.

    Args:
        manager: SGLang's TokenizerManager.

    Raises:
        RunError: The engine cannot compute checksums of its weights.
    """
    start_times.end_phase("model, memory and CUDA graphs")
    structures = importlib.import_module("sglang.srt.managers.io_struct")

    async def generate(body: dict[str, Any]) -> None:
        async for _ in manager.generate_request(structures.GenerateReqInput(**body), None):
            pass

    max_tokens = min(filter(None, (manager.context_len, manager.max_req_input_len)))
    bodies = warm_up_requests(manager.model_config.vocab_size, max_tokens)
    for body in bodies:
        await generate(body)
    await asyncio.gather(*(generate(body) for body in bodies))  # one batch
    success, message, _, _ = await manager.check_weights(structures.CheckWeightsReqInput(action="checksum"))
    if not success:
        raise RunError(f"the engine cannot compute checksums of its weights: {message}")
    await manager.flush_cache()
    start_times.end_phase("warm-up")
    log.info("%s", start_times)
