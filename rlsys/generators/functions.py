"""Turns of the model with functions between them, which it calls in its own format of tool calls.

prompt  turn: ... <tool_call>{...}</tool_call> <eos>  |  the answer, and what opens the next turn  |  turn: ... <eos>
        sampled, trained                                 by the chat template, not trained            sampled, trained
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
CALLS_AT_ONCE = 8
LONGEST_ERROR = 300
"""Characters of an error that the model is told."""
_ASKED, _SAID = "RLSYS-QUESTION", "RLSYS-TURN"


def find_functions(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """By the name that the model calls them. Raises UserError for one that is not there."""
    found = [resolve("rollout.generator_params.functions", name, {}) for name in names]
    return {function.__name__: function for function in found}


class FunctionTurns:
    """A generator (generator.py). All it knows of a sample is in the sample's tokens: after a crash, the calls of a
    turn may be made a second time."""

    def __init__(
        self,
        speak: Callable[[Sample], Awaitable[None]],
        tokenizer: Tokenizer,
        reader: TurnReader,
        functions: Functions,
        schemas: Callable[[Prompt], Sequence[Mapping[str, Any]]],
        *,
        ends: TurnEnds,
        max_turns: int,
        max_response_tokens: int,
    ) -> None:
        """`schemas`: of the functions that a prompt offers. The model gets at most `max_turns` turns."""
        self._speak = speak
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
                await self._speak(sample)
                if sample.status is not Status.FINISHED:
                    return
                # At once, before anybody can look: the turn has ended, the sample perhaps not.
                sample.status = Status.PARKED
            calls = await self._calls(sample, start, prompt)
            if not calls:
                sample.status = Status.FINISHED
                return
            answers = [await self._functions(call) for call in calls]
            try:
                ids = self._tokenizer.encode(self._rendered(calls, answers, sample.response_ids[-1:]))
            except TextTooLong:
                sample.status = Status.TRUNCATED
                return
            if sample.tokens + len(ids) >= self._budget:
                sample.status = Status.TRUNCATED
                return
            sample.observe(ids)

    async def _calls(self, sample: Sample, start: int, prompt: Prompt) -> tuple[Call, ...]:
        """Of the turn that begins at `start` and has ended; none when no other turn may follow."""
        if len(sample.observed) + 1 >= self._max_turns:
            return ()
        turn = sample.response_ids[start:]
        own = turn[:-1] if turn[-1] in self._ends.ids else turn
        before = self._tokenizer.decode([*sample.prompt_ids, *sample.response_ids[:start]][-TAIL_IDS:])
        read = await self._reader(self._tokenizer.decode(own), before, self._schemas(prompt))
        return read.calls

    def _rendered(self, calls: Sequence[Call], answers: Sequence[str], end: Sequence[int]) -> str:
        """What the chat template writes between the end of a turn with `calls` and the next turn of the model. `end`:
        the id that ended the turn; the model has said it itself.

        Raises UserError for a template that renders a turn differently once answers follow.
        """
        asked = {"role": "user", "content": _ASKED}
        turn, results = messages_of(calls, answers)
        before = self._tokenizer.apply_chat([asked, turn], generate=False)
        whole = self._tokenizer.apply_chat([asked, turn, *results])
        if not whole.startswith(before):
            raise UserError(
                f"rollout.generator = 'functions': the chat template of {self._tokenizer.path} writes a turn with "
                "tool calls in another way once answers follow it; expected one that only adds to it"
            )
        mark = self._tokenizer.decode(end)
        rest = before.rpartition(mark)[2] if mark and mark in before.partition(_SAID)[2] else ""
        return rest + whole[len(before) :]

    async def close(self) -> None:
        await self._reader.close()
        await self._functions.close()


def messages_of(calls: Sequence[Call], answers: Sequence[str]) -> tuple[Message, list[Message]]:
    """A turn with `calls` and the answers to it, as messages of a chat. Templates want arguments as objects."""
    named = [
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
    return {"role": "assistant", "content": _SAID, "tool_calls": named}, results


def _object(arguments: str) -> dict[str, Any]:
    """What is no JSON object is shown as none: the function has said so in its answer."""
    try:
        found = load_json(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Functions:
    """Answers calls, each in a process that can be killed. An error is an answer, too: a line that begins with
    `error`."""

    def __init__(self, config: Config, names: Sequence[str], seconds: float) -> None:
        """Raises UserError for a function that is not there."""
        self._known = find_functions(names)
        self._seconds = seconds
        dumped = config.model_dump_json().encode()
        self._workers = ProcessPool(
            "rollout.generator_params.functions",
            "rlsys.generators.function_worker",
            dumped,
            config.data.reward_env,
        )
        self._places = asyncio.Semaphore(CALLS_AT_ONCE)

    async def __call__(self, call: Call) -> str:
        if call.name not in self._known:
            return f"error: there is no function {call.name}; there are {', '.join(self._known)}"
        message = json.dumps({"name": call.name, "arguments": call.arguments}).encode()
        async with self._places, self._workers.acquire() as worker:
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
    speak: Callable[[Sample], Awaitable[None]],
    functions: Sequence[str],
    max_turns: int = 4,
    seconds: float = 30.0,
) -> FunctionTurns:
    """`functions`: `path/to/file.py:function` or `package.module:function`; `seconds`: for one call."""
    if config.engine.tool_call_parser is None:
        raise UserError(
            "rollout.generator = 'functions' needs engine.tool_call_parser, the format in which the model calls them"
        )
    offered = config.data.chat_template_args.get("tools") or []

    def schemas(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        found = tools_of(prompt.entry, config.data.keys.tools, prompt.location or "the prompt") or offered
        if not found:
            raise RowError(
                f"{prompt.location or 'the prompt'}: rollout.generator = 'functions', but it offers no tools; "
                "expected schemas under tools, or in data.chat_template_args.tools"
            )
        try:
            return read_tools(found, "tools")
        except BadRequest as e:
            raise RowError(f"{prompt.location or 'the prompt'}: {e}") from None

    return FunctionTurns(
        speak,
        tokenizer,
        TurnReader(config),
        Functions(config, functions, seconds),
        schemas,
        ends=turn_ends(config, tokenizer),
        max_turns=max_turns,
        max_response_tokens=config.rollout.max_response_tokens,
    )
