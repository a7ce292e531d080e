"""A broken call that SGLang's parser drops stays in the text: the agent and the reward see what was said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rlsys.config import Config
from rlsys.generators.parser_client import TurnReader

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "text", "reasoning", "expected"),
    [
        (BROKEN, "", "", BROKEN),
        (f"I add.\n{BROKEN}", "I add.\n", "", f"I add.\n{BROKEN}"),
        (f"<think>hm</think>{BROKEN}", "", "hm", BROKEN),
        (f"hm</think>\nI add. {BROKEN}", "I add.", "hm", f"I add. {BROKEN}"),
        ("7", "7", "", "7"),
        (" 7\n", "7", "", "7"),
        ("<think>hm</think>\n\n7", "7", "hm", "7"),
        ("<think>hm</think><|im_end|>", "", "hm", ""),
        ("<|channel|>final<|message|>7<|return|>", "7", "", "7"),
    ],
)
async def test_text_that_a_parser_drops_is_text(turn: str, text: str, reasoning: str, expected: str) -> None:
    reader = TurnReader(Config.model_validate({"model": {"path": MODEL}}))
    worker = mock.Mock(call=mock.AsyncMock(return_value={"text": text, "reasoning": reasoning, "calls": []}))

    @asynccontextmanager
    async def started() -> AsyncIterator[Any]:
        yield worker

    reader._workers = mock.Mock(acquire=started)
    parsed_turn = await reader(turn, "", [])
    assert (parsed_turn.text.strip(), parsed_turn.reasoning, parsed_turn.calls) == (
        expected.strip(),
        reasoning,
        (),
    )
