"""Tool calls and reasoning by SGLang's parsers: at a real server, through `rlsys router`, and in a run's turns.

The model is random. A bias lets it end its reasoning; at the server a grammar then makes it write the calls.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rlsys.config import Config
from rlsys.data import Tokenizer
from rlsys.generators.parser_client import Call, TurnReader
from tests.helpers.servers import running_engine, running_router

pytestmark = pytest.mark.integration

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
WRITTEN = (
    'so <tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1234567, "b": 7654321}}\n</tool_call>'
)
CALLS = [("add", {"a": 12, "b": 30}), ("add", {"a": 1234567, "b": 7654321})]
EOS, THOUGHT = 2, 7
"""Ids of <eos> and </think>."""


@pytest.fixture(scope="module")
def config(engine_config: Config) -> Config:
    """Every token has a chunk: parsers meet marks in pieces."""
    parsers = {"tool_call_parser": "qwen25", "reasoning_parser": "deepseek-r1", "stream_interval": 1}
    return engine_config.model_copy(update={"engine": engine_config.engine.model_copy(update=parsers)})


@pytest.fixture(scope="module")
def server(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(config, tmp_path_factory.mktemp("parsers")) as url:
        yield url


def request(**more: Any) -> dict[str, Any]:
    return {
        "model": "any", "messages": [{"role": "user", "content": "12 + 30"}], "tools": [ADD], "seed": 5,
        "max_tokens": 120, "temperature": 1.0, "logit_bias": {str(EOS): -100, str(THOUGHT): 2.0},
        **more,
    }  # fmt: skip


GRAMMAR = re.escape(WRITTEN).replace("\\\n", "\n").replace("\\ ", " ").replace("\\<", "<")


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def whole(url: str, **more: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Reasoning, content, calls and why it ended, of an answer in one piece. SGLang keeps or drops the blanks between
    text and a call, as its chunks happen to end."""
    choice = client(url).chat.completions.create(**request(**more)).choices[0]
    message: Any = choice.message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    return message.reasoning_content, message.content.strip(), calls, choice.finish_reason


def streamed(url: str, **more: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The same of a stream, put together as clients do it."""
    reasoning = content = finish = ""
    calls: dict[int, list[str]] = {}
    ids: dict[int, str] = {}
    for chunk in client(url).chat.completions.create(**request(stream=True, **more)):
        for choice in chunk.choices:
            delta: Any = choice.delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            for call in delta.tool_calls or []:
                pieces = calls.setdefault(call.index, ["", ""])
                pieces[0] += call.function.name or ""
                pieces[1] += call.function.arguments or ""
                assert ids.setdefault(call.index, call.id) == (call.id or ids[call.index]), "one call, one id"
            finish = choice.finish_reason or finish
    assert len(set(ids.values())) == len(ids)
    return reasoning, content.strip(), [(name, arguments) for name, arguments in calls.values()], finish


def test_the_router_returns_the_same_response_as_the_server(server: str, tmp_path: Path) -> None:
    """The model's template shows no tools, so the router refuses them, and the server does not."""
    direct = whole(server, tools=openai.NOT_GIVEN)
    reasoning, content, _, _ = direct
    assert reasoning and "think" not in reasoning and content
    with running_router(tmp_path, "--engine", server) as url:
        assert whole(url, tools=openai.NOT_GIVEN) == direct
        assert streamed(url, tools=openai.NOT_GIVEN) == direct


def test_a_run_reads_a_turn_as_the_server_does(server: str, config: Config) -> None:
    """From the text of the tokens that it sampled, with and without tools, and of a turn that was cut off."""
    tokenizer = Tokenizer(config.model.path)
    prompt = tokenizer.apply_chat([{"role": "user", "content": "12 + 30"}])
    grammar = {"max_tokens": 400, "extra_body": {"regex": GRAMMAR}}
    reasoning, content, calls, finish = whole(server, **grammar)
    assert reasoning and "think" not in reasoning and content == "so"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS and finish == "tool_calls"

    async def read() -> None:
        reader = TurnReader(config)
        try:
            turn = await reader(f"{reasoning}</think>{WRITTEN}", prompt, [ADD])
            assert (turn.reasoning, turn.text.strip(), turn.calls) == (
                reasoning,
                content,
                tuple(Call(*call) for call in calls),
            )
            assert (await reader(f"{reasoning}</think>{WRITTEN}", prompt, [])).text == WRITTEN
            assert (await reader("1 + 2", prompt, [ADD])).reasoning == "1 + 2"
        finally:
            await reader.close()

    asyncio.run(read())
