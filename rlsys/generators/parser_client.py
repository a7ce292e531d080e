"""TurnReader: parses reasoning, text and tool calls of a turn with SGLang's parsers.

Only environments, agents and tools use the result; the tokens of a sample do not change.
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
"""Number of ids before a turn that are decoded to detect whether they start reasoning."""
TAIL = 200
"""Number of characters before a turn that a parser gets: enough for a tag that starts reasoning."""

log = logging.getLogger("rlsys.rollout")


class ToolFailed(RunError):
    """Raised when a tool fails without a fault of the model.

    The sample is censored, and an evaluation excludes its prompt.
    """


_REASONED = "</think>"
_TAG = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments`: the text that the model generated, normally a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def _dropped_text(turn: str, text: str, reasoning: str) -> str | None:
    """Return the whole text of a turn if a parser returned only its beginning as `text`.

    None if the parser returned everything except tags and reasoning.
    """
    spoken_text = turn.rpartition(_REASONED)[2] if reasoning and _REASONED in turn else turn
    spoken_text, parsed_text = spoken_text.strip(), text.strip()
    if (reasoning and spoken_text == turn.strip()) or not spoken_text.startswith(parsed_text):
        return None
    return spoken_text if any(c.isalnum() for c in _TAG.sub("", spoken_text[len(parsed_text) :])) else None


class TurnReader:
    """Parses turns. Owns the process with SGLang's parsers (rlsys/engine/turn_parser.py).

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

        If the parser fails, the turn is plain text without a call, as in SGLang's server. A malformed call,
        which SGLang's parsers drop, stays text.

        Args:
            text: the turn with special tokens, without the one that ended it.
            preceding_text: the end of the prompt and response before it.
            tools: schemas of the functions that may be called.

        Raises:
            ToolFailed: the parser did not respond within READ_SECONDS.
        """
        message = json.dumps({"text": text, "before": preceding_text[-TAIL:], "tools": list(tools)}).encode()
        try:
            async with self._workers.acquire() as worker, asyncio.timeout(READ_SECONDS):
                result = await worker.call(message)
        except PoolProcessError as e:
            log.warning("SGLang's parser failed, so a turn stays text: %s", e)
            return Turn(text)
        except TimeoutError:
            raise ToolFailed(f"SGLang's parser did not answer within {READ_SECONDS:g} s") from None
        calls = tuple(Call(**call) for call in result["calls"])
        if not calls and (dropped := _dropped_text(text, result["text"], result["reasoning"])) is not None:
            log.warning("SGLang's parser dropped a malformed call, so the turn stays text: %.200s", dropped)
            return Turn(dropped, result["reasoning"])
        return Turn(result["text"], result["reasoning"], calls)

    async def close(self) -> None:
        await self._workers.close()
