"""What is said between one agent and the model: the conversations of one run, and the sample made of them.

A question that begins with all that was said before in a conversation is its next turn: what is new in it is rendered
and not trained, the turn's tokens are those that were sampled. Any other question (a sub-agent's, a parallel one, or
one after the agent has rewritten its history) begins a conversation of its own, a further sequence of the sample.
With `train: first` these are on the side: in the ledger, but not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlsys.agents.endpoint import Question
from rlsys.agents.hosting import Ended
from rlsys.agents.messages import Answer, Asked, BadRequest, Message, ToolCall, behind, common
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data.tokenizer import TextTooLong
from rlsys.generators.parser_client import TAIL_IDS, ToolFailed, Turn, TurnReader
from rlsys.generators.replay import Full, SavedTurns
from rlsys.generators.turns import Speak
from rlsys.router.router import EVALUATION, RefusedPrompt
from rlsys.router.turn_ends import TurnEnds

_OFF: Mapping[str, object] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "min_tokens": 0,
}  # fmt: skip
"""Sampling parameters, and the value that changes no distribution."""

NO_ROOM = "this conversation has no room for another answer"


class Thread:
    """One conversation: a sequence of the sample, and what was said in it."""

    def __init__(self, sequence: Sample, turns: SavedTurns) -> None:
        self.sequence, self.turns = sequence, turns
        self.history: list[Message] = []  # with its last answer
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.last = ""  # text of the token that ended the last turn
        self.busy = False  # a turn of it is being made

    def behind(self, asked: Asked) -> Sequence[Message] | None:
        """What is new in a question that is the next one here; None: it is none."""
        if self.busy or list(asked.tools) != list(self.tools):
            return None
        return behind(self.history, asked.messages)


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
        counts: dict[str, int],
        *,
        train_all: bool,
        saved: Callable[[Sample], Awaitable[None]] | None = None,
    ) -> None:
        """`reader`: of tool calls and reasoning; None: a turn is its text. `counts`: `agent_calls`,
        `agent_side_calls` and `agent_sequences` are counted there. `train_all`: conversations after the first too.
        `saved`: awaited before an answer is told."""
        self._rollout, self._rendering, self._speak, self._ends = config.rollout, rendering, speak, ends
        self._reader, self._may_call = reader, config.engine.tool_call_parser is not None
        self._sample, self._prompt, self._counts = sample, prompt, counts
        self._train_all, self._saved = train_all, saved
        self._threads: list[Thread] = []  # in the order of their first questions
        self._spoke: Thread | None = None  # that which spoke last, or had no room for it
        self._turns = 0
        self._full = False
        """There is no room for another turn: whatever the agent does next, the response ends."""
        self._calls = 0
        self._asked: dict[str, Question] = {}  # the last one of each key

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
            if self._saved is not None:
                await self._saved(self._sample)
        except (BadRequest, RefusedPrompt, TextTooLong) as e:  # the latter two: longer than the context
            question.answer.set_exception(BadRequest(str(e), getattr(e, "param", None)))
        except Full:
            self._full = True
            question.answer.set_exception(BadRequest(NO_ROOM))
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
        nexts = [(thread, new) for thread in self._threads if (new := thread.behind(asked)) is not None]
        if nexts:
            thread, new = max(nexts, key=lambda found: len(found[0].history))
            return await self._turn(thread, asked, new)
        thread = self._begun(asked)
        try:
            return await self._turn(thread, asked, ())
        except (RefusedPrompt, BadRequest):
            self._threads.remove(thread)  # another question may have its place
            raise

    def _begun(self, asked: Asked) -> Thread:
        """A conversation that this question begins: one that was saved and not asked for since, or a new one."""
        s, ids = self._sample, self._rendering.prompt(asked.messages, asked.tools)
        known = {thread.sequence.sequence for thread in self._threads}
        free = [q for q in s.sequences if q.sequence not in known]
        saved = next((q for q in free if q.tokens and q.prompt_ids == ids), None)
        sequence = saved or next((q for q in free if not q.tokens), None)
        if sequence is None:
            sequence = s.begin(ids, aside=not self._train_all)
        sequence.prompt_ids = ids
        if sequence is s:
            s.own_prompt = ids != self._prompt.ids
        else:
            sequence.parent = self._parent(asked)
            self._counts["agent_sequences"] += saved is None
        turns = SavedTurns(self._speak, self._ends, sequence, self._rollout.max_response_tokens)
        self._threads.append(thread := Thread(sequence, turns))
        return thread

    def _parent(self, asked: Asked) -> int | None:
        """The conversation with which the question shares most of what was said, its system message aside."""
        shared = [
            (common(thread.history, asked.messages), thread.sequence.sequence) for thread in self._threads
        ]
        said, number = max(shared, default=(0, 0))
        return number if any(m["role"] != "system" for m in asked.messages[:said]) else None

    async def _turn(self, thread: Thread, asked: Asked, new: Sequence[Message]) -> Answer:
        """Its next turn, behind `new` messages."""
        thread.busy, turns, s = True, thread.turns, thread.sequence
        self._counts["agent_side_calls"] += s.aside
        try:
            if new:
                turns.observe(self._rendering.behind(new, thread.tools, thread.last))
            start, end = await turns.turn(asked.most, asked.stop)
            ids = s.response_ids[start:end].tolist()
            before = [*s.prompt_ids, *s.response_ids[:start]]
            name = f"{s.sample_id}-{start}" if not s.sequence else f"{s.sample_id}-{s.sequence}-{start}"
            answer, thread.last = await self._told_as(name, before, ids, turns.finish, asked)
        except Full:
            if s.aside:
                raise BadRequest(NO_ROOM) from None
            self._spoke = thread
            raise
        finally:
            thread.busy = False
        self._turns += 1
        s.last_turn, self._spoke = self._turns, thread
        thread.history, thread.tools = [*asked.messages, answer.message], asked.tools
        cut = turns.finish == "length" and (asked.most is None or end - start < asked.most)
        self._full |= not s.aside and (cut or end >= self._rollout.max_response_tokens)
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
        s, last = self._sample, self._spoke
        if last is None or (not full and not self._turns):
            raise ToolFailed("ended without an answer of the model")
        heard = {thread.sequence.sequence: thread.turns.heard for thread in self._threads}
        for q in s.sequences if not full else [thread.sequence for thread in self._threads]:
            if q.tokens and q.sequence not in heard:
                raise ToolFailed("asked something else after a restart than before")
            if q.tokens > heard.get(q.sequence, 0):
                raise ToolFailed("asked for less after a restart than before")
        within = not full or last.sequence.tokens == self._rollout.max_response_tokens
        s.status = Status.FINISHED if within and last.turns.finish == "stop" else Status.TRUNCATED


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
