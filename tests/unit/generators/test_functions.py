"""The generator `functions`: between turns are functions of the user's, which the model calls in its own format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.data.quickstart_model import write_model
from rlsys.engine.parsers import parser_names
from rlsys.generators.functions import Functions, FunctionTurns, chat_messages
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import Call, ToolFailed, Turn, TurnReader
from rlsys.rollout.preflight import check_names
from rlsys.router.turn_ends import TurnEnds

OWN = """
import os, time

def add(a: int, b: int) -> int:
    return a + b

async def names(of: str) -> list[str]:
    return [of, of]

def fails() -> None:
    raise ValueError("no such thing")

def hangs() -> None:
    time.sleep(600)

def dies() -> None:
    os._exit(3)
"""
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.role != 'assistant' else '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_config(folder: Path, *functions: str, **more: Any) -> Config:
    write_model(folder)
    (folder / "own.py").write_text(OWN)
    names = [f"{folder / 'own.py'}:{name}" for name in functions]
    return Config.model_validate(
        {
            "model": {"path": folder},
            "rollout": {"generator": "functions", "generator_params": {"functions": names}},
            "engine": {"tool_call_parser": "qwen25"},
            **more,
        }
    )


class Read:
    """In the place of SGLang's parser: a turn's words that are known calls."""

    def __init__(self, **calls: str) -> None:
        self.calls = calls
        self.seen: list[tuple[str, str]] = []

    async def __call__(self, text: str, before: str, tools: Sequence[Any]) -> Turn:
        assert list(tools) == [SCHEMA]
        self.seen.append((text, before))
        return Turn(text, "", tuple(Call(n, a) for n, a in self.calls.items() if f"[{n}]" in text))


async def answer(call: Call) -> str:
    return f"{call.name} says {call.arguments}"


def turns(folder: Path, read: Any, said: Sequence[str], max_turns: int = 3, budget: int = 200) -> Any:
    write_model(folder)
    tokenizer = Tokenizer(folder)
    tokenizer._template_text = TEMPLATE
    words = iter(said)

    async def speak(sample: Sample) -> None:
        ids = tokenizer.encode(next(words))
        sample.append(Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
        if ids[-1] == tokenizer.eos_id:
            sample.status = Status.FINISHED

    functions: Any = answer
    generator = FunctionTurns(
        speak, tokenizer, read, functions, lambda prompt: [SCHEMA], ends=TurnEnds({tokenizer.eos_id}),
        max_turns=max_turns, max_response_tokens=budget,
    )  # fmt: skip
    return generator, tokenizer


PROMPT = Prompt(0, "", [5], {"tools": [SCHEMA]})


async def test_function_results_follow_the_chat_template_and_sampled_tokens_are_unchanged(
    tmp_path: Path,
) -> None:
    read = Read(add='{"a": 1}', sub='{"b": 2}')
    generator, tokenizer = turns(tmp_path, read, ["[add] and [sub]<eos>", "[sub]<eos>", "3<eos>"])
    sample = Sample(0, 0, 0, tokenizer.encode("<user>1"), seed=1)
    await generator(sample, PROMPT)
    first = '\n<tool>add says {"a": 1}<tool>sub says {"b": 2}<assistant>'
    second = '\n<tool>sub says {"b": 2}<assistant>'
    assert tokenizer.decode(sample.response_ids) == f"[add] and [sub]<eos>{first}[sub]<eos>{second}3<eos>"
    observed_texts = [tokenizer.decode(sample.response_ids[s.start : s.end]) for s in sample.observed]
    assert observed_texts == [first, second] and sample.status is Status.FINISHED
    trained = [i for i, t in zip(sample.response_ids, sample.trained(), strict=True) if t]
    assert tokenizer.decode(trained) == "[add] and [sub]<eos>[sub]<eos>3<eos>"
    assert read.seen[0] == ("[add] and [sub]", "<user>1"), "without the end that the model wrote"
    assert read.seen[1][0] == "[sub]" and read.seen[1][1].endswith("<assistant>")


async def test_the_last_turn_is_not_answered_nor_read(tmp_path: Path) -> None:
    read = Read(add="{}")
    generator, _ = turns(tmp_path, read, ["[add]<eos>", "[add]<eos>"], max_turns=2)
    sample = Sample(0, 0, 0, [5], seed=1)
    await generator(sample, PROMPT)
    assert (len(sample.observed), sample.status, len(read.seen)) == (1, Status.FINISHED, 1)


async def test_an_answer_that_does_not_fit_ends_the_sample(tmp_path: Path) -> None:
    generator, tokenizer = turns(tmp_path, Read(add="{}"), ["[add]<eos>"], budget=20)
    sample = Sample(0, 0, 0, [5], seed=1)
    await generator(sample, PROMPT)
    assert (tokenizer.decode(sample.response_ids), sample.status) == ("[add]<eos>", Status.TRUNCATED)


async def test_a_turn_that_had_ended_before_a_crash_is_read_again_and_not_continued(tmp_path: Path) -> None:
    """Saved between the end of a turn and the answer: once with a call in it, once without."""
    for text, expected in (
        ("[add]<eos>", "[add]<eos>\n<tool>add says {}<assistant>3<eos>"),
        ("3<eos>", "3<eos>"),
    ):
        generator, tokenizer = turns(tmp_path, Read(add="{}"), ["3<eos>"] if "add" in text else [])
        ids = tokenizer.encode(text)
        sample = Sample(0, 0, 0, [5], seed=1)
        sample.append(Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
        sample.status = Status.PARKED
        await generator(sample, PROMPT)
        assert (tokenizer.decode(sample.response_ids), sample.status) == (expected, Status.FINISHED)


async def test_a_template_that_changes_earlier_messages_is_refused(tmp_path: Path) -> None:
    generator, tokenizer = turns(tmp_path, Read(add="{}"), ["[add]<eos>"])
    tokenizer._template_text = "{{ messages | length }}"
    with pytest.raises(UserError, match="differently if answers follow"):
        await generator(Sample(0, 0, 0, [5], seed=1), PROMPT)


def test_arguments_that_are_no_object_are_shown_as_none() -> None:
    turn, results = chat_messages([Call("add", "{"), Call("add", "[1]")], ["error: x", "y"])
    assert [c["function"]["arguments"] for c in turn["tool_calls"]] == [{}, {}]
    assert [r["tool_call_id"] for r in results] == ["call_0", "call_1"]


@pytest.mark.gate  # each process takes seconds to start
async def test_functions_run_where_they_can_be_killed(tmp_path: Path) -> None:
    config = make_config(tmp_path, "add", "names", "fails", "hangs", "dies")
    call = Functions(config, config.rollout.generator_params["functions"], seconds=2.0)
    try:
        assert await call(Call("add", '{"a": 12, "b": 30}')) == "42"
        assert await call(Call("names", '{"of": "é"}')) == '["é", "é"]'
        assert await call(Call("fails", "")) == "error: ValueError: no such thing"
        assert (await call(Call("add", '{"a": 1}'))).startswith("error: TypeError: add() missing 1 required")
        assert (await call(Call("add", "{"))).startswith("error: JSONDecodeError")
        assert await call(Call("hangs", "{}")) == "error: no answer within 2 s"
        assert await call(Call("dies", "{}")) == "error: ProcessEnded: exit code 3"
        assert (await call(Call("sub", "{}"))).startswith(
            "error: unknown function sub; expected one of add, "
        )
        assert await call(Call("add", '{"a": 1, "b": 1}')) == "2"
    finally:
        await call.close()


FORMATS = [
    ("qwen25", None, 'hm <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ("hm", "")),
    ("hermes", None, 'hm <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ("hm", "")),
    ("llama3", None, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", "")),
    ("mistral", None, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', ("", "")),
    (
        "deepseekv3", "deepseek-r1",
        "12</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', ("", "12"),
    ),
    (
        "qwen25", "qwen3",
        '<think>\n12\n</think>\nhm <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ("hm", "12"),
    ),
]  # fmt: skip


@pytest.mark.gate  # SGLang takes seconds to import
def test_real_formats_by_sglangs_own_code(tmp_path: Path) -> None:
    from rlsys.engine.turn_parser import prepare

    write_model(tmp_path)
    for calls, reasoning, text, (content, thought) in FORMATS:
        names = {"tool_call_parser": calls, "reasoning_parser": reasoning, "model": str(tmp_path)}
        parse = prepare(json.dumps({**names, "trust_remote_code": False}).encode())
        result = parse(json.dumps({"text": text, "before": "", "tools": [SCHEMA]}).encode())
        assert [c["name"] for c in result["calls"]] == ["add"], (calls, result)
        assert [json.loads(c["arguments"]) for c in result["calls"]] == [{"a": 1}], calls
        assert (result["text"].strip(), result["reasoning"].strip()) == (content, thought), calls
        plain = parse(json.dumps({"text": "4 <b>", "before": "", "tools": [SCHEMA]}).encode())
        assert not plain["calls"] and "4 <b>" in plain["text"] + plain["reasoning"]
    opened = parse(json.dumps({"text": "12</think>3", "before": "x<think>\n", "tools": []}).encode())
    assert (opened["reasoning"], opened["text"]) == ("12", "3"), "the prompt has opened it"


@pytest.mark.gate
async def test_a_parser_that_chokes_gives_the_text_and_one_that_hangs_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlsys.generators import parser_client

    read = TurnReader(make_config(tmp_path, "add"))
    try:
        assert await read("4", "", [{"no": "schema"}]) == Turn("4")
        monkeypatch.setattr(parser_client, "READ_SECONDS", 0.0)
        with pytest.raises(ToolFailed, match="did not respond within 0 s"):
            await read("4", "", [SCHEMA])
    finally:
        await read.close()


def test_parser_names_are_sglangs_and_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    assert {"qwen25", "hermes", "llama3"} <= set(parser_names("tool_call_parser"))
    assert {"deepseek-r1", "qwen3"} <= set(parser_names("reasoning_parser"))
    for engine, message in (
        (
            {"tool_call_parser": "qwen-25"},
            r"engine\.tool_call_parser = 'qwen-25': not one.* did you mean qwen25\?",
        ),
        ({"reasoning_parser": "DeepSeek_R1"}, r"did you mean deepseek-r1\?"),
        ({"reasoning_parser": "xyz"}, "known: apertus2509, "),
    ):
        config = Config.model_validate({"model": {"path": tmp_path}, "engine": engine})
        with pytest.raises(UserError, match=message):
            check_names(config)


async def test_missing_generator_requirements_are_reported(tmp_path: Path) -> None:
    async def speak(sample: Sample) -> None:
        sample.append(Segment([2], [-1.0], [VersionSpan(1, 0, 1)]))
        sample.status = Status.FINISHED

    with pytest.raises(UserError, match=r"requires engine\.tool_call_parser"):
        build_generator(make_config(tmp_path, "add", engine={}), Tokenizer(tmp_path), speak)
    with pytest.raises(
        UserError, match=r"rollout\.generator_params\.functions = .*own\.py.* has no function 'ad'"
    ):
        build_generator(make_config(tmp_path, "ad"), Tokenizer(tmp_path), speak)
    generator = build_generator(make_config(tmp_path, "add"), Tokenizer(tmp_path), speak)
    with pytest.raises(UserError, match=r"has no tools, which .* requires; expected function schemas"):
        await generator(Sample(0, 0, 0, [5], seed=1), Prompt(0, "", [5], {}))
