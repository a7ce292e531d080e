"""Scorer: computes the reward of a response, or the reason why it has none (invariant 5: failures are not 0)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.core.spans import TurnReward
from rlsys.core.texts import error_text, shorten
from rlsys.core.types import LONGEST_REASON, CensorCause, Prompt, Response, Sample, Status
from rlsys.generators.censoring import boundary
from rlsys.rewards.results import TURNS, InvalidReward, parse_reward
from rlsys.rewards.workers import RewardError, Row, contained, location_and_row


@dataclass(frozen=True)
class Verdict:
    """A reward, or the reason why there is none; exactly one of the two is set.

    Attributes:
        reward: the reward of the response.
        reason: why there is no reward.
        parts: the summands of the reward, in the order of the run's first reward; None: a plain number.
        answer: the canonical answer of the response, if it has one.
        right: whether an evaluation counts the response as correct.
        metrics: additional metrics of the reward function.
        turns: reward of each turn, if the reward function returns them.
        cause: cause that is counted if there is no reward.
    """

    reward: float | None = None
    reason: str | None = None
    parts: dict[str, float] | None = None
    answer: str | None = None
    right: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[float] | None = None
    cause: CensorCause = CensorCause.REWARD


class Scorer:
    """Runs the reward function with limited concurrency and time. Waiting for a slot is not limited.

    A reward function is user code: an exception censors its sample, is counted and reported, and affects no other
    sample. The text that is scored does not include the stop id.

    Args:
        open_reward: provides the reward function for one score.
        decode: decodes token ids.
        timeout: largest number of seconds of one score.
        answer: returns the canonical answer of a response; None: it has none.
        concurrency: largest number of concurrent scores.
        stop_ids: ids that end a response.

    Attributes:
        timeouts: number of scores that exceeded `timeout`.
        failures: number of scores that raised an error, returned no valid reward, or returned other parts than the
            run's first reward.
    """

    def __init__(
        self,
        open_reward: Callable[[], AbstractAsyncContextManager[Callable[[Prompt, Response], Awaitable[Any]]]],
        decode: Callable[[Sequence[int]], str],
        timeout: float,
        answer: Callable[[Prompt, Response], str | None] = lambda prompt, response: None,
        concurrency: int = 4,
        stop_ids: Collection[int] = (),
    ) -> None:
        self._open_reward = open_reward
        self._decode = decode
        self._answer, self._stop_ids = answer, stop_ids
        self._timeout = timeout
        self._semaphore = asyncio.Semaphore(concurrency)
        self.scoring: list[Prompt] = []
        """Prompts whose responses are being scored."""
        self._parts = RewardParts()
        self.timeouts = self.failures = 0

    async def score(self, prompt: Prompt, sample: Sample) -> Verdict:
        """Score a terminal sample."""
        prompt = with_turn_rewards(prompt, sample)
        response = self._response(prompt, sample)
        tracked_prompt = replace(prompt, entry=Row(prompt))
        async with self._semaphore, self._open_reward() as reward_fn:
            task = asyncio.ensure_future(contained(reward_fn(tracked_prompt, response)))
            self.scoring.append(prompt)
            try:
                # asyncio.wait_for would wait for the cancelled task, which may never end.
                finished_tasks, _ = await asyncio.wait({task}, timeout=self._timeout)
            finally:
                self.scoring.remove(prompt)
                task.cancel()
        if not finished_tasks:
            self.timeouts += 1
            return Verdict(reason=f"reward took longer than rollout.reward_timeout = {self._timeout:g} s")
        verdict = self._verdict(task, prompt, response)
        self.failures += verdict.reason is not None
        return verdict

    async def verdict(self, prompt: Prompt, sample: Sample, name: str) -> Verdict:
        """Score a terminal sample. Errors outside the reward function also become the reason of the verdict.

        Args:
            name: name of the sample in messages.
        """
        with boundary(name) as item:
            return await self.score(prompt, sample)
        assert item.censored is not None
        return Verdict(reason=item.censored.reason, cause=item.censored.cause)

    def _response(self, prompt: Prompt, sample: Sample) -> Response:
        finished, ids = sample.status is Status.FINISHED, sample.judged_ids
        ends_with_stop = finished and len(ids) > 0 and ids[-1] in self._stop_ids
        return Response(
            self._decode(ids[:-1] if ends_with_stop else ids),
            finished=finished,
            ids=ids,
            mask=sample.judged_mask,
            prompt_ids=sample.prompt_ids if sample.own_prompt else prompt.ids,
        )

    def _verdict(self, task: asyncio.Future[Any], prompt: Prompt, response: Response) -> Verdict:
        """Convert the result of a finished reward task to a verdict."""
        if task.cancelled():
            return Verdict(reason="reward was cancelled")
        if (error := task.exception()) is not None:
            if isinstance(error, InvalidReward):
                return Verdict(reason=f"reward {error}")
            message = shorten(error_text(error), LONGEST_REASON // 2)
            if not isinstance(error, RewardError):
                message = f"{type(error).__name__}: {message}{location_and_row(error)}"
            return Verdict(reason=f"reward raised {message}")
        try:
            result = parse_reward(task.result())
        except InvalidReward as e:
            return Verdict(reason=str(e))
        verdict = self._parts.conform(
            Verdict(result.reward, parts=result.parts or None, metrics=result.metrics, turns=result.turns)
        )
        if verdict.reason is not None:
            return verdict
        right = result.right
        if right is None:
            right = verdict.parts is not None and next(iter(verdict.parts.values())) >= 1
        return replace(verdict, answer=self._answer(prompt, response), right=right)


class RewardParts:
    """Checks the parts of rewards. Owns the part names of the run's first reward; a plain number has none."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def conform(self, verdict: Verdict) -> Verdict:
        """Return the verdict with its parts in the order of the run's first reward.

        If the part names differ, return a verdict without a reward.
        """
        if verdict.reward is None:
            return verdict
        names = list(verdict.parts or ())
        if self._names is None:
            self._names = names
        if set(names) != set(self._names):
            return Verdict(
                reason=f"reward has the parts {names}, expected those of the run's first reward: {self._names}"
            )
        if verdict.parts is None:
            return verdict
        return replace(verdict, parts={name: verdict.parts[name] for name in self._names})


def with_turn_rewards(prompt: Prompt, sample: Sample) -> Prompt:
    """Return the prompt with the sample's turn rewards as row entry TURNS, if the environment gave any."""
    if sample.turn_rewards is None:
        return prompt
    return replace(prompt, entry={**prompt.entry, TURNS: [result.reward for result in sample.turn_rewards]})


def set_turn_rewards(sample: Sample, turns: Sequence[float]) -> str | None:
    """Set the rewards of a response's turns.

    Returns:
        the reason if their number is wrong, otherwise None.
    """
    count = sum(len(q.turns()) for q in sample.trained_sequences)
    if len(turns) != count:
        return f"reward returned {len(turns)} {TURNS}, expected {count}, one for each turn of the response"
    sample.turn_rewards = [TurnReward(reward) for reward in turns]
    return None
