"""What a turn of the model says: its reasoning, its text and the tools that it calls, by SGLang's own parsers.

For the environment alone: the tokens of a sample stay those that the model sampled.
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
"""For one turn; a parser needs milliseconds."""
TAIL_IDS = 64
"""Ids before a turn that are decoded to see whether they opened reasoning."""
TAIL = 200
"""Characters of what stands before a turn that a parser is shown: enough for a mark that opens reasoning."""

log = logging.getLogger("rlsys.rollout")


class ToolFailed(RunError):
    """The tool could not answer, through no fault of the model: the sample is censored; an evaluation leaves its
    prompt out."""


_REASONED = "</think>"
_TAG = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class Call:
    """`arguments`: a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def _dropped(turn: str, text: str, reasoning: str) -> str | None:
    """What a turn without a call says beside its reasoning, where a parser gave only the beginning of it as `text`;
    None where it gave all, but for tags."""
    said = turn.rpartition(_REASONED)[2] if reasoning and _REASONED in turn else turn
    said, kept = said.strip(), text.strip()
    if (reasoning and said == turn.strip()) or not said.startswith(kept):
        return None
    return said if any(c.isalnum() for c in _TAG.sub("", said[len(kept) :])) else None


class TurnReader:
    """Owns the process with SGLang's parsers (rlsys/engine/turn_parser.py); it starts at the first turn."""

    def __init__(self, config: Config) -> None:
        e = config.engine
        names = {
            "tool_call_parser": e.tool_call_parser, "reasoning_parser": e.reasoning_parser,
            "model": str(config.model.path), "trust_remote_code": config.model.trust_remote_code,
        }  # fmt: skip
        self._workers = ProcessPool(
            "engine.tool_call_parser", "rlsys.engine.turn_parser", json.dumps(names).encode()
        )

    async def __call__(self, text: str, before: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """`text`: the turn, special tokens included, without what ended it. `before`: what stands before it in the
        prompt and the response. `tools`: schemas of the functions that may be called.

        A turn that a parser chokes on is its text, without a call, as SGLang's server answers it. A broken call,
        which SGLang's parsers drop, stays text. Raises ToolFailed when there is no answer in time.
        """
        message = json.dumps({"text": text, "before": before[-TAIL:], "tools": list(tools)}).encode()
        try:
            async with self._workers.acquire() as worker, asyncio.timeout(READ_SECONDS):
                said = await worker.call(message)
        except PoolProcessError as e:
            log.warning("a turn could not be parsed: %s", e)
            return Turn(text)
        except TimeoutError:
            raise ToolFailed(f"SGLang's parser did not answer within {READ_SECONDS:g} s") from None
        calls = tuple(Call(**call) for call in said["calls"])
        if not calls and (dropped := _dropped(text, said["text"], said["reasoning"])) is not None:
            log.warning("a turn's call could not be read, and stays text: %.200s", dropped)
            return Turn(dropped, said["reasoning"])
        return Turn(said["text"], said["reasoning"], calls)

    async def close(self) -> None:
        await self._workers.close()
