"""The generator `functions`: turns of the model with function calls between them, in the model's own format.

prompt  turn: ... <tool_call>{...}</tool_call> <eos>  |  the answer, and the opening of the next turn  |  turn:
...
        sampled, trained                                 by the chat template, not trained               sampled
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
    """Return name -> function, for import paths of functions.

    Raises:
        UserError: a function does not exist.
    """
    functions = [resolve("rollout.generator_params.functions", name, {}) for name in names]
    return {function.__name__: function for function in functions}


class FunctionTurns:
    """The generator `functions`. Its state is in the sample's tokens: after a crash, calls may be repeated."""

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
            schemas: returns the schemas of the functions that a prompt offers.
            ends: what ends a turn.
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
                # Now, before a reader sees the status: the turn has ended, but possibly not the sample.
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
        """Return the calls of the finished turn that starts at `start`; empty if it is the last allowed turn."""
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
        """Render the text between the end of a turn with `calls` and the next turn of the model.

        Args:
            calls: calls of the turn.
            answers: results of the calls.
            end: the id that ended the turn; the model generated it.

        Raises:
            UserError: the template renders a turn differently if answers follow it.
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
        mark = self._tokenizer.decode(end)
        turn_tail = (
            turn_text.rpartition(mark)[2] if mark and mark in turn_text.partition(_TURN_MARK)[2] else ""
        )
        return turn_tail + full_text[len(turn_text) :]

    async def close(self) -> None:
        await self._reader.close()
        await self._functions.close()


def chat_messages(calls: Sequence[Call], answers: Sequence[str]) -> tuple[Message, list[Message]]:
    """Return a turn with `calls`, and its answers, as chat messages. Templates expect arguments as objects."""
    tool_calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": c.name, "arguments": _object(c.arguments)},
        }
        for i, c in enumerate(calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{i}", "name": call.name, "content": answer}
        for i, (call, answer) in enumerate(zip(calls, answers, strict=True))
    ]
    return {"role": "assistant", "content": _TURN_MARK, "tool_calls": tool_calls}, results


def _object(arguments: str) -> dict[str, Any]:
    """Parse a JSON object. Invalid arguments become an empty object: the function's answer reports them."""
    try:
        value = load_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Functions:
    """Runs calls in processes that can be killed. The answer of a failed call is a line that starts with `error`."""

    def __init__(self, config: Config, names: Sequence[str], seconds: float) -> None:
        """Create the functions.

        Args:
            config: config of the run.
            names: import paths of the functions.
            seconds: time limit of one call.

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
        if call.name not in self._functions:
            return f"error: there is no function {call.name}; there are {', '.join(self._functions)}"
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
        functions: `path/to/file.py:function` or `package.module:function`.
        seconds: time limit of one call.
    """
    if config.engine.tool_call_parser is None:
        raise UserError(
            "rollout.generator = 'functions' requires engine.tool_call_parser, the format of the model's tool calls"
        )
    offered = config.data.chat_template_args.get("tools") or []

    def schemas(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        tools = tools_of(prompt.entry, config.data.keys.tools, prompt.location or "the prompt") or offered
        if not tools:
            raise RowError(
                f"{prompt.location or 'the prompt'}: it offers no tools, which rollout.generator = 'functions' "
                "requires; expected schemas under tools, or in data.chat_template_args.tools"
            )
        try:
            return read_tools(tools, "tools")
        except BadRequest as e:
            raise RowError(f"{prompt.location or 'the prompt'}: {e}") from None

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
