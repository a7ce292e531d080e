"""Requests of agents as strangers write them: each is answered, or refused in words, and nothing else happens.
Strategies: tests/helpers/odd_values.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.agents import anthropic, chat, responses
from rlsys.agents.messages import Answer, BadRequest, ToolCall, new_messages
from rlsys.agents.rendering import Rendering
from rlsys.data import Tokenizer
from tests.helpers.odd_values import mutated, texts, values

pytestmark = pytest.mark.gate

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
RENDERING = Rendering(Tokenizer(MODEL))
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
USER = {"role": "user", "content": "3+4?"}
ROWS = st.one_of(
    st.just(USER),
    mutated(USER),
    mutated({"role": "assistant", "content": "", "tool_calls": [CALL]}),
    st.builds(
        lambda calls: {"role": "assistant", "content": "", "tool_calls": calls},
        st.one_of(values(1), st.lists(st.one_of(mutated(CALL), values(1)), max_size=2)),
    ),
    mutated({"role": "tool", "tool_call_id": "c", "content": "7"}),
    mutated(
        {"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "tool_result", "content": "4"}]}
    ),
    mutated({"type": "function_call_output", "call_id": "c", "output": "7"}),
    values(1),
)
OPTIONS = {
    "stop": ["x"], "stop_sequences": ["x"], "stream": True, "stream_options": {"include_usage": True}, "n": 1,
    "max_tokens": 9, "max_output_tokens": 9, "temperature": 1.0, "top_p": 1.0, "seed": 3, "metadata": {"a": "b"},
    "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "low"},
    "thinking": {"type": "adaptive"}, "response_format": {"type": "text"}, "logprobs": False, "system": "Add.",
    "instructions": "Add.", "store": False, "user": "me", "presence_penalty": 0,
}  # fmt: skip
STOPS = st.one_of(
    st.lists(st.one_of(st.just(""), texts(max_size=2)), min_size=1, max_size=2), texts(max_size=1), values(1)
)
ODD_OPTIONS = st.one_of(
    st.builds(lambda stop: {"stop": stop}, STOPS),
    st.builds(lambda stop: {"stop_sequences": stop}, STOPS),
    st.builds(lambda name, value: {name: value}, st.sampled_from(sorted(OPTIONS)), values(2)),
    st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3).map(lambda names: {n: OPTIONS[n] for n in names}),
    st.builds(
        lambda tools: {"tools": tools},
        st.lists(st.one_of(mutated(TOOL), mutated(TOOL["function"]), values(1)), max_size=2),
    ),
    st.dictionaries(texts(max_size=3), values(1), max_size=2),
)
APIS = {"chat": (chat, "messages"), "anthropic": (anthropic, "messages"), "responses": (responses, "input")}
ANSWERS = [
    Answer("1", "7x\u2028", "hm", (), "stop", 3, 2),
    Answer(
        "2", "", "", (ToolCall("c", "add", '{"a": 1}'), ToolCall("d", "add", "{broken")), "tool_calls", 3, 2
    ),
]


def asked(api: ModuleType, body: dict[str, Any]) -> None:
    """What the endpoint and a conversation do with a request; raises BadRequest where it is refused."""
    try:
        request = msgspec.json.decode(json.dumps(body))
    except (msgspec.DecodeError, UnicodeEncodeError):  # NaN, half of a character: answered 400 before
        return
    question = api.read(request)
    assert question.key
    assert all(question.stop) and isinstance(question.max_tokens, int | None)
    RENDERING.prompt(question.messages, question.tools)
    new = new_messages(question.messages[:-1], question.messages)
    RENDERING.continuation(new or [], question.tools, "")
    for answer in ANSWERS:
        text = min((answer.content.partition(s)[0] for s in question.stop), key=len, default="")
        assert text in answer.content
        json.dumps(api.to_json(answer, request))
        assert b"".join(api.events(answer, request))


@pytest.mark.parametrize("name", APIS)
@given(
    request=st.one_of(
        st.tuples(st.just([USER]), ODD_OPTIONS),
        st.tuples(ROWS.map(lambda row: [USER, row]), st.just({})),
        st.tuples(ROWS.map(lambda row: [row, USER]), st.just({})),
        st.tuples(st.one_of(st.lists(ROWS, max_size=3), values(2)), ODD_OPTIONS),
    )
)
@settings(max_examples=400)
def test_any_request_is_answered_or_refused(name: str, request: tuple[Any, dict[str, Any]]) -> None:
    api, field = APIS[name]
    rows, options = request
    most = {"max_tokens": 9} if name == "anthropic" else {}
    try:
        asked(api, {"model": "policy", **most, field: rows, **options})
    except BadRequest as e:
        assert str(e)
