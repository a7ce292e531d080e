"""Scores of prompt tokens for LENS: the disagreement of policy and reference (docs/algorithms.md)."""

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
"""Pause before another request to an unavailable reference engine."""

log = logging.getLogger("rlsys.rollout")


class ReferenceScores:
    """Scores the tokens of prompts with an engine of the policy and the reference engine."""

    def __init__(
        self, router: Engines, reference: EngineClient, protected: Collection[int], timeout_s: float
    ) -> None:
        """Create the scorer.

        Args:
            router: engines of the policy.
            reference: engine of the reference model.
            protected: ids of tokens that must not be removed.
            timeout_s: seconds for which the reference engine may be unavailable; the supervisor restarts an engine
                that it started.
        """
        self._router, self._reference = router, reference
        self._protected, self._timeout_s = frozenset(protected), timeout_s

    async def __call__(self, ids: list[int]) -> tuple[list[float], list[bool]]:
        """Return |log policy - log reference| of each token, and whether the token is protected, `[len(ids)]` each.

        The first token has no log-prob, so it has score 0 and is protected.

        Raises:
            RefusedRequest: the reference engine refuses the prompt.
            RunError: the reference engine is unavailable for longer than the time limit; the message has the last
                error.
        """
        policy, reference = await asyncio.gather(
            self._router.prompt_logprobs(ids), self._reference_logprobs(ids)
        )
        scores = [0.0, *(abs(p - r) for p, r in zip(policy, reference, strict=True))]
        return scores, [True, *(i in self._protected for i in ids[1:])]

    async def _reference_logprobs(self, ids: list[int]) -> list[float]:
        """Return the reference's log-prob of each token but the first; repeat the request while it is unavailable."""
        url, last_error = self._reference.url, "no response"
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._reference.token_logprobs(ids)
                    except (*DeadEngine, EngineError) as e:
                        if isinstance(e, EngineError) and e.status in REFUSAL_STATUSES:
                            raise RefusedRequest(f"engine.reference: {e}") from None
                        last_error = str(e) or type(e).__name__
                        log.warning("engine.reference: %s is unavailable: %s", url, last_error)
                        await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            raise RunError(
                f"engine.reference: {url} was unavailable for {self._timeout_s:g} s; last error: {last_error}"
            ) from None
