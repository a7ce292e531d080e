"""What is said between one agent and the model, and which of it is the sample.

The first question makes the sample's prompt. A question that begins with all that was said before is the next turn:
what is new in it is rendered and not trained, the turn's tokens are those that were sampled. Any other question (a
sub-agent's, or one after the agent has rewritten its history) is answered on the side: sampled by the same weights,
but outside of the sample and its training, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.agents.endpoint import Question
from rlsys.agents.hosting import Ended
from rlsys.agents.messages import Answer, Asked, BadRequest, Message, ToolCall, behind
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.rollout.saved_turns import Full, SavedTurns
from rlsys.rollout.turn_reader import ToolFailed, Turn, TurnReader
from rlsys.rollout.turns import Speak
from rlsys.router.router import EVALUATION, RefusedPrompt
from rlsys.router.turn_ends import TurnEnds
from rlsys.types import Prompt, Sample, Status

_OFF: Mapping[str, object] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "min_tokens": 0,
}  # fmt: skip
"""Sampling parameters, and the value that changes no distribution."""
LARGEST_SEED = 2**31 - 1
TAIL_IDS = 64
"""Ids before a turn that are decoded to see whether they opened reasoning."""


class Conversation:
    """One run of an agent over one sample. Owns what was said in it; the tokens are the sample's."""

    def __init__(
        self,
        config: Config,
        rendering: Rendering,
        reader: TurnReader | None,
        speak: Speak,
        ends: TurnEnds,
        sample: Sample,
        prompt: Prompt,
        sides: dict[str, list[Answer]],
        counts: dict[str, int],
    ) -> None:
        """`reader`: of tool calls and reasoning; None: a turn is its text. `sides`: answers on the side that earlier
        runs of the agent were given, by question; told again, and added to. `counts`: `agent_calls` and
        `agent_side_calls` are counted there."""
        self._rollout, self._rendering, self._speak, self._ends = config.rollout, rendering, speak, ends
        self._reader, self._may_call = reader, config.engine.tool_call_parser is not None
        self._sample, self._prompt, self._counts = sample, prompt, counts
        self._turns = SavedTurns(speak, ends, sample, config.rollout.max_response_tokens)
        self._history: list[Message] = []  # of the sample, with its last answer
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._last = ""  # text of the token that ended the last turn
        self._busy = False  # a turn of the sample is being made
        self._full = False
        """There is no room for another turn: whatever the agent does next, the response ends."""
        self._calls = 0
        self._asked: dict[str, Question] = {}  # the last one of each key
        self._sides, self._told = sides, dict.fromkeys(sides, 0)

    async def lead(
        self,
        questions: asyncio.Queue[Question],
        ended: asyncio.Future[Ended],
        max_calls: int,
        patience: float,
    ) -> Ended | None:
        """Until the agent has ended; None: the response has no room for what it asked. No turn is cut off: all that
        began have ended before this does, but for a cancellation, which comes after an interrupt.

        Raises what a turn raises, and ToolFailed for an agent that stands still or asks for ever.
        """
        turns: set[asyncio.Task[None]] = set()
        arriving = asyncio.ensure_future(questions.get())
        try:
            while not self._full:
                if ended.done() and not turns:
                    return ended.result()
                waits: set[asyncio.Future[Any]] = {arriving, *turns}
                if not ended.done():
                    waits.add(ended)
                limit = None if turns else patience
                done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise ToolFailed(
                        f"did nothing for {patience:g} s after request {self._calls} "
                        "(rollout.generator_params.patience)"
                    )
                for turn in turns & done:
                    turns.remove(turn)
                    turn.result()
                if arriving.done():
                    self._count(max_calls)
                    turns.add(asyncio.create_task(self._reply(arriving.result())))
                    arriving = asyncio.ensure_future(questions.get())
            return None
        except asyncio.CancelledError:
            for turn in turns:
                turn.cancel()
            raise
        finally:
            arriving.cancel()
            if turns:
                await asyncio.gather(*turns, return_exceptions=True)

    def _count(self, max_calls: int) -> None:
        self._calls += 1
        self._counts["agent_calls"] += 1
        if self._calls > max_calls:
            raise ToolFailed(f"made more than {max_calls} requests (rollout.generator_params.max_calls)")

    async def _reply(self, question: Question) -> None:
        """Set its answer; cancelled where there will be none."""
        key = question.asked.key
        earlier = self._asked.get(key)
        if earlier is not None and (question.again or earlier.lost):
            earlier.answer.add_done_callback(lambda answer: _copy(answer, question.answer))
            return
        self._asked[key] = question
        try:
            self._check(question.asked)
            answer = await self._answer(question.asked)
        except (BadRequest, RefusedPrompt) as e:  # the latter: longer than an engine's context
            question.answer.set_exception(BadRequest(str(e), getattr(e, "param", None)))
        except Full:
            self._full = True
            question.answer.cancel()
        except BaseException:
            question.answer.cancel()
            raise
        else:
            question.answer.set_result(answer)

    def _check(self, asked: Asked) -> None:
        if asked.tools and not self._may_call:
            raise BadRequest(
                "tools need engine.tool_call_parser, the format in which the model calls them", "tools"
            )
        r = self._rollout
        mine = {"temperature": r.temperature, "top_p": r.top_p, "top_k": r.top_k or -1, "min_p": r.min_p}
        for name, value in asked.sampling.items():
            if name in _OFF and value != _OFF[name]:
                raise BadRequest(
                    f"{name} = {value!r} changes the distribution that tokens are drawn from; the trainer would "
                    "compute the log-probs of another one",
                    name,
                )
            if name in mine and value != mine[name] and self._sample.sample_id != EVALUATION:
                raise BadRequest(
                    f"{name} = {value!r}, but rollout.{name} = {mine[name]!r}: the trainer computes the log-probs of "
                    "all tokens at the run's own sampling; leave it out",
                    name,
                )

    async def _answer(self, asked: Asked) -> Answer:
        if not self._busy and not self._history:
            return await self._turn(asked, None)
        same = not self._busy and list(asked.tools) == list(self._tools)
        new = behind(self._history, asked.messages) if same else None
        return await (self._side(asked) if new is None else self._turn(asked, new))

    async def _turn(self, asked: Asked, new: Sequence[Message] | None) -> Answer:
        """The sample's next turn, behind `new` messages; None: its first."""
        self._busy = True
        try:
            if new is None:
                self._open(asked)
            else:
                self._turns.observe(self._rendering.behind(new, self._tools, self._last))
            start, end = await self._turns.turn(asked.most, asked.stop)
            s, finish = self._sample, self._turns.finish
            ids = s.response_ids[start:end].tolist()
            before = [*s.prompt_ids, *s.response_ids[:start]]
            answer, self._last = await self._told_as(f"{s.sample_id}-{start}", before, ids, finish, asked)
        finally:
            self._busy = False
        self._history = [*asked.messages, answer.message]
        self._tools = asked.tools
        cut = finish == "length" and (asked.most is None or end - start < asked.most)
        self._full = cut or end >= self._rollout.max_response_tokens
        return answer

    def _open(self, asked: Asked) -> None:
        """The first question is the sample's prompt."""
        s, ids = self._sample, self._rendering.prompt(asked.messages, asked.tools)
        if s.tokens and s.prompt_ids != ids:
            raise ToolFailed("asked something else after a restart than before")
        s.prompt_ids, s.own_prompt = ids, ids != self._prompt.ids

    async def _side(self, asked: Asked) -> Answer:
        """On the side: the same to an agent that asks the same again after it was killed."""
        self._counts["agent_side_calls"] += 1
        saved, told = self._sides.setdefault(asked.key, []), self._told.get(asked.key, 0)
        self._told[asked.key] = told + 1
        if told < len(saved):
            return saved[told]
        number = sum(map(len, self._sides.values())) + 1
        ids = self._rendering.prompt(asked.messages, asked.tools)
        side = Sample(EVALUATION, EVALUATION, 0, ids, seed=1 + (self._sample.seed + number) % LARGEST_SEED)
        await self._speak(side, most=asked.most, stop_texts=asked.stop)
        finish = "stop" if side.status is Status.FINISHED else "length"
        name, made = f"{self._sample.sample_id}-side-{number}", side.response_ids.tolist()
        answer, _ = await self._told_as(name, ids, made, finish, asked)
        saved.append(answer)
        return answer

    async def _told_as(
        self, name: str, before: list[int], ids: list[int], finish: str, asked: Asked
    ) -> tuple[Answer, str]:
        """The turn `ids` behind the ids `before`, as the agent hears it, and the text of the token that ended it.
        `name`: makes ids of the answer and its calls, the same ones whenever the turn is told."""
        last = self._rendering.text(ids[-1:]) if finish == "stop" and ids[-1] in self._ends.ids else ""
        text = self._rendering.text(ids).removesuffix(last)
        if finish == "stop":
            text = min((text.partition(s)[0] for s in asked.stop), key=len, default=text)
        turn = Turn(text)
        if self._reader is not None:
            turn = await self._reader(text, self._rendering.text(before[-TAIL_IDS:]), asked.tools)
        calls = tuple(ToolCall(f"call_{name}_{i}", c.name, c.arguments) for i, c in enumerate(turn.calls))
        ended = "tool_calls" if calls and finish == "stop" else finish
        return Answer(name, turn.text, turn.reasoning, calls, ended, len(before), len(ids)), last

    def conclude(self, *, full: bool) -> None:
        """The agent has ended by itself, or (`full`) there was no room for more. Raises ToolFailed when it has not
        used what it was told before."""
        s = self._sample
        if not full and not self._turns.heard:
            raise ToolFailed("ended without an answer of the model")
        if s.tokens > self._turns.heard:
            raise ToolFailed("asked for less after a restart than before")
        within = not full or s.tokens == self._rollout.max_response_tokens
        s.status = Status.FINISHED if within and self._turns.finish == "stop" else Status.TRUNCATED


def _copy(answer: asyncio.Future[Answer], to: asyncio.Future[Answer]) -> None:
    """What became of one answer becomes of the other."""
    if to.done():
        return
    if answer.cancelled():
        to.cancel()
    elif (error := answer.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(answer.result())
