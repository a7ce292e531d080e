"""One strict xfail for each finding on what the rollout reads: F6 to F9, F11. tests/findings.md lists them.

The templates here are our own: each has one trait of a published family's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest

from rlsys.agents import anthropic, chat, responses
from rlsys.agents.endpoint import Endpoint, Session
from rlsys.agents.messages import Answer, BadRequest, TurnRequest
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer, build_source
from rlsys.data.tables import read_lines
from rlsys.engine.chunks import decode_chunk, read_chunk
from rlsys.generators.functions import FunctionTurns
from rlsys.generators.parser_client import Call, Turn
from rlsys.generators.tools import ToolTurns, answer_template
from rlsys.rewards import Rewards
from rlsys.router.turn_ends import TurnEnds
from rlsys.worker.assembly import build_scorer
from rlsys.worker.streams import Streams

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


# -- F6: turns with tools ------------------------------------------------------------------------------------

CALLS = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
)
BODY = "{{ m.content or '' }}" + CALLS
OPENS = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>" + BODY
    + "{% if m.role == 'assistant' %}<eos>\n{% endif %}{% endfor %}" + OPENS
)  # fmt: skip
THINKS_LAST = (  # as Qwen3: only the last turn of the model shows its thinking, empty where there is none
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    + BODY + "{% if m.role == 'assistant' %}<eos>\n{% endif %}{% endfor %}" + OPENS
)  # fmt: skip
ROLE_ENDS = (  # as GLM-4.5: no end of a turn; the model ends it with the mark of who speaks next
    "{% for m in messages %}{% if m.role == 'tool' %}<user>\n{% else %}<{{ m.role }}>{% endif %}"
    + BODY + "{% endfor %}" + OPENS
)  # fmt: skip
JOINS_ARGUMENTS = PLAIN.replace(  # as DeepSeek-V3: arguments are text
    "{{ c.function.arguments | tojson }}", "{{ '(' + c.function.arguments + ')' }}"
)
WANTS_A_CALL = (  # as gpt-oss and MiniMax-M2: an answer of a tool needs a call before it
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set ns.called = true %}{% endif %}{% if m.role == 'tool' and not ns.called %}"
    "{{ raise_exception('a tool answers nobody') }}{% endif %}<{{ m.role }}>" + BODY
    + "{% if m.role == 'assistant' %}<eos>\n{% endif %}{% endfor %}" + OPENS
)  # fmt: skip
TWO_ENDS = (  # as gpt-oss: the last turn ends with another mark than those before it
    "{% for m in messages %}<{{ m.role }}>" + BODY
    + "{% if m.role == 'assistant' %}{{ '<eos>' if loop.last else '</answer>' }}{% endif %}{% endfor %}" + OPENS
)  # fmt: skip
ITEMS = PLAIN.replace(  # as GLM-4.5: arguments are an object
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"
)


def tokenizer_of(template: str) -> Tokenizer:
    tokenizer = Tokenizer(MODEL)
    tokenizer._template_text = template
    return tokenizer


class Reader:
    """In the place of SGLang's parser: the call of a turn that holds `[add`."""

    async def __call__(self, text: str, before: str, tools: Sequence[Any]) -> Turn:
        return Turn(text, "", (Call("add", '{"a": 1}'),) if "[add" in text else ())


async def answered(call: Call) -> str:
    return "7"


def speaker(tokenizer: Tokenizer, ends: TurnEnds, *said: str) -> Callable[[Sample], Any]:
    words = iter(said)

    async def speak(sample: Sample) -> None:
        ids = tokenizer.encode(next(words))
        sample.append(Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
        sample.status = Status.FINISHED if ends.is_ended(ids) else Status.TRUNCATED

    return speak


async def observed_by_functions(
    template: str, turn: str, ends: Sequence[str], texts: Sequence[str] = ()
) -> str:
    """What a sample has between `turn`, which calls a function, and the next turn of the model."""
    tokenizer = tokenizer_of(template)
    turn_ends = TurnEnds([tokenizer.encode(e)[0] for e in ends], texts, tokenizer.decode)
    functions: Any = answered
    turns = FunctionTurns(
        speaker(tokenizer, turn_ends, turn, f"7{ends[0]}"), tokenizer, Reader(), functions, lambda _: [SCHEMA],  # type: ignore[arg-type]
        ends=turn_ends, max_turns=3, max_response_tokens=200,
    )  # fmt: skip
    sample = Sample(0, 0, 0, [5], seed=1)
    try:
        await turns(sample, Prompt(0, "", [5], {"tools": [SCHEMA]}))
    except UserError as refusal:
        return f"UserError: {refusal}"
    (span,) = sample.observed
    return tokenizer.decode(sample.response_ids[span.start : span.end])


async def test_rollout_inputs_f6_control_a_plain_template(tmp_path: Path) -> None:
    assert await observed_by_functions(PLAIN, "[add]<eos>", ["<eos>"]) == "\n<tool>7<assistant>"


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F6: functions cannot follow a turn in some families' templates, or say its end twice",
)
@pytest.mark.parametrize(
    ("template", "turn", "ends", "texts", "expected"),
    [
        (THINKS_LAST, "[add]<eos>", ["<eos>"], [], "\n<tool>7<assistant>"),
        (ROLE_ENDS, "[add]<user>", ["<user>"], [], "\n7<assistant>"),
        (JOINS_ARGUMENTS, "[add]<eos>", ["<eos>"], [], "\n<tool>7<assistant>"),
        (PLAIN, "[add!", ["<eos>"], ["!"], "<eos>\n<tool>7<assistant>"),
    ],
    ids=["thinking of the last turn", "a role's mark ends a turn", "arguments as text", "a stop text"],
)
async def test_rollout_inputs_f6_functions_continue_turns_as_the_template_does(
    template: str, turn: str, ends: list[str], texts: list[str], expected: str
) -> None:
    assert await observed_by_functions(template, turn, ends, texts) == expected


async def test_rollout_inputs_f6_the_calculator_ends_a_turn_that_a_stop_text_ended() -> None:
    tokenizer = tokenizer_of(PLAIN)
    ends = TurnEnds({tokenizer.eos_id}, ["</answer>"], tokenizer.decode)

    async def tool(_: str) -> str:
        return "7"

    turns = ToolTurns(
        speaker(tokenizer, ends, "<answer>3+4</answer>", "7<eos>"), tokenizer, tool, ends=ends,
        call=("<answer>", "</answer>"), answer=answer_template(tokenizer, "user"),
        max_turns=3, max_response_tokens=200,
    )  # fmt: skip
    sample = Sample(0, 0, 0, [5], seed=1)
    await turns(sample, Prompt(0, "", [5], {}))
    (span,) = sample.observed
    observation = tokenizer.decode(sample.response_ids[span.start : span.end])
    assert observation == "<eos>\n<user>7<assistant>"


CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ANSWERED = {"role": "tool", "tool_call_id": "c", "content": "7"}
HISTORY: list[Mapping[str, Any]] = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    ANSWERED,
]


def rendered(template: str, render: Callable[[Rendering], list[int]]) -> str:
    tokenizer = tokenizer_of(template)
    try:
        return tokenizer.decode(render(Rendering(tokenizer)))
    except BadRequest as refusal:
        return f"400: {refusal}"


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F6: behind an agent's turn its calls are not rendered, so some templates refuse answers",
)
def test_rollout_inputs_f6_a_tool_answer_follows_the_call_of_its_turn() -> None:
    text = rendered(WANTS_A_CALL, lambda r: r.continuation([ANSWERED], [SCHEMA], "<eos>"))
    assert text == "\n<tool>7<assistant>"


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F6: a turn that ended with the mark of a last turn gets that of an earlier one, too",
)
def test_rollout_inputs_f6_a_continuation_does_not_repeat_the_end_token() -> None:
    text = rendered(TWO_ENDS, lambda r: r.continuation([{"role": "user", "content": "2"}], [], "<eos>"))
    assert text == "<user>2<assistant>"


def broken(arguments: str) -> list[Mapping[str, Any]]:
    call = {**CALLED, "function": {"name": "add", "arguments": arguments}}
    return [HISTORY[0], {"role": "assistant", "content": "", "tool_calls": [call]}, ANSWERED]


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F6: arguments in a history are given in one form only, which some templates refuse",
)
@pytest.mark.parametrize(
    ("template", "history"),
    [(JOINS_ARGUMENTS, HISTORY), (ITEMS, broken('{"a": '))],
    ids=["arguments as text", "arguments that are no JSON"],
)
def test_rollout_inputs_f6_a_first_question_may_have_calls_in_its_history(
    template: str, history: list[Mapping[str, Any]]
) -> None:
    text = rendered(template, lambda r: r.prompt(history, ()))
    assert not text.startswith("400"), text
    assert text.endswith("<tool>7<assistant>")


# -- F7: what reward functions get -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has `ab` as one token, which a model may also say as two."""
    folder = tmp_path_factory.mktemp("models") / "merging"
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["model"]["vocab"]["ab"] = len(raw["model"]["vocab"])
    raw["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(raw), encoding="utf-8")
    return folder


async def trl_length(completions, completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(completion_ids[0]))]


async def trl_last(completions, completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    return [float(completion_ids[0][-1])]


async def slime_length(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    return float(sample.response_length)


async def slime_tokens(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    return float(len(sample.tokens))


async def slime_truncated(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    return float(sample.status is type(sample).Status.TRUNCATED)


async def scored(model: Path, reward: Any, ids: Sequence[int]) -> float | None:
    """Of a response of these ids to a prompt of two, as the rollout asks for it."""
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": reward}})
    rewards, tokenizer, unused = Rewards(config), Tokenizer(model), mock.Mock()
    sample = Sample(0, 0, 0, [1, 2], seed=1)
    sample.append(Segment(list(ids), [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
    sample.status = Status.FINISHED if ids[-1] == EOS else Status.TRUNCATED
    scorer = build_scorer(config, rewards, tokenizer)
    streams = Streams(config, unused, scorer, unused, unused, unused, unused, flush_tokens=1)
    try:
        verdict = await streams.score(
            sample, Prompt(0, "", [1, 2], {"answer": "3", "prompt": "1+2="}, "1+2=")
        )
    finally:
        await rewards.close()
    assert verdict.reason is None, verdict.reason
    return verdict.reward


def own(name: str) -> dict[str, str]:
    return {"name": f"{Path(__file__)}:{name}"}


A, B, EOS = 20, 21, 2
SAMPLED = (A, B, A, B, EOS)
CUT_OFF = (A, B, A, B)


@pytest.mark.parametrize(
    ("reward", "ids", "expected"),
    [
        ("trl_length", SAMPLED, 5.0),
        ("trl_last", SAMPLED, float(EOS)),
        ("trl_length", CUT_OFF, 4.0),
        ("slime_length", SAMPLED, 5.0),
        ("slime_tokens", SAMPLED, 7.0),
        ("slime_truncated", CUT_OFF, 1.0),
    ],
)
async def test_rollout_inputs_f7_a_reward_function_receives_the_sampled_tokens(
    merging: Path, reward: str, ids: Sequence[int], expected: float
) -> None:
    """a b a b: the text's own tokens are ab ab. TRL's completion_ids have the end; slime counts it."""
    assert await scored(merging, own(reward), ids) == expected


@pytest.mark.gate  # a built-in reward runs in a process of its own
async def test_rollout_inputs_f7_the_reward_length_counts_sampled_tokens(merging: Path) -> None:
    """limit 10, buffer 10: a tenth for each of the five tokens."""
    reward = {"name": "length", "params": {"limit": 10, "buffer": 10}}
    assert await scored(merging, reward, SAMPLED) == pytest.approx(-0.5)


# -- F8: JSON lines ---------------------------------------------------------------------------------------------


def lines_of(path: Path) -> tuple[list[Any], list[str]] | str:
    try:
        lines = read_lines([path])
    except UserError as refusal:
        return str(refusal)
    rows = [lines.row(i) for i in range(len(lines))]
    return rows, [lines.location(i).rpartition(":")[2] for i in range(len(lines))]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"], ids=["U+2028", "U+2029", "U+0085"])
def test_rollout_inputs_f8_a_line_ends_at_a_newline_only(mark: str, tmp_path: Path) -> None:
    """json.dumps(ensure_ascii=False) and JSON.stringify write these as they are."""
    rows = [{"prompt": f"a{mark}b", "answer": "1"}, {"prompt": "c", "answer": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    assert lines_of(path) == (rows, ["1", "2"])


def test_rollout_inputs_f8_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert lines_of(path) == ([{"prompt": "a"}, {"prompt": "b"}], ["1", "2"])


# -- F9: requests of stock agents ---------------------------------------------------------------------------------

ASKS = [{"role": "user", "content": "What is 3+4?"}]
TOOL = {"name": "Bash", "description": "runs", "input_schema": {"type": "object", "properties": {}}}
CLAUDE = {
    "model": "policy", "max_tokens": 32000, "messages": ASKS, "stream": True, "tools": [TOOL],
    "metadata": {"user_id": "u"}, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
}  # fmt: skip
CODEX_TOOL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
CODEX = {
    "model": "policy", "input": [{"type": "message", "role": "user", "content": "hi"}], "stream": True,
    "store": False, "instructions": "i", "tools": [CODEX_TOOL], "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"],
}  # fmt: skip
OPENAI = {"model": "policy", "messages": ASKS}


def refusal_of(read: Callable[[Mapping[str, Any]], TurnRequest], body: Mapping[str, Any]) -> str:
    """Empty where it is taken. A fault of ours is told as one."""
    try:
        read(body)
    except BadRequest as refusal:
        return f"400 {refusal}"
    except Exception as fault:  # noqa: BLE001 - the endpoint answers 500
        return f"500 {type(fault).__name__}: {fault}"
    return ""


def test_rollout_inputs_f9_control_plain_requests_are_accepted() -> None:
    apis = ((anthropic, CLAUDE), (responses, CODEX), (chat, OPENAI))
    assert [refusal_of(api.read, body) for api, body in apis] == ["", "", ""]


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F9: stock agents and clients are refused for fields that ask for nothing in sampling",
)
@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        (anthropic, CLAUDE, {"thinking": {"type": "adaptive"}}),
        (anthropic, CLAUDE, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}),
        (anthropic, CLAUDE, {"output_config": {"effort": "high"}}),
        (anthropic, CLAUDE, {"messages": [*ASKS, {"role": "system", "content": "a reminder"}]}),
        (responses, CODEX, {"reasoning": {"summary": "auto"}}),
        (responses, CODEX, {"client_metadata": {"session": "1"}}),
        (responses, CODEX, {"tools": [CODEX_TOOL, {"type": "web_search"}]}),
        (responses, CODEX, {"tools": [CODEX_TOOL, {"type": "namespace", "name": "n", "tools": []}]}),
        (chat, OPENAI, {"parallel_tool_calls": False}),
        (chat, OPENAI, {"thinking": {"type": "enabled"}}),
        (chat, OPENAI, {"logprobs": True}),
    ],
    ids=lambda v: f"{json.dumps(v)[:40]}" if isinstance(v, dict) and len(v) == 1 else "",
)
def test_rollout_inputs_f9_a_stock_agents_request_is_accepted(
    api: Any, body: Mapping[str, Any], field: Mapping[str, Any]
) -> None:
    """Claude Code, Codex, and the Python clients of OpenAI."""
    assert refusal_of(api.read, {**body, **field}) == ""


@asynccontextmanager
async def endpoint() -> AsyncIterator[tuple[Session, aiohttp.ClientSession]]:
    async with Endpoint().listening() as listening:
        session = listening.open()
        headers = {"x-api-key": session.key}
        async with aiohttp.ClientSession(headers=headers, trust_env=False) as client:
            yield session, client


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="rollout_inputs F9: Claude Code's further addresses answer 404"
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/messages/count_tokens"), ("HEAD", "/")])
async def test_rollout_inputs_f9_claude_codes_further_requests_are_answered(method: str, path: str) -> None:
    body = None if method == "HEAD" else {"model": "policy", "messages": ASKS}
    async with (
        endpoint() as (session, client),
        client.request(method, session.url + path, json=body) as answer,
    ):
        assert answer.status == 200


# -- F11 -----------------------------------------------------------------------------------------------------------

MALFORMED = {
    "tool_calls": {"messages": [{"role": "assistant", "content": "", "tool_calls": 3}, *ASKS]},
    "stop": {"stop": 5},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_rollout_inputs_f11_a_malformed_request_is_the_clients_fault(change: Mapping[str, Any]) -> None:
    assert refusal_of(chat.read, {**OPENAI, **change}).startswith("400")


def test_rollout_inputs_f11_stream_options_are_checked_before_the_stream() -> None:
    body = {**OPENAI, "stream": True, "stream_options": "x"}
    refusal, stream = refusal_of(chat.read, body), b""
    if not refusal:
        try:
            stream = b"".join(chat.events(Answer("1", "7", "", (), "stop", 3, 1), body))
        except AttributeError as fault:
            refusal = f"breaks off: {fault}"
    assert refusal.startswith("400") or stream.endswith(b"data: [DONE]\n\n"), refusal


async def test_rollout_inputs_f11_a_deep_body_is_the_clients_fault() -> None:
    async with endpoint() as (session, client):
        answer = await client.post(session.url + chat.PATH, data=b"[" * 100_000)
        assert answer.status == 400


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="rollout_inputs F11: a question that ends with the assistant's message is answered as a new turn",
)
@pytest.mark.parametrize("api", [anthropic, chat], ids=["anthropic", "chat"])
def test_rollout_inputs_f11_a_prefill_is_continued_or_rejected(api: Any) -> None:
    body = {**OPENAI, "max_tokens": 9, "messages": [*ASKS, {"role": "assistant", "content": "<answer>"}]}
    try:
        request = api.read(body)
        prompt = Tokenizer(MODEL).decode(Rendering(Tokenizer(MODEL)).prompt(request.messages, ()))
    except BadRequest:
        return
    assert prompt.endswith("<answer>"), f"the model goes on from {prompt!r}"


def test_rollout_inputs_f11_flat_tools_are_rejected_or_converted() -> None:
    try:
        request = chat.read({**OPENAI, "tools": [CODEX_TOOL]})
    except BadRequest:
        return
    assert [t.get("function", {}).get("name") for t in request.tools] == ["shell"]


def test_rollout_inputs_f11_one_prompt_can_be_trained_on(tmp_path: Path) -> None:
    """The usual test whether anything learns: overfit one prompt. Nothing is held out, or the prompt itself."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    refusals = []
    for prompts in (1, 0):
        try:
            config = Config.model_validate(
                {
                    "model": {"path": MODEL}, "eval": {"prompts": prompts},
                    "data": {"source": "jsonl", "params": {"path": str(path)}, "reward": "exact_answer"},
                }
            )  # fmt: skip
            build_source(config, Tokenizer(MODEL)).heldout(prompts)
            return
        except (UserError, ValueError) as refusal:
            refusals.append(" ".join(str(refusal).split()))
    raise AssertionError(f"eval.prompts = 1: {refusals[0]}; eval.prompts = 0: {refusals[1]}")


def chunk_of(mu: str, tops: str = "") -> bytes:
    extra_field = f',"output_top_logprobs":[{tops}]' if tops else ""
    meta = (
        '{"weight_version":"1","finish_reason":null,"prompt_tokens":3,"completion_tokens":1,'
        f'"output_token_logprobs":[[{mu},5,null]]{extra_field}}}'
    )
    return f'{{"output_ids":[5],"meta_info":{meta}}}'.encode()


def test_rollout_inputs_f11_a_candidate_of_probability_0_is_no_fault_of_the_engine() -> None:
    """SGLang writes -inf as null."""
    try:
        read_chunk(decode_chunk(chunk_of("-0.0", "[[-0.0,5,null],[null,6,null]]")), 0, int)
    except ValueError as fault:
        raise AssertionError(f"ValueError: {fault}") from None


def test_rollout_inputs_f11_a_log_prob_above_0_is_a_fault_of_the_engine() -> None:
    try:
        logprobs = read_chunk(decode_chunk(chunk_of("0.7")), 0, int).mu
    except ValueError:
        return
    assert max(logprobs) <= 0
