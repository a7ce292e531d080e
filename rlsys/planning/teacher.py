"""A teacher that is an engine: it is asked about finished responses, and what it says is trained on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import ClientSession

from rlsys.config import Config
from rlsys.config.beside import teacher_config
from rlsys.core.identity import ANONYMOUS, engine_identity
from rlsys.core.owner import Owner
from rlsys.core.types import Sample
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import BAD_ANSWER, DeadEngine, EngineError
from rlsys.engine_requests import ANY_ENGINE, Limits, RefusedPrompt
from rlsys.segments import teacher_logprobs
from rlsys.worker.assembly import client_maker, prompt_limits

AWAY = "the teacher is away"
"""Reasons begin with it that say nothing about the sample."""
AGAIN_SECONDS = 1.0
_ITS_FAULT = 500
"""The first of the HTTP statuses that say nothing against the request: the server fails, or it is about to die."""
AT_ONCE = 16
"""Responses that it is asked about at the same time: an answer has `algo.teacher.top_k` entries for each token."""

log = logging.getLogger("rlsys.rollout")


class EngineTeacher:
    """Owns how many responses it is asked about at once, and counts."""

    def __init__(
        self, client: EngineClient, top_k: int, patience: float, limits: Limits = ANY_ENGINE
    ) -> None:
        """`patience`: seconds for one answer, in which the teacher may be away (the supervisor restarts one that it
        started). `limits`: of its engine."""
        self.client, self._top_k, self._patience, self._limits = client, top_k, patience, limits
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._tokens = self._unanswered = 0
        self._away = False

    @property
    def counts(self) -> dict[str, float]:
        """Response tokens that it scored; samples without an answer."""
        return {"teacher_tokens": self._tokens, "teacher_unanswered": self._unanswered}

    async def ask(self, sample: Sample) -> str | None:
        """Set `teacher_logprobs` of all trained sequences without; returns why that is impossible, None when done."""
        for sequence in sample.trained_sequences:
            if sequence.taught or not sequence.tokens:
                continue
            async with self._turn:
                reason = await self._ask(sequence)
            if reason is not None:
                self._unanswered += 1
                return reason
            self._tokens += sequence.tokens
        return None

    async def _ask(self, sequence: Sample) -> str | None:
        prompt = sequence.trained_prompt or sequence.prompt_ids
        url = self.client.url
        try:
            self._limits.check_prompt([*prompt, *sequence.response_ids])
        except RefusedPrompt as e:
            return f"algo.teacher: with its response, {e}"
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    try:
                        ids, logp = await self.client.most_probable(
                            prompt, sequence.response_ids, self._top_k
                        )
                        self._tell(away=False)
                        self._check(ids.ravel().tolist())
                        sequence.teacher_logprobs, sequence.taught = teacher_logprobs.encode(ids, logp), True
                        return None
                    except (*DeadEngine, EngineError) as e:
                        if isinstance(e, EngineError) and e.status < _ITS_FAULT:
                            return f"algo.teacher: {e}"
                        self._tell(away=True, why=str(e) or type(e).__name__)
                        await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError:
            return f"{AWAY}: {url} has not answered for {self._patience:g} s"

    def _check(self, ids: Sequence[int]) -> None:
        """Raises EngineError for an id that the policy does not have."""
        try:
            self._limits.check_ids(ids)
        except RefusedPrompt as e:
            raise EngineError(f"{self.client.url}/generate: {e}", BAD_ANSWER) from None

    def _tell(self, *, away: bool, why: str = "") -> None:
        """Once an outage: many samples ask."""
        if away and not self._away:
            log.warning("the teacher at %s does not answer: %s", self.client.url, why)
        elif self._away and not away:
            log.warning("the teacher at %s answers again", self.client.url)
        self._away = away


def build_teacher(config: Config, url: str, owner: Owner, session: ClientSession) -> EngineTeacher:
    """The one that answers at `url`. It may be away for as long as it takes to start, but not so long that a wait for
    groups counts as a stall."""
    section, its = config.algo.teacher, teacher_config(config)
    assert section is not None
    whose = engine_identity(owner, url) if section.engine == "own" else ANONYMOUS
    limits = prompt_limits(its)
    patience = min(its.start_seconds, config.rollout.stall_timeout / 2)
    client = client_maker(its, session)(url, whose, adapter=None)
    top_k = min(section.top_k or limits.vocab_size, limits.vocab_size)
    return EngineTeacher(client, top_k, patience, limits)
