"""The calculator's language and limits; turns with a tool: what is trained, what an interruption leaves."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.data.quickstart_model import write_model
from rlsys.generators import tools
from rlsys.generators.calculator import evaluate, forbidden_node
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.tools import CALCULATOR, Calculator, ToolTurns, answer_template
from rlsys.router.turn_ends import TurnEnds
from tests.helpers.rollout_rig import Rig, abandon, length_reward, make_config, settle

# The calculator


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("2+3*4", "14"),
        ("x = 7\ny = [x, x // 2]\nsum(y) - max(1, 2)", "8"),
        ("round(sqrt(2), 3) if 1 < 2 else 0", "1.414"),
        ("x = 1", "error: the last line has no value"),
        ("", "error: there is nothing to compute"),
        ("1/0", "error: ZeroDivisionError"),
        ("2 +", "error: SyntaxError"),
        ("y", "error: NameError"),
        ("import os", "error: Import is not allowed"),
        ("(1).__class__", "error: Attribute is not allowed"),
        ("'a' * 3", "error: a str is not allowed"),
        ("open(3)", "error: this call is not allowed"),
        ("__import__(3)", "error: this call is not allowed"),
        ("(lambda: 1)()", "error: this call is not allowed"),
        ("[x for x in [1]]", "error: ListComp is not allowed"),
        ("def f(): pass", "error: FunctionDef is not allowed"),
    ],
)
def test_the_language_is_arithmetic(code: str, result: str) -> None:
    assert evaluate(code) == result


def test_names_lead_nowhere() -> None:
    """Also a function that is only named, not called."""
    assert evaluate("[sum][0]").startswith("error: Subscript")
    assert evaluate("sum") == "<built-in function sum>"
    assert evaluate("__builtins__") == "{}"
    assert forbidden_node(ast.parse("f'{1}'").body[0]) == "JoinedStr"


async def test_each_call_has_a_process_with_limits() -> None:
    calculate = Calculator()
    calls = ("6*7", "9**9**9", "[0]*10**12", "1/0", "\x00", "x=2\nx**0.5")
    answers = await asyncio.gather(*(calculate(call) for call in calls))
    assert answers[0] == "42"
    assert answers[1] in ("error: too much time or memory", "error: MemoryError")
    assert answers[2] == "error: MemoryError"
    assert answers[3] == "error: ZeroDivisionError"
    assert answers[4].startswith("error: ")
    assert answers[5].startswith("1.414")


def test_a_restricted_process_can_open_nothing() -> None:
    """No socket, no file, no pipe, whatever the language were to let through."""
    deeds = (
        "import socket; socket.socket()",
        "open('/etc/passwd')",
        "import os; os.open('/dev/null', 0)",
        "import os; os.pipe()",
    )
    for deed in deeds:
        imports = deed.split(";")[0] if ";" in deed else "pass"
        code = f"import runpy; m = runpy.run_path({str(CALCULATOR)!r}); {imports}; m['restrict']()\ntry:\n {deed}\n"
        code += " print('did it')\nexcept OSError as e:\n print(e.errno)"
        process = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
        assert process.stdout.strip() == "24", (deed, process)  # EMFILE


async def test_a_tool_that_does_not_answer_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TOOL_SECONDS", 0.0)
    with pytest.raises(ToolFailed, match="did not answer within 0 s"):
        await Calculator()("1+1")


# Turns

CALL, STOP = 50, 2
"""Token 50 is a call, 2 ends a turn."""


class Words:
    """A tokenizer of whole words: an id is the word of its number."""

    eos_token = "2"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


async def double(call: str) -> str:
    return str(2 * int(call))


def turns(speak: Any, tool: Any = double, max_turns: int = 3, budget: int = 30) -> ToolTurns:
    words: Any = Words()
    return ToolTurns(
        speak, words, tool, ends=TurnEnds({STOP}), call=(f"{CALL} ", f" {CALL}"), answer=("90 ", " 91"),
        max_turns=max_turns, max_response_tokens=budget,
    )  # fmt: skip


def say(sample: Sample, *ids: int) -> None:
    sample.append(Segment(list(ids), [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
    if ids[-1] == STOP:
        sample.status = Status.FINISHED


PROMPT = Prompt(0, "", [5], {})


async def test_turns_and_answers_alternate_until_a_turn_without_a_call() -> None:
    turn_tokens = iter([(7, CALL, 4, CALL, STOP), (CALL, 5, CALL, CALL, 6, CALL, STOP), (8, STOP)])

    async def speak(sample: Sample) -> None:
        say(sample, *next(turn_tokens))

    sample = Sample(0, 0, 0, [5], seed=1)
    await turns(speak)(sample, PROMPT)
    first, second = [7, CALL, 4, CALL, STOP], [CALL, 5, CALL, CALL, 6, CALL, STOP]
    assert list(sample.response_ids) == [*first, 90, 8, 91, *second, 90, 12, 91, 8, STOP]
    assert sample.trained() == [True] * 5 + [False] * 3 + [True] * 7 + [False] * 3 + [True] * 2
    assert sample.status is Status.FINISHED
    assert sample.sampled_tokens == 14


async def test_the_last_turn_is_not_answered() -> None:
    async def speak(sample: Sample) -> None:
        say(sample, CALL, 4, CALL, STOP)

    sample = Sample(0, 0, 0, [5], seed=1)
    await turns(speak, max_turns=2)(sample, PROMPT)
    assert list(sample.response_ids) == [CALL, 4, CALL, STOP, 90, 8, 91, CALL, 4, CALL, STOP]
    assert sample.status is Status.FINISHED


async def test_an_answer_that_does_not_fit_ends_the_sample() -> None:
    async def speak(sample: Sample) -> None:
        say(sample, CALL, 4, CALL, STOP)

    sample = Sample(0, 0, 0, [5], seed=1)
    await turns(speak, budget=7)(sample, PROMPT)
    assert list(sample.response_ids) == [CALL, 4, CALL, STOP]
    assert sample.status is Status.TRUNCATED


def test_failed_calls_are_counted_from_the_tokens() -> None:
    sample = Sample(1, 1, 0, prompt_ids=[1], seed=0)
    texts = {
        2: "<python>",
        3: "tool\nerror: NameError\n",
        4: "tool\n14, no error",
        5: "tool\nerrors: 3",
        6: "<answer>14</answer>",
    }

    def decode(ids: list[int]) -> str:
        return "".join(texts[i] for i in ids)

    assert tools.tool_penalty(sample, decode) == 0.5 + 1  # no call, no answer
    for answer in (3, 4, 5, 3):
        sample.append(Segment([2], [-1.0], [VersionSpan(0, 0, 1)]))
        sample.observe([answer])
    assert tools.tool_penalty(sample, decode) == 2 / 4 + 1
    sample.append(Segment([6], [-1.0], [VersionSpan(0, 0, 1)]))
    assert tools.tool_penalty(sample, decode) == 2 / 4


@pytest.mark.parametrize(
    ("turns", "penalty"),
    [
        ([6], 0.5),
        ([2, 6], 0.0),
        ([6, 6], 1 / 2),
        ([2, 7], 1 / 2),
        ([7, 7, 6], 1.0),
        ([8], 0.5 + 1),
        ([2, 8], 1.0),
    ],
)
def test_answers_too_many_or_none_cost_by_the_turn(turns: list[int], penalty: float) -> None:
    """(answers - 1) / turns, at most 1; without a tool call, 0.5 on top. What the tool says is no answer."""
    texts = {
        2: "<python>", 3: "<answer>4</answer>", 6: "<answer>4</answer>", 8: "<answer>4",
        7: "<answer>4</answer>or<answer>\n5</answer>",
    }  # fmt: skip
    sample = Sample(1, 1, 0, prompt_ids=[1], seed=0)
    for i, turn in enumerate(turns):
        if i:
            sample.observe([3])
        sample.append(Segment([turn], [-1.0], [VersionSpan(0, 0, 1)]))
    assert tools.tool_penalty(sample, lambda ids: "".join(texts[i] for i in ids)) == penalty


def test_the_chat_template_determines_the_text_around_a_tool_result(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert answer_template(tokenizer, "user") == ("<user>", "<assistant><think>")
    tokenizer._template_text = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer._template = None
    with pytest.raises(
        UserError, match=r"role = 'tool': the chat template of .* does not render messages of this role"
    ):
        answer_template(tokenizer, "tool")


async def test_generators_by_name(tmp_path: Path) -> None:
    write_model(tmp_path)

    async def speak(sample: Sample) -> None:
        text = "<python>6*7</python><eos>" if not sample.observed else "</think><answer>42</answer><eos>"
        say(sample, *Tokenizer(tmp_path).encode(text))
        sample.status = Status.FINISHED

    def make(**rollout: Any) -> Any:
        config = Config.model_validate({"model": {"path": tmp_path}, "rollout": rollout})
        return build_generator(config, Tokenizer(tmp_path), speak)

    sample = Sample(0, 0, 0, [5], seed=1)
    await make(generator="calculator")(sample, PROMPT)
    text = Tokenizer(tmp_path).decode(sample.response_ids)
    assert text == "<python>6*7</python><eos><user>42<assistant><think></think><answer>42</answer><eos>"
    with pytest.raises(UserError, match="did you mean calculator"):
        make(generator="calculater")
    with pytest.raises(
        UserError, match=r"rollout\.generator_params: got an unexpected keyword argument 'turns'"
    ):
        make(generator="calculator", generator_params={"turns": 2})


# Under the manager. Scripted tokens are their positions, so a first turn of three tokens is 0 1 2: a call, and STOP.


class Held:
    """A tool that answers when the test lets it."""

    gate: asyncio.Event

    @classmethod
    async def answer(cls, call: str) -> str:
        assert call == "1"
        await cls.gate.wait()
        return "95"


def held_tool(config: Config, tokenizer: Any, speak: Any) -> ToolTurns:
    words: Any = Words()
    return ToolTurns(
        speak, words, Held.answer, ends=TurnEnds({STOP}), call=("0 ", f" {STOP}"), answer=("90 ", " 91"),
        max_turns=3, max_response_tokens=config.rollout.max_response_tokens,
    )  # fmt: skip


def length(sample: Sample) -> int:
    """Turns of three tokens and, after the answer, of one or, in the second group, of eight."""
    return 6 + (8 if sample.group_id else 1) if sample.observed else 3


def test_an_interrupted_sample_resumes_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    """Killed while the tool works, then interrupted within the second turn: no token is lost, none made twice."""
    config = make_config(
        tmp_path,
        rollout={
            "over_provision": 2, "max_staleness": 4, "groups_per_step": 1, "flush_tokens": 1,
            "generator": f"{__name__}:held_tool",
        },
    )  # fmt: skip

    async def killed_in_the_tool() -> None:
        Held.gate = asyncio.Event()
        r = Rig(config, length, length_reward)
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        await settle()
        r.router.tick(3)
        await settle()
        assert all(s.status is Status.PARKED for g in r.buffer.active() for s in g.samples)
        take.cancel()
        await settle()
        abandon(r.buffer)

    async def goes_on() -> None:
        Held.gate = asyncio.Event()
        Held.gate.set()
        r = Rig(config, length, length_reward)
        assert [list(s.response_ids) for g in r.buffer.active() for s in g.samples] == [[0, 1, 2]] * 4
        await r.start()
        first = await r.take(1)
        cut = r.buffer.groups[1].samples[0]
        assert list(cut.response_ids) == [0, 1, 2, 90, 95, 91, 6]
        assert cut.resumes == 0  # a new turn is no resume
        await r.push()
        second = await r.take(2)
        for group, end in ((first.groups[0], 7), (second.groups[0], 14)):
            for s in group.samples:
                assert list(s.response_ids) == [0, 1, 2, 90, 95, 91, *range(6, end)]
                assert s.trained() == [True] * 3 + [False] * 3 + [True] * (end - 6)
        assert second.groups[0].samples[0].versions() == [1] * 3 + [1] * 3 + [2] + [3] * 7
        await r.manager.close()
        r.buffer.close()

    asyncio.run(killed_in_the_tool())
    asyncio.run(goes_on())
