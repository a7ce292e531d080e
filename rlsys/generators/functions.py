"""The generator `functions`: the model may call functions, in its own format of tool calls.

prompt  turn: ... <tool_call>{...}</tool_call> <eos> | the answer, and the header of the next turn | turn: ...
        sampled, trained                               by the chat template, not trained             sampled, trained
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlsys.agents.messages import BadRequest, read_tools
from rlsys.config import Config
from rlsys.core.errors import RowError, UserError
from rlsys.core.imports import resolve
from rlsys.core.process_pool import PoolProcessError, ProcessPool
from rlsys.core.texts import load_json
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.data.rows import tools_of
from rlsys.data.tokenizer import TextTooLong
from rlsys.generators.parser_client import TAIL_IDS, Call, TurnReader
from rlsys.router.turn_ends import TurnEnds, turn_ends

Message = dict[str, Any]
MAX_CONCURRENT_CALLS = 8
LONGEST_ERROR = 300
"""Largest length of an error that the model reads, in characters."""
_QUESTION_MARK, _TURN_MARK = "RLSYS-QUESTION", "RLSYS-TURN"


def find_functions(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Import functions. Return name -> function.

    Args:
        names: import paths, `path/to/file.py:function` or `package.module:function`.

    Raises:
        UserError: a function does not exist.
    """
    functions = [resolve("rollout.generator_params.functions", name, {}) for name in names]
    return {function.__name__: function for function in functions}


class FunctionTurns:
    """The generator `functions`. Its only state is the sample's tokens, so calls may be repeated after a crash."""

    def __init__(
        self,
        generate_turn: Callable[[Sample], Awaitable[None]],
        tokenizer: Tokenizer,
        reader: TurnReader,
        functions: Functions,
        schemas: Callable[[Prompt], Sequence[Mapping[str, Any]]],
        *,
        ends: TurnEnds,
        max_turns: int,
        max_response_tokens: int,
    ) -> None:
        """Create the generator.

        Args:
            generate_turn: generates a turn.
            tokenizer: the model's tokenizer.
            reader: parses the calls of a turn.
            functions: runs calls.
            schemas: returns the schemas of the functions that a prompt offers.
            ends: token ids and texts that end a turn.
            max_turns: largest number of turns.
            max_response_tokens: largest number of tokens of a response.
        """
        self._generate_turn = generate_turn
        self._tokenizer = tokenizer
        self._reader = reader
        self._functions = functions
        self._schemas = schemas
        self._ends = ends
        self._max_turns = max_turns
        self._budget = max_response_tokens

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        while True:
            start = sample.observed[-1].end if sample.observed else 0
            if not self._ends.is_ended(sample.response_ids[start:]):
                await self._generate_turn(sample)
                if sample.status is not Status.FINISHED:
                    return
                # At once, so that no other task sees the status FINISHED: the sample may continue.
                sample.status = Status.PARKED
            calls = await self._calls(sample, start, prompt)
            if not calls:
                sample.status = Status.FINISHED
                return
            answers = [await self._functions(call) for call in calls]
            try:
                ids = self._tokenizer.encode(self._render_answers(calls, answers, sample.response_ids[-1:]))
            except TextTooLong:
                sample.status = Status.TRUNCATED
                return
            if sample.tokens + len(ids) >= self._budget:
                sample.status = Status.TRUNCATED
                return
            sample.observe(ids)

    async def _calls(self, sample: Sample, start: int, prompt: Prompt) -> tuple[Call, ...]:
        """Return the calls of the finished turn that starts at token `start`; none if no further turn is allowed."""
        if len(sample.observed) + 1 >= self._max_turns:
            return ()
        turn = sample.response_ids[start:]
        turn_ids = turn[:-1] if turn[-1] in self._ends.ids else turn
        preceding_text = self._tokenizer.decode(
            [*sample.prompt_ids, *sample.response_ids[:start]][-TAIL_IDS:]
        )
        parsed = await self._reader(self._tokenizer.decode(turn_ids), preceding_text, self._schemas(prompt))
        return parsed.calls

    def _render_answers(self, calls: Sequence[Call], answers: Sequence[str], end: Sequence[int]) -> str:
        """Render the text between the end of a turn with `calls` and the model's next turn.

        Args:
            calls: calls of the turn.
            answers: results of the calls.
            end: id of the last token of the turn, which is not rendered again.

        Raises:
            UserError: the chat template renders a turn differently if answers follow it.
        """
        question = {"role": "user", "content": _QUESTION_MARK}
        turn, results = chat_messages(calls, answers)
        turn_text = self._tokenizer.apply_chat([question, turn], generate=False)
        full_text = self._tokenizer.apply_chat([question, turn, *results])
        if not full_text.startswith(turn_text):
            raise UserError(
                f"rollout.generator = 'functions': the chat template of {self._tokenizer.path} renders a turn with "
                "tool calls differently if answers follow; expected a template that only appends to it"
            )
        end_text = self._tokenizer.decode(end)
        turn_tail = ""
        if end_text and end_text in turn_text.partition(_TURN_MARK)[2]:
            turn_tail = turn_text.rpartition(end_text)[2]
        return turn_tail + full_text[len(turn_text) :]

    async def close(self) -> None:
        """Stop the processes of the parser and of the functions."""
        await self._reader.close()
        await self._functions.close()


def chat_messages(calls: Sequence[Call], answers: Sequence[str]) -> tuple[Message, list[Message]]:
    """Return a turn with calls and its answers as chat messages.

    Args:
        calls: calls of the turn.
        answers: result of each call.

    Returns:
        The message of the model, whose content is _TURN_MARK, and the messages with the answers.
    """
    tool_calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": c.name, "arguments": _object(c.arguments)},  # templates expect an object
        }
        for i, c in enumerate(calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": call.name, "content": answer}
        for i, (call, answer) in enumerate(zip(calls, answers, strict=True))
    ]
    return {"role": "assistant", "content": _TURN_MARK, "tool_calls": tool_calls}, results


def _object(arguments: str) -> dict[str, Any]:
    """Parse a JSON object; empty for other arguments, which the function's answer reports."""
    try:
        value = load_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Functions:
    """Runs functions in separate processes, which are killed at the time limit. Owns the processes."""

    def __init__(self, config: Config, names: Sequence[str], seconds: float) -> None:
        """Create the functions.

        Args:
            config: config of the run.
            names: import paths of the functions.
            seconds: time limit of one call, in seconds.

        Raises:
            UserError: a function does not exist.
        """
        self._functions = find_functions(names)
        self._seconds = seconds
        dumped = config.model_dump_json().encode()
        self._workers = ProcessPool(
            "rollout.generator_params.functions",
            "rlsys.generators.function_worker",
            dumped,
            config.data.reward_env,
        )
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def __call__(self, call: Call) -> str:
        """Run a call, and return its result as text; for a failed call, a line that starts with `error`."""
        if call.name not in self._functions:
            return f"error: unknown function {call.name}; expected one of {', '.join(self._functions)}"
        message = json.dumps({"name": call.name, "arguments": call.arguments}).encode()
        async with self._slots, self._workers.acquire() as worker:
            try:
                async with asyncio.timeout(self._seconds):
                    return str(await worker.call(message))
            except TimeoutError:
                return f"error: no answer within {self._seconds:g} s"
            except PoolProcessError as e:
                return f"error: {e}"[:LONGEST_ERROR]

    async def close(self) -> None:
        """Stop the processes."""
        await self._workers.close()


def functions(
    config: Config,
    tokenizer: Tokenizer,
    generate_turn: Callable[[Sample], Awaitable[None]],
    functions: Sequence[str],
    max_turns: int = 4,
    seconds: float = 30.0,
) -> FunctionTurns:
    """Create the generator of `rollout.generator: functions`.

    Args:
        config: config of the run.
        tokenizer: the model's tokenizer.
        generate_turn: generates a turn.
        functions: import paths, `path/to/file.py:function` or `package.module:function`.
        max_turns: largest number of turns.
        seconds: time limit of one call, in seconds.

    Raises:
        UserError: engine.tool_call_parser is not set, or a function does not exist.
    """
    if config.engine.tool_call_parser is None:
        raise UserError(
            "rollout.generator = 'functions' requires engine.tool_call_parser, the format of the model's tool calls"
        )
    default_tools = config.data.chat_template_args.get("tools") or []

    def schemas(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        location = prompt.location or f"prompt {prompt.index}"
        tools = tools_of(prompt.entry, config.data.keys.tools, location) or default_tools
        if not tools:
            raise RowError(
                f"{location}: has no tools, which rollout.generator = 'functions' requires; expected function "
                "schemas in the row's tools or in data.chat_template_args.tools"
            )
        try:
            return read_tools(tools, "tools")
        except BadRequest as e:
            raise RowError(f"{location}: {e}") from None

    return FunctionTurns(
        generate_turn,
        tokenizer,
        TurnReader(config),
        Functions(config, functions, seconds),
        schemas,
        ends=turn_ends(config, tokenizer),
        max_turns=max_turns,
        max_response_tokens=config.rollout.max_response_tokens,
    )
