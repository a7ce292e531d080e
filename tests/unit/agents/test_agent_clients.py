"""Agents with stock clients, tools and streams: token in, token out, through a template that knows tools."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.agents import chat, responses
from rlsys.agents.messages import Answer, BadRequest, ToolCall, new_messages
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import Call, Turn
from tests.unit.generators.test_agent import MODEL, ROOT, Model

STOCK = ROOT / "tests/data/agents/stock.py"
TEMPLATE = """{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>{% endif -%}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""As Qwen's: an assistant's turn ends with its mark and a line."""


def call(*terms: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"terms": {list(terms)}}}}}\n</tool_call>'


SAID = [f"let me see\n{call(3, 4)}\n{call(2, 2)}<eos>", f"{call(7, 4)}<eos>", "<answer>11</answer><eos>"]
OBSERVED = ["\n<tool>7\n<tool>4\n<assistant>", "\n<tool>11\n<assistant>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Scripted:
    """In the place of SGLang's parsers, whose process takes seconds to start."""

    def __init__(self, config: Config) -> None: ...

    async def __call__(self, text: str, before: str, tools: Sequence[object]) -> Turn:
        tool_calls = [json.loads(body) for body in re.findall("<tool_call>\n(.*?)\n</tool_call>", text)]
        calls = tuple(Call(c["name"], json.dumps(c["arguments"])) for c in tool_calls)
        return Turn(text.partition("<tool_call>")[0].strip(), "", calls)


async def made(folder: Path, agent: str, model: Model) -> tuple[Sample, Tokenizer]:
    tokenizer = Tokenizer(folder)
    text = tokenizer.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
    prompt = Prompt(0, text, tokenizer.encode(text), {"answer": "11"}, "3+4+(2+2)")
    section = {
        "generator": "agent",
        "generator_params": {"run": f"{STOCK}:{agent}"},
        "max_response_tokens": 1000,
    }
    config = Config.model_validate(
        {"model": {"path": folder}, "rollout": section, "engine": {"tool_call_parser": "qwen25"}}
    )
    sample = Sample(5, 1, 0, prompt.ids, seed=1)
    await build_generator(config, tokenizer, model)(sample, prompt)
    return sample, tokenizer


@pytest.mark.gate
@pytest.mark.parametrize(
    "agent",
    [
        "with_tools", "streamed", "with_tools_async", "anthropics", "anthropics_streamed", "by_responses",
        "by_responses_streamed",
    ],
)  # fmt: skip
async def test_stock_clients_play_with_tools(
    folder: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agent != "with_tools":
        monkeypatch.setattr("rlsys.generators.agent.TurnReader", Scripted)
    model = Model(SAID, budget=1000)
    s, tokenizer = await made(folder, agent, model)
    first = "<tools>add </tools><system>add\n<user>3+4+(2+2)\n<assistant>"
    assert (tokenizer.decode(s.prompt_ids), s.own_prompt) == (first, True)
    assert [tokenizer.decode(s.response_ids[o.start : o.end]) for o in s.observed] == OBSERVED
    transcript = SAID[0] + OBSERVED[0] + SAID[1] + OBSERVED[1] + SAID[2]
    assert (tokenizer.decode(s.response_ids), s.status, model.sides) == (transcript, Status.FINISHED, [])


@pytest.mark.gate
async def test_sub_agents_send_requests_concurrently(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.generators.agent.TurnReader", Scripted)
    model = Model(["one<eos>", "two<eos>"], budget=1000)
    s, tokenizer = await made(folder, "parallel", model)
    assert tokenizer.decode(s.response_ids) == "one<eos>\n<user>1 2\n<assistant>two<eos>"
    assert sorted(model.sides) == ["<user>a\n<assistant>", "<user>b\n<assistant>"]


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    plain = Rendering(Tokenizer(MODEL))
    with pytest.raises(BadRequest, match="does not render tools"):
        plain.prompt([{"role": "user", "content": "1"}], [{"type": "function", "function": {"name": "f"}}])


def test_a_request_that_extends_the_history_is_the_next_turn() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": " so ", "tool_calls": [call]},
    ]
    new: dict[str, Any] = {"role": "tool", "content": "2", "tool_call_id": "c"}
    assert new_messages(history, [*history, new]) == [new]
    reordered_call = {**call, "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    stripped: dict[str, Any] = {
        "role": "assistant",
        "content": "so",
        "tool_calls": [reordered_call],
        "refusal": None,
    }
    assert new_messages(history, [history[0], stripped, new]) == [new]
    changes: list[dict[str, Any]] = [{"content": "no"}, {"tool_calls": []}, {"role": "user"}]
    for changed in changes:
        assert new_messages(history, [history[0], {**stripped, **changed}, new]) is None
    assert new_messages(history, history) is None


def test_an_empty_turn_has_empty_content_and_a_tool_turn_none() -> None:
    """As OpenAI answers: programs look into the content of an answer without calls."""
    call = ToolCall("c", "f", "{}")
    empty, call_answer = (Answer("a", "", "", calls, "stop", 1, 1) for calls in ((), (call,)))
    assert chat.to_json(empty, {})["choices"][0]["message"]["content"] == ""
    assert chat.to_json(call_answer, {})["choices"][0]["message"]["content"] is None
    assert responses.to_json(empty, {})["output"][0]["content"][0]["text"] == ""
