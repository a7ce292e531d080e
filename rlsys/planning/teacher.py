"""Client of the teacher engine, which scores finished responses with the log-probs that the trainer distils."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import ClientSession

from rlsys.config import Config
from rlsys.config.sidecar_servers import teacher_config
from rlsys.core.errors import error_text
from rlsys.core.identity import ANONYMOUS, engine_identity
from rlsys.core.owner import Owner
from rlsys.core.types import Sample, TokenSequence
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import BAD_ANSWER, DeadEngine, EngineError
from rlsys.engine_requests import ANY_ENGINE, Limits, RefusedPrompt
from rlsys.segments import teacher_logprobs
from rlsys.worker.assembly import client_maker, prompt_limits

UNAVAILABLE = "the teacher is unavailable"
"""Prefix of a failure's reason if the failure does not depend on the sample."""
RETRY_SECONDS = 1.0
"""Pause before another request to an unavailable teacher."""
_SERVER_ERROR = 500
"""Smallest HTTP status of an error that the server causes, not the request."""
MAX_CONCURRENT_REQUESTS = 16
"""Largest number of concurrent requests, because a result has `algo.teacher.top_k` entries per token."""

log = logging.getLogger("rlsys.rollout")


class EngineTeacher:
    """Scores responses with the teacher engine, and limits the number of concurrent requests."""

    def __init__(
        self, client: EngineClient, top_k: int, timeout_s: float, limits: Limits = ANY_ENGINE
    ) -> None:
        """Create the service.

        Args:
            client: client of the engine.
            top_k: number of most probable ids per token; 0: the sampled token only.
            timeout_s: seconds for one sequence, including time in which the engine is unavailable; the supervisor
                restarts an engine that it started.
            limits: limits of the engine on prompts and token ids.
        """
        self.client, self._top_k, self._timeout_s, self._limits = client, top_k, timeout_s, limits
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._tokens = self._unanswered = 0
        self._unavailable = False

    @property
    def counts(self) -> dict[str, float]:
        """Number of scored response tokens, and of samples without a result, by metric."""
        return {"teacher_tokens": self._tokens, "teacher_unanswered": self._unanswered}

    async def score(self, sample: Sample) -> str | None:
        """Set `teacher_logprobs` of the trained sequences of a sample that do not have them.

        Returns:
            The reason if a sequence has no result, else None.
        """
        for sequence in sample.trained_sequences:
            if sequence.taught or not sequence.tokens:
                continue
            async with self._slots:
                reason = await self._score_sequence(sequence)
            if reason is not None:
                self._unanswered += 1
                return reason
            self._tokens += sequence.tokens
        return None

    async def _score_sequence(self, sequence: TokenSequence) -> str | None:
        """Set `teacher_logprobs` of a sequence; repeat the request while the teacher is unavailable.

        Returns:
            The reason if there is no result, else None.
        """
        prompt = sequence.trained_prompt or sequence.prompt_ids
        url = self.client.url
        try:
            self._limits.check_prompt([*prompt, *sequence.response_ids])
        except RefusedPrompt as e:
            return f"algo.teacher: prompt and response: {e}"
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        ids, logp = await self.client.most_probable(
                            prompt, sequence.response_ids, self._top_k
                        )
                        self._log_availability(unavailable=False)
                        self._check(ids.ravel().tolist())
                        sequence.teacher_logprobs, sequence.taught = teacher_logprobs.encode(ids, logp), True
                        return None
                    except (*DeadEngine, EngineError) as e:
                        if isinstance(e, EngineError) and e.status < _SERVER_ERROR:
                            return f"algo.teacher: {e}"
                        self._log_availability(unavailable=True, reason=error_text(e))
                        await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            return f"{UNAVAILABLE}: {url} has not responded for {self._timeout_s:g} s"

    def _check(self, ids: Sequence[int]) -> None:
        """Check that all ids are in the policy's vocabulary.

        Raises:
            EngineError: an id is not.
        """
        try:
            self._limits.check_ids(ids)
        except RefusedPrompt as e:
            raise EngineError(f"{self.client.url}/generate: {e}", BAD_ANSWER) from None

    def _log_availability(self, *, unavailable: bool, reason: str = "") -> None:
        """Log the start and the end of an outage once, although many samples wait."""
        if unavailable and not self._unavailable:
            log.warning("the teacher at %s does not answer: %s", self.client.url, reason)
        elif self._unavailable and not unavailable:
            log.warning("the teacher at %s answers again", self.client.url)
        self._unavailable = unavailable


def build_teacher(config: Config, url: str, owner: Owner, session: ClientSession) -> EngineTeacher:
    """Return the service for the teacher engine at `url`.

    Its time limit is that of an engine start, but at most half of rollout.stall_timeout, so that waiting for the
    teacher does not count as a stall.

    Args:
        config: config of the run.
        url: address of the engine.
        owner: owner of engines that the run starts.
        session: HTTP session.
    """
    section, engine_config = config.algo.teacher, teacher_config(config)
    assert section is not None
    identity = engine_identity(owner, url) if section.engine == "own" else ANONYMOUS
    limits = prompt_limits(engine_config)
    timeout_s = min(engine_config.start_seconds, config.rollout.stall_timeout / 2)
    client = client_maker(engine_config, session)(url, identity, adapter=None)
    top_k = limits.vocab_size if section.top_k is None else min(section.top_k, limits.vocab_size)
    return EngineTeacher(client, top_k, timeout_s, limits)
