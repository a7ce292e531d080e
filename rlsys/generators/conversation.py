"""Conversation: converts the messages between one agent and the model to the tokens of a sample.

A request that starts with all messages of a conversation continues this conversation: the new messages are added to
the sequence without being trained, and the model samples the next turn. Any other request (of a sub-agent, in
parallel, or after the agent has rewritten its history) starts another conversation, which is another sequence of the
sample. With `train: first`, these other conversations are in the ledger, but not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlsys.agents.endpoint import Question
from rlsys.agents.hosting import AgentExit
from rlsys.agents.messages import (
    Answer,
    BadRequest,
    Message,
    ToolCall,
    TurnRequest,
    common_prefix,
    new_messages,
)
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, Status, TokenSequence
from rlsys.data.tokenizer import TextTooLong
from rlsys.generators.parser_client import TAIL_IDS, ToolFailed, Turn, TurnReader
from rlsys.generators.replay import BudgetExhausted, SavedTurns
from rlsys.generators.turns import GenerateTurn
from rlsys.router.router import EVALUATION, RefusedPrompt
from rlsys.router.turn_ends import TurnEnds

_NEUTRAL: Mapping[str, object] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "min_tokens": 0,
}  # fmt: skip
"""Sampling parameter -> the value that does not change the distribution."""
LIMIT_REACHED = "the conversation has reached its limit of tokens"


class Thread:
    """A conversation of the agent: a sequence of the sample, and its messages.

    Attributes:
        turns: delivers the turns of the sequence.
        history: all messages, including the last answer.
        tools: schemas of the tools.
        end_text: text of the token that ended the last turn; empty: the turn was truncated.
        busy: whether a turn is being generated.
    """

    def __init__(self, sequence: TokenSequence, turns: SavedTurns) -> None:
        self.sequence, self.turns = sequence, turns
        self.history: list[Message] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.end_text = ""
        self.busy = False

    def new_messages(self, request: TurnRequest) -> Sequence[Message] | None:
        """Return the new messages of a request that continues this conversation; None for any other request."""
        if self.busy or list(request.tools) != list(self.tools):
            return None
        return new_messages(self.history, request.messages)


class Conversation:
    """The requests of an agent for one sample, from the agent's start to its exit. Owns the messages."""

    def __init__(
        self,
        config: Config,
        rendering: Rendering,
        reader: TurnReader | None,
        generate_turn: GenerateTurn,
        ends: TurnEnds,
        sample: Sample,
        prompt: Prompt,
        counts: dict[str, int],
        *,
        train_all: bool,
        persist: Callable[[Sample], Awaitable[None]] | None = None,
    ) -> None:
        """Create the conversation of a sample.

        Args:
            config: config of the run.
            rendering: converts messages to tokens.
            reader: parses tool calls and reasoning; None: turns are plain text.
            generate_turn: generates a turn.
            ends: token ids and texts that end a turn.
            sample: the sample, to which the tokens are added.
            prompt: prompt of the sample.
            counts: counts `agent_calls`, `agent_side_calls` and `agent_sequences`, to which this object adds.
            train_all: whether all conversations are trained, instead of only the first one.
            persist: saves the sample before an answer is returned; None: answers need not be saved.
        """
        self._rollout = config.rollout
        self._rendering = rendering
        self._generate_turn = generate_turn
        self._ends = ends
        self._reader = reader
        self._may_call = config.engine.tool_call_parser is not None
        self._sample, self._prompt, self._counts = sample, prompt, counts
        self._train_all, self._persist = train_all, persist
        self._threads: list[Thread] = []  # in the order of their first requests
        self._last_thread: Thread | None = None  # the thread of the last turn, or that reached its limit
        self._turns = 0
        self._full = False
        """Whether the response has reached its limit of tokens and must end."""
        self._calls = 0
        self._questions: dict[str, Question] = {}  # key of a request -> the last question with it

    async def run(
        self,
        questions: asyncio.Queue[Question],
        exit_future: asyncio.Future[AgentExit],
        max_calls: int,
        idle_timeout: float,
    ) -> AgentExit | None:
        """Answer requests until the agent exits, or the response reaches its limit of tokens.

        Returns when all started turns have finished. A cancellation cancels them.

        Args:
            questions: requests of the agent.
            exit_future: future of the agent's exit.
            max_calls: largest number of requests.
            idle_timeout: time without a request after which the agent counts as hanging, in seconds.

        Returns:
            The agent's exit; None if the response has reached its limit.

        Raises:
            ToolFailed: the agent hangs or makes too many requests, or a turn failed.
        """
        turns: set[asyncio.Task[None]] = set()
        arriving = asyncio.ensure_future(questions.get())
        try:
            while not self._full:
                if exit_future.done() and not turns:
                    return exit_future.result()
                waits: set[asyncio.Future[Any]] = {arriving, *turns}
                if not exit_future.done():
                    waits.add(exit_future)
                timeout = None if turns else idle_timeout
                done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise ToolFailed(
                        f"sent no request for {idle_timeout:g} s after request {self._calls} "
                        "(rollout.generator_params.idle_seconds)"
                    )
                for turn in turns & done:
                    turns.remove(turn)
                    turn.result()
                if arriving.done():
                    self._count_call(max_calls)
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

    def _count_call(self, max_calls: int) -> None:
        """Count a request.

        Raises:
            ToolFailed: the agent has made more than `max_calls` requests.
        """
        self._calls += 1
        self._counts["agent_calls"] += 1
        if self._calls > max_calls:
            raise ToolFailed(f"made more than {max_calls} requests (rollout.generator_params.max_calls)")

    async def _reply(self, question: Question) -> None:
        """Set the answer of a question. If an error ends the sample, cancel the answer.

        A repetition of a request whose answer did not reach the agent gets the same answer.
        """
        key = question.request.key
        earlier = self._questions.get(key)
        if earlier is not None and (question.repeated or earlier.undelivered):
            earlier.answer.add_done_callback(lambda answer: _copy(answer, question.answer))
            return
        self._questions[key] = question
        try:
            self._check(question.request)
            answer = await self._answer(question.request)
            if self._persist is not None:
                await self._persist(self._sample)
        except (BadRequest, RefusedPrompt, TextTooLong) as e:  # the last two: longer than the context
            question.answer.set_exception(BadRequest(str(e), getattr(e, "param", None)))
        except BudgetExhausted:
            self._full = True
            question.answer.set_exception(BadRequest(LIMIT_REACHED))
        except BaseException:
            question.answer.cancel()
            raise
        else:
            question.answer.set_result(answer)

    def _check(self, request: TurnRequest) -> None:
        """Check that the model can call the tools, and that the sampling parameters are those of the run.

        Raises:
            BadRequest: a field is not supported.
        """
        if request.tools and not self._may_call:
            raise BadRequest(
                "tools require engine.tool_call_parser, the format of the model's tool calls", "tools"
            )
        r = self._rollout
        run_sampling = {
            "temperature": r.temperature,
            "top_p": r.top_p,
            "top_k": r.top_k or -1,
            "min_p": r.min_p,
        }
        for name, value in request.sampling.items():
            if name in _NEUTRAL and value != _NEUTRAL[name]:
                raise BadRequest(
                    f"{name} = {value!r}: expected {_NEUTRAL[name]!r}, because other values change the distribution "
                    "of tokens, for which the trainer cannot compute log-probs",
                    name,
                )
            if name in run_sampling and value != run_sampling[name] and self._sample.sample_id != EVALUATION:
                raise BadRequest(
                    f"{name} = {value!r}: expected no value, or rollout.{name} = {run_sampling[name]!r}, for "
                    "which the trainer computes log-probs",
                    name,
                )

    async def _answer(self, request: TurnRequest) -> Answer:
        """Generate the model's turn in the longest conversation that the request continues, or else in a new one.

        Raises:
            RefusedPrompt, BadRequest: the turn is refused; a new conversation is removed again.
        """
        continuations = [
            (thread, messages)
            for thread in self._threads
            if (messages := thread.new_messages(request)) is not None
        ]
        if continuations:
            thread, messages = max(continuations, key=lambda item: len(item[0].history))
            return await self._turn(thread, request, messages)
        thread = self._open_thread(request)
        try:
            return await self._turn(thread, request, ())
        except (RefusedPrompt, BadRequest):
            self._threads.remove(thread)  # another request may use its sequence
            raise

    def _open_thread(self, request: TurnRequest) -> Thread:
        """Return the conversation that a request starts: a saved one from before a restart, or a new one."""
        s, ids = self._sample, self._rendering.prompt(request.messages, request.tools)
        open_numbers = {thread.sequence.sequence for thread in self._threads}
        free = [q for q in s.sequences if q.sequence not in open_numbers]
        saved_sequence = next((q for q in free if q.tokens and q.prompt_ids == ids), None)
        sequence = saved_sequence or next((q for q in free if not q.tokens), None)
        if sequence is None:
            sequence = s.begin(ids, aside=not self._train_all)
        sequence.prompt_ids = ids
        if sequence is s:
            s.own_prompt = ids != self._prompt.ids
        else:
            sequence.parent = self._parent(request)
            self._counts["agent_sequences"] += saved_sequence is None
        turns = SavedTurns(self._generate_turn, self._ends, sequence, self._rollout.max_response_tokens)
        self._threads.append(thread := Thread(sequence, turns))
        return thread

    def _parent(self, request: TurnRequest) -> int | None:
        """Return the number of the sequence that has the most messages in common with the request.

        None if they have only system messages in common.
        """
        shared = [
            (common_prefix(thread.history, request.messages), thread.sequence.sequence)
            for thread in self._threads
        ]
        message_count, number = max(shared, default=(0, 0))
        return number if any(m["role"] != "system" for m in request.messages[:message_count]) else None

    async def _turn(self, thread: Thread, request: TurnRequest, messages: Sequence[Message]) -> Answer:
        """Generate the next turn of a conversation.

        Args:
            thread: the conversation.
            request: the request.
            messages: messages since the last turn.

        Raises:
            BudgetExhausted: the response has reached its limit of tokens.
            BadRequest: a conversation that is not trained has reached its limit, or a message cannot be rendered.
        """
        turns, s = thread.turns, thread.sequence
        thread.busy = True
        self._counts["agent_side_calls"] += s.aside
        try:
            if messages:
                turns.observe(self._rendering.continuation(messages, thread.tools, thread.end_text))
            start, end = await turns.turn(request.max_tokens, request.stop)
            ids = s.response_ids[start:end].tolist()
            preceding_ids = [*s.prompt_ids, *s.response_ids[:start]]
            name = f"{s.sample_id}-{start}" if not s.sequence else f"{s.sample_id}-{s.sequence}-{start}"
            answer, thread.end_text = await self._render_answer(
                name, preceding_ids, ids, turns.finish, request
            )
        except BudgetExhausted:
            if s.aside:
                raise BadRequest(LIMIT_REACHED) from None
            self._last_thread = thread
            raise
        finally:
            thread.busy = False
        self._turns += 1
        s.last_turn, self._last_thread = self._turns, thread
        thread.history, thread.tools = [*request.messages, answer.message], request.tools
        truncated = turns.finish == "length" and (
            request.max_tokens is None or end - start < request.max_tokens
        )
        self._full |= not s.aside and (truncated or end >= self._rollout.max_response_tokens)
        return answer

    async def _render_answer(
        self, name: str, preceding_ids: list[int], ids: list[int], finish: str, request: TurnRequest
    ) -> tuple[Answer, str]:
        """Convert a turn to an answer for the agent.

        Args:
            name: part of the ids of the answer and its calls, which is the same after a restart.
            preceding_ids: ids before the turn.
            ids: ids of the turn.
            finish: finish reason of the turn, `stop` or `length`.
            request: the request.

        Returns:
            The answer, and the text of the token that ended the turn (empty if it was truncated).
        """
        end_text = self._rendering.text(ids[-1:]) if finish == "stop" and ids[-1] in self._ends.ids else ""
        text = self._rendering.text(ids).removesuffix(end_text)
        if finish == "stop":
            text = min((text.partition(s)[0] for s in request.stop), key=len, default=text)
        turn = Turn(text)
        if self._reader is not None:
            turn = await self._reader(text, self._rendering.text(preceding_ids[-TAIL_IDS:]), request.tools)
        calls = tuple(ToolCall(f"call_{name}_{i}", c.name, c.arguments) for i, c in enumerate(turn.calls))
        finish_reason = "tool_calls" if calls and finish == "stop" else finish
        return Answer(
            name, turn.text, turn.reasoning, calls, finish_reason, len(preceding_ids), len(ids)
        ), end_text

    def conclude(self, *, full: bool) -> None:
        """Set the final status of the sample.

        Args:
            full: whether the response has reached its limit of tokens.

        Raises:
            ToolFailed: the agent got no answer, or did not request all saved turns.
        """
        s, last_thread = self._sample, self._last_thread
        if last_thread is None or (not full and not self._turns):
            raise ToolFailed("ended without requesting an answer of the model")
        delivered = {thread.sequence.sequence: thread.turns.delivered for thread in self._threads}
        for q in s.sequences if not full else [thread.sequence for thread in self._threads]:
            if q.tokens and q.sequence not in delivered:
                raise ToolFailed("sent other requests after a restart than before")
            if q.tokens > delivered.get(q.sequence, 0):
                raise ToolFailed("requested fewer turns after a restart than before")
        fits_budget = not full or last_thread.sequence.tokens == self._rollout.max_response_tokens
        is_complete = fits_budget and last_thread.turns.finish == "stop"
        s.status = Status.FINISHED if is_complete else Status.TRUNCATED


def _copy(answer: asyncio.Future[Answer], target: asyncio.Future[Answer]) -> None:
    """Set `target` to the result, error or cancellation of a completed answer."""
    if target.done():
        return
    if answer.cancelled():
        target.cancel()
    elif (error := answer.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(answer.result())
