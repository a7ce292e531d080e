"""Disagreement of policy and reference on a prompt's tokens, from two engines (LENS, docs/algorithms.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from rlsys.core.errors import RunError
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import DeadEngine, EngineError
from rlsys.router.engines import Engines
from rlsys.router.failure_policy import REFUSAL_STATUSES, RefusedRequest

RETRY_SECONDS = 1.0

log = logging.getLogger("rlsys.rollout")


class ReferenceScores:
    """Scores of a prompt's tokens: |log policy - log reference|, and whether the token is protected.

    `await scores(ids)` returns both, `[len(ids)]`. The first token has no log-prob and is protected, as are the
    `protected` ids. `timeout_s`: seconds for which the reference may be unavailable (the supervisor restarts its own
    one) before a RunError.
    """

    def __init__(
        self, router: Engines, reference: EngineClient, protected: Collection[int], timeout_s: float
    ) -> None:
        self._router, self._reference = router, reference
        self._protected, self._timeout_s = frozenset(protected), timeout_s

    async def __call__(self, ids: list[int]) -> tuple[list[float], list[bool]]:
        policy, reference = await asyncio.gather(
            self._router.prompt_logprobs(ids), self._reference_logprobs(ids)
        )
        scores = [0.0, *(abs(p - r) for p, r in zip(policy, reference, strict=True))]
        return scores, [True, *(i in self._protected for i in ids[1:])]

    async def _reference_logprobs(self, ids: list[int]) -> list[float]:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._reference.token_logprobs(ids)
                    except (*DeadEngine, EngineError) as e:
                        if isinstance(e, EngineError) and e.status in REFUSAL_STATUSES:
                            raise RefusedRequest(f"engine.reference: {e}") from None
                        log.warning(
                            "engine.reference: %s does not respond: %s", self._reference.url, e or type(e)
                        )
                        await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            raise RunError(
                f"engine.reference: {self._reference.url} has not responded for {self._timeout_s:g} s"
            ) from None
