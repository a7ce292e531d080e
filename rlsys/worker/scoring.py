"""From a response to its reward, or to the reason why it has none (invariant 5: that is never a 0)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rlsys.core.imports import source_location
from rlsys.core.spans import TurnReward
from rlsys.core.texts import error_text, shorten
from rlsys.core.types import LONGEST_REASON, CensorCause, Prompt, Response, Sample, Status
from rlsys.generators.censoring import boundary
from rlsys.rewards.results import TURNS, NoMark, read_mark
from rlsys.rewards.workers import RewardError, contained


@dataclass(frozen=True)
class Verdict:
    """A reward, or the reason for none: exactly one of the two. `named`: the parts that the reward is the sum of, in
    the order of the run's first reward. `right`: whether an evaluation counts it as right. `figures`: what the reward
    function says beside the reward."""

    reward: float | None = None
    reason: str | None = None
    named: dict[str, float] | None = None
    answer: str | None = None
    right: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    turns: list[float] | None = None
    """What each turn is worth, where the reward function says it."""
    cause: CensorCause = CensorCause.REWARD
    """Of the reason."""


class Scorer:
    """Runs the reward function, so many at once, each with a time limit; waiting for a place does not count.

    A reward function is user code: whatever it raises censors one sample, is counted and told, and hurts
    nobody else. `open_reward` gives the function for one score. Whether a response has ended by itself is known to
    its sample's status; the stop id that ended it is not in the text. `hung` counts scores that did not come in time,
    `failed` those that raised, were no number, or had other parts than the first reward.
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
        self._places = asyncio.Semaphore(concurrency)
        self.scoring: list[Prompt] = []
        """Prompts whose responses the reward function has now."""
        self._parts = SameParts()
        self.hung = self.failed = 0

    async def score(self, prompt: Prompt, sample: Sample) -> Verdict:
        """Of a terminal sample."""
        prompt, response = asked_about(prompt, sample), self._response(prompt, sample)
        async with self._places, self._open_reward() as reward_fn:
            task = asyncio.ensure_future(contained(reward_fn(prompt, response)))
            self.scoring.append(prompt)
            try:
                # Not wait_for: that waits for the cancelled task to end, and a hung one may never do so.
                done, _ = await asyncio.wait({task}, timeout=self._timeout)
            finally:
                self.scoring.remove(prompt)
                task.cancel()
        if not done:
            self.hung += 1
            return Verdict(reason=f"reward took longer than rollout.reward_timeout = {self._timeout:g} s")
        verdict = self._verdict(task, prompt, response)
        self.failed += verdict.reason is not None
        return verdict

    async def verdict(self, prompt: Prompt, sample: Sample, name: str) -> Verdict:
        """Of a response in hand, within the boundary of a sample: what goes wrong on the way to the reward function
        is a reason, too. `name`: of the sample, for messages."""
        with boundary(name) as item:
            return await self.score(prompt, sample)
        assert item.censored is not None
        return Verdict(reason=item.censored.reason, cause=item.censored.cause)

    def _response(self, prompt: Prompt, sample: Sample) -> Response:
        finished, ids = sample.status is Status.FINISHED, sample.judged_ids
        ended = finished and len(ids) > 0 and ids[-1] in self._stop_ids
        return Response(
            self._decode(ids[:-1] if ended else ids),
            finished=finished,
            ids=ids,
            mask=sample.judged_mask,
            prompt_ids=sample.prompt_ids if sample.own_prompt else prompt.ids,
        )

    def _verdict(self, task: asyncio.Future[Any], prompt: Prompt, response: Response) -> Verdict:
        """Of a task that is done."""
        if task.cancelled():
            return Verdict(reason="reward was cancelled")
        if (error := task.exception()) is not None:
            if isinstance(error, NoMark):
                return Verdict(reason=f"reward {error}")
            ours = isinstance(error, RewardError)
            words = shorten(error_text(error), LONGEST_REASON // 2)
            told = words if ours else f"{type(error).__name__}: {words}{source_location(error)}"
            return Verdict(reason=f"reward raised {told}{_lacking(told, prompt)}")
        try:
            mark = read_mark(task.result())
        except NoMark as e:
            return Verdict(reason=str(e))
        verdict = self._parts.held_to(
            Verdict(mark.reward, named=mark.parts or None, figures=mark.figures, turns=mark.turns)
        )
        if verdict.reason is not None:
            return verdict
        right = mark.right
        if right is None:
            right = verdict.named is not None and next(iter(verdict.named.values())) >= 1
        return replace(verdict, answer=self._answer(prompt, response), right=right)


class SameParts:
    """Owns the names of the parts of a run's first reward; none for a plain number."""

    def __init__(self) -> None:
        self._names: list[str] | None = None

    def held_to(self, verdict: Verdict) -> Verdict:
        """With its parts in the order of the first one; without a reward when it has other parts."""
        if verdict.reward is None:
            return verdict
        names = list(verdict.named or ())
        if self._names is None:
            self._names = names
        if set(names) != set(self._names):
            return Verdict(reason=f"reward has the parts {names}, the run's first had {self._names}")
        if verdict.named is None:
            return verdict
        return replace(verdict, named={name: verdict.named[name] for name in self._names})


def asked_about(prompt: Prompt, sample: Sample) -> Prompt:
    """What a reward function is told of the response beside its text: `turn_rewards`, where an environment has said
    what its turns are worth."""
    if sample.turn_rewards is None:
        return prompt
    return replace(prompt, entry={**prompt.entry, TURNS: [mark.reward for mark in sample.turn_rewards]})


def take_turns(sample: Sample, turns: Sequence[float]) -> str | None:
    """The rewards that a reward function gives the turns of a response; the reason where they do not fit."""
    count = sum(len(q.turns()) for q in sample.trained_sequences)
    if len(turns) != count:
        return f"reward gave {len(turns)} {TURNS}, the response has {count} turns"
    sample.turn_rewards = [TurnReward(reward) for reward in turns]
    return None


def _lacking(told: str, prompt: Prompt) -> str:
    """Where the reward asked for a key that the prompt's record lacks: which record, and the keys that it has."""
    asked = re.match(r"KeyError: '([^']*)'", told)
    if asked is None or asked[1] in prompt.entry:
        return ""
    where, keys = prompt.location or f"prompt {prompt.index}", ", ".join(prompt.entry) or "none"
    hint = " (data.keys.answer=KEY takes another for it)" if asked[1] == "answer" and prompt.entry else ""
    return f": {where} has no {asked[1]}; its keys: {keys}{hint}"
