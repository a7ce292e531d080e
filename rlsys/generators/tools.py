"""ToolTurns: a generator in which a turn of the model may call a tool, whose answer precedes the next turn.

prompt  turn: ... <python>3*7</python> <eos>  |  21 and the header of the next turn  |  turn: ... <eos>
        sampled, trained                         by the tool, not trained               sampled, trained
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Sample, SampleGroup, Status
from rlsys.data import Tokenizer
from rlsys.generators.parser_client import ToolFailed
from rlsys.rewards.answer import count_answers
from rlsys.router.turn_ends import TurnEnds, turn_ends

CALCULATOR = Path(__file__).with_name("calculator.py")
TOOL_SECONDS = 30.0
"""Time limit of a tool call, in seconds. A call that exceeds it is a fault of the machine, because the calculator
limits its own CPU time."""
MAX_CONCURRENT_TOOLS = 8
NO_CALL = 0.5
"""Penalty of a response without a tool call. It lies between the penalties for no failed calls (0) and only failed
calls (1)."""
_ERROR = re.compile(r"^error\b", re.MULTILINE)

Tool = Callable[[str], Awaitable[str]]


class ToolTurns:
    """A generator with one tool. Its only state is the sample's tokens."""

    def __init__(
        self,
        generate_turn: Callable[[Sample], Awaitable[None]],
        tokenizer: Tokenizer,
        tool: Tool,
        *,
        ends: TurnEnds,
        call: tuple[str, str],
        answer: tuple[str, str],
        max_turns: int,
        max_response_tokens: int,
    ) -> None:
        """Create the generator.

        Args:
            generate_turn: generates a turn.
            tokenizer: the model's tokenizer.
            tool: returns the answer to a call.
            ends: token ids and texts that end a turn.
            call: texts before and after a call.
            answer: texts before and after an answer. The first text starts with the end of the turn, which is omitted
                if the model generated it. The second text ends with the header of the next turn.
            max_turns: largest number of turns.
            max_response_tokens: largest number of tokens of a response.
        """
        self._generate_turn = generate_turn
        self._tokenizer = tokenizer
        self._tool = tool
        self._ends = ends
        self._call = re.compile(f"{re.escape(call[0])}(.*?){re.escape(call[1])}", re.DOTALL)
        self._answer = answer
        self._max_turns = max_turns
        self._budget = max_response_tokens

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        while True:
            if (call := self.unanswered_call(sample)) is None:
                await self._generate_turn(sample)
                if sample.status is not Status.FINISHED or (call := self.unanswered_call(sample)) is None:
                    return
                # At once, so that no other task sees the status FINISHED: the sample continues.
                sample.status = Status.PARKED
            opening, closing = self._answer
            last_ids = sample.response_ids[-1:]
            turn_end = self._tokenizer.decode(last_ids) if last_ids[0] in self._ends.ids else ""
            ids = self._tokenizer.encode(opening.removeprefix(turn_end) + await self._tool(call) + closing)
            if sample.tokens + len(ids) >= self._budget:
                sample.status = Status.TRUNCATED
                return
            sample.observe(ids)

    def unanswered_call(self, sample: Sample) -> str | None:
        """Return the last call of the last turn.

        None if the turn has no call, has not ended, or is the last allowed turn.
        """
        turns = len(sample.observed) + 1
        if sample.observed_last or not sample.response_ids or turns >= self._max_turns:
            return None
        turn = sample.response_ids[sample.observed[-1].end if sample.observed else 0 :]
        if not self._ends.is_ended(turn):
            return None
        calls = self._call.findall(self._tokenizer.decode(turn))
        return calls[-1] if calls else None


def calculator(
    config: Config,
    tokenizer: Tokenizer,
    generate_turn: Callable[[Sample], Awaitable[None]],
    max_turns: int = 4,
    opens: str = "<python>",
    closes: str = "</python>",
    role: str = "user",
) -> ToolTurns:
    """Create the generator of `rollout.generator: calculator`, whose tool is a sandboxed calculator (calculator.py).

    Args:
        config: config of the run.
        tokenizer: the model's tokenizer.
        generate_turn: generates a turn.
        max_turns: largest number of turns.
        opens: text before a call.
        closes: text after a call.
        role: role of the chat message with the answer.
    """
    return ToolTurns(
        generate_turn,
        tokenizer,
        Calculator(),
        ends=turn_ends(config, tokenizer),
        call=(opens, closes),
        answer=answer_template(tokenizer, role),
        max_turns=max_turns,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def answer_template(tokenizer: Tokenizer, role: str) -> tuple[str, str]:
    """Return the texts that the chat template renders around a message between two turns of the model.

    Args:
        tokenizer: the model's tokenizer.
        role: role of the message.

    Returns:
        The text from the end of the first turn to the message, and the text from the message to the next turn.

    Raises:
        UserError: the template does not render messages of this role.
    """
    turn_mark, answer_mark = "RLSYS-TURN", "RLSYS-ANSWER"
    messages = [
        {"role": "user", "content": "RLSYS-QUESTION"},
        {"role": "assistant", "content": turn_mark},
        {"role": role, "content": answer_mark},
    ]
    _, turn, following = tokenizer.apply_chat(messages).partition(turn_mark)
    opening, answer, closing = following.partition(answer_mark)
    if not turn or not answer:
        raise UserError(
            f"rollout.generator_params.role = {role!r}: the chat template of {tokenizer.path} does not render "
            "messages of this role"
        )
    return opening, closing


class ToolPenalties:
    """Sets `tool_penalty` of the samples of a train step, in a run with tools."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        load: Callable[[Sequence[Sample]], Sequence[Sample]],
    ) -> None:
        """Create the penalties.

        Args:
            config: config of the run.
            tokenizer: the model's tokenizer; None: no penalties.
            load: returns the given samples with their tokens.
        """
        self._tokenizer = None if config.rollout.generator == "single_turn" else tokenizer
        self._load = load

    def set_penalties(self, groups: Sequence[SampleGroup]) -> None:
        """Set the penalty of each sample of these groups. Does nothing in a run without tools."""
        if self._tokenizer is not None:
            samples = [s for group in groups for s in group.samples]
            for sample, loaded in zip(samples, self._load(samples), strict=True):
                sample.tool_penalty = tool_penalty(loaded, self._tokenizer.decode)


def tool_penalty(sample: Sample, decode: Callable[[Sequence[int]], str]) -> float:
    """Return the penalty of a response with tools, in [0, 2], as in GRPO-RoC (rStar2-Agent).

    The penalty is the sum of two terms:

        tool errors     share of the tool answers that have a line starting with `error`; NO_CALL without tool answers
        final answers   (number of final answers - 1) / number of turns, at most 1; 1 without a final answer

    Args:
        sample: the sample with its tokens.
        decode: returns the text of token ids.
    """
    observations = [decode(sample.response_ids[span.start : span.end]) for span in sample.observed]
    error_term = NO_CALL
    if observations:
        error_term = sum(_ERROR.search(text) is not None for text in observations) / len(observations)
    starts = [0, *(span.end for span in sample.observed)]
    ends = [*(span.start for span in sample.observed), sample.tokens]
    turn_texts = [decode(sample.response_ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    answers = sum(count_answers(text) for text in turn_texts)
    answer_term = min((answers - 1) / len(turn_texts), 1.0) if answers else 1.0
    return error_term + answer_term


class Calculator:
    """The calculator tool. Each call runs in a separate process."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_TOOLS)

    async def __call__(self, code: str) -> str:
        """Return the result of a call, or a line that starts with `error`.

        Raises:
            ToolFailed: the process did not end within TOOL_SECONDS.
        """
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(CALCULATOR),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
            )  # fmt: skip
            try:
                async with asyncio.timeout(TOOL_SECONDS):
                    output, _ = await process.communicate(code.encode(errors="replace"))
            except TimeoutError:
                raise ToolFailed(f"the calculator did not answer within {TOOL_SECONDS:g} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return output.decode(errors="replace").strip() or "error: too much time or memory"
