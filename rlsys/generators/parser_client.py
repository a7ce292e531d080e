"""TurnReader: parses reasoning, text and tool calls of a turn with SGLang's parsers.

Environments, agents and tools get the result. The tokens of a sample do not change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.process_pool import PoolProcessError, ProcessPool

READ_SECONDS = 30.0
"""Time limit of parsing a turn, which normally takes milliseconds."""
TAIL_IDS = 64
"""Number of ids before a turn that callers decode for `preceding_text`."""
TAIL = 200
"""Number of characters before a turn that a parser gets, because they may end with a tag that starts reasoning."""

log = logging.getLogger("rlsys.rollout")


class ToolFailed(RunError):
    """Raised when a tool fails without a fault of the model.

    The sample is censored, and an evaluation excludes its prompt.
    """


_END_OF_REASONING = "</think>"
_TAG = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments`: the text that the model generated, normally a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """A parsed turn. `text`: the text outside of reasoning and calls."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def _dropped_text(turn: str, text: str, reasoning: str) -> str | None:
    """Return the whole text of a turn if the parser dropped an end of it that has content.

    Args:
        turn: the turn as generated.
        text: text that the parser returned.
        reasoning: reasoning that the parser returned.

    Returns:
        The text without reasoning; None if the parser dropped nothing but tags and reasoning.
    """
    has_tag = bool(reasoning) and _END_OF_REASONING in turn
    full_text = (turn.rpartition(_END_OF_REASONING)[2] if has_tag else turn).strip()
    parsed_text = text.strip()
    if (reasoning and full_text == turn.strip()) or not full_text.startswith(parsed_text):
        return None
    dropped_end = _TAG.sub("", full_text[len(parsed_text) :])
    return full_text if any(c.isalnum() for c in dropped_end) else None


class TurnReader:
    """Parses turns in a process with SGLang's parsers (rlsys/engine/turn_parser.py). Owns the process.

    The first turn starts the process.
    """

    def __init__(self, config: Config) -> None:
        e = config.engine
        names = {
            "tool_call_parser": e.tool_call_parser, "reasoning_parser": e.reasoning_parser,
            "model": str(config.model.path), "trust_remote_code": config.model.trust_remote_code,
        }  # fmt: skip
        self._workers = ProcessPool(
            "engine.tool_call_parser", "rlsys.engine.turn_parser", json.dumps(names).encode()
        )

    async def __call__(self, text: str, preceding_text: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """Parse a turn.

        If the parser fails, the result is the turn as text without calls, as in SGLang's server. A malformed call,
        which SGLang's parsers drop, stays in the text.

        Args:
            text: the turn, with special tokens except the last token, if that ended the turn.
            preceding_text: end of the prompt and the response before the turn.
            tools: schemas of the functions that may be called.

        Raises:
            ToolFailed: the parser did not respond within READ_SECONDS.
        """
        message = json.dumps({"text": text, "before": preceding_text[-TAIL:], "tools": list(tools)}).encode()
        try:
            async with self._workers.acquire() as worker, asyncio.timeout(READ_SECONDS):
                result = await worker.call(message)
        except PoolProcessError as e:
            log.warning("SGLang's parser failed; the turn is used as plain text: %s", e)
            return Turn(text)
        except TimeoutError:
            raise ToolFailed(f"SGLang's parser did not respond within {READ_SECONDS:g} s") from None
        calls = tuple(Call(**call) for call in result["calls"])
        if not calls and (dropped := _dropped_text(text, result["text"], result["reasoning"])) is not None:
            log.warning(
                "SGLang's parser dropped a malformed call; the turn is used as plain text: %.200s", dropped
            )
            return Turn(dropped, result["reasoning"])
        return Turn(result["text"], result["reasoning"], calls)

    async def close(self) -> None:
        """Stop the process."""
        await self._workers.close()
