"""One bad item costs one item: what rows, tools, environments, agents, rewards and engines get wrong censors a sample
or leaves a prompt out, is counted under its cause, and ends nobody else's work.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rlsys.agents.endpoint import Endpoint
from rlsys.agents.messages import Answer
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.identity import ANONYMOUS
from rlsys.core.spans import VersionSpan
from rlsys.core.types import CensorCause, Prompt, Sample, Segment, Status
from rlsys.core.weight_updates import Canary
from rlsys.data import Tokenizer, build_source
from rlsys.data.quickstart_model import write_model
from rlsys.engine.wire import EngineError
from rlsys.engine_requests import Limits
from rlsys.evaluation import evaluation, tryout
from rlsys.evaluation.evaluation import answered_items
from rlsys.generators.censoring import Censored, boundary
from rlsys.generators.functions import Functions, FunctionTurns
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import Call, ToolFailed, Turn
from rlsys.ledger.samples import SampleQuery
from rlsys.rewards import Rewards
from rlsys.rewards.results import InvalidReward, RewardResult, join_rewards, parse_reward
from rlsys.rollout.dry_run import dry_run
from rlsys.router.failure_policy import RefusedRequest
from rlsys.router.turn_ends import TurnEnds
from rlsys.worker.scoring import Scorer, Verdict
from tests.helpers import rollout_rig
from tests.helpers.http_engine import HttpEngine
from tests.helpers.rollout_rig import Numbers, make_config, rig
from tests.helpers.router_rig import CANARY_IDS, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine, canary_logprobs
from tests.helpers.service_rig import served, ticking
from tests.unit.generators.test_functions import SCHEMA, TEMPLATE

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
TOKENIZER = Tokenizer(MODEL)
HALF = "\ud83d"
"""Half an emoji: a lone UTF-16 surrogate, as JSON can carry it."""


async def outcome(work: Awaitable[Any]) -> Any:
    """Its result, or what it raised."""
    return (await asyncio.gather(work, return_exceptions=True))[0]


# Evaluations


async def test_an_evaluation_leaves_a_prompt_out_that_is_too_long() -> None:
    limits = Limits(128, 64)

    async def answer(sample: Sample, prompt: Prompt) -> None:
        limits.check_prompt(sample.prompt_ids)
        sample.status = Status.FINISHED

    items = [
        (Sample(-1, -1, 0, [5] * n, seed=0), Prompt(i, "", [5] * n, {})) for i, n in enumerate((3, 100, 4))
    ]
    assert await outcome(answered_items(items, answer)) == [items[0], items[2]]


async def test_an_evaluation_omits_a_prompt_with_a_failing_generator() -> None:
    async def answer(sample: Sample, prompt: Prompt) -> None:
        if prompt.index == 1:
            raise ConnectionResetError("the search server is away")
        sample.status = Status.FINISHED

    items = [(Sample(-1, -1, 0, [5], seed=0), Prompt(i, "", [5], {})) for i in range(3)]
    assert await outcome(answered_items(items, answer)) == [items[0], items[2]]


def test_abandoned_work_can_be_closed_in_another_context() -> None:
    """As the garbage collector does: in the context of whichever task runs it."""

    async def work() -> None:
        with boundary("prompt 0"):
            await asyncio.Future()

    async def start() -> Any:
        coroutine = work()
        asyncio.get_running_loop().call_soon(coroutine.send, None, context=copy_context())
        await asyncio.sleep(0)
        return coroutine

    coroutine = asyncio.run(start())
    copy_context().run(coroutine.close)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of_rows(folder: Path, rows: Path, heldout: Path, **sections: Any) -> Config:
    data = {
        "source": "jsonl",
        "params": {"path": str(rows), "heldout_path": str(heldout)},
        "reward": "exact_answer",
    }
    return Config.model_validate(
        {"run": {"dir": folder}, "model": {"path": MODEL}, "data": data, "eval": {"prompts": 3}, **sections}
    )


@pytest.fixture
def bad_rows(tmp_path: Path) -> Config:
    """Line 3 of the training rows has half an emoji; of the held-out ones, line 2 is too long and line 3 as that."""
    good = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(8)]
    rows = write_rows(tmp_path / "rows.jsonl", *good[:2], {"prompt": f"2+2{HALF}", "answer": "4"}, *good[3:])
    heldout_rows = (
        {"prompt": "7+7", "answer": "14"},
        {"prompt": "3+4" * 2000, "answer": "7"},
        {"prompt": HALF, "answer": ""},
    )
    return config_of_rows(
        tmp_path, rows, write_rows(tmp_path / "held.jsonl", *heldout_rows), rollout={"max_response_tokens": 8}
    )


@pytest.mark.gate  # it takes 2 s
async def test_try_shows_why_a_prompt_is_not_answered(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1", "answer": "2"}, {"prompt": "3+4" * 2000, "answer": "7"}, {"prompt": HALF, "answer": ""},
    )  # fmt: skip
    heldout_path = write_rows(
        tmp_path / "held.jsonl", *({"prompt": f"7+{i}", "answer": "14"} for i in range(3))
    )
    engine = HttpEngine()
    try:
        config = config_of_rows(tmp_path, rows, heldout_path, rollout={"max_response_tokens": 8})
        entries = await outcome(tryout.try_out(config, {await engine.start(): ANONYMOUS}))
    finally:
        await engine.stop()
    assert isinstance(entries, list), entries
    reasons = sorted((str(entry["samples"][0]["reason"]) for entry in entries), key=len)
    assert reasons[0] == "None" and "6004 tokens" in reasons[1] and "lone UTF-16 surrogate" in reasons[2], (
        reasons
    )


@pytest.mark.gate  # it takes 2 s
async def test_eval_counts_the_prompts_that_it_leaves_out(bad_rows: Config) -> None:
    engine = HttpEngine()
    try:
        result = await outcome(evaluation.evaluate(bad_rows, {await engine.start(): ANONYMOUS}))
    finally:
        await engine.stop()
    assert not isinstance(result, Exception), result
    assert (result.prompts, result.metrics().get("left_out")) == (1, 2)


# Rows


def test_a_row_with_a_lone_surrogate_is_a_prompt_without_ids(bad_rows: Config) -> None:
    source = build_source(bad_rows, TOKENIZER)
    prompts: list[Any] = []
    for index in range(8):
        try:
            prompts.append(source.train(index))
        except TypeError as e:
            prompts.append(e)
    (bad,) = [p for p in prompts if not getattr(p, "ids", None)]
    assert isinstance(bad, Prompt) and bad.location.endswith("rows.jsonl:3"), repr(bad)


def test_explain_names_file_and_line_of_rows_that_cannot_be_used(bad_rows: Config) -> None:
    try:
        notes = "\n".join(dry_run(bad_rows).notes)
    except UserError as e:
        notes = f"raised: {e}"
    assert "rows.jsonl:3" in notes and "held.jsonl:2" in notes and "held.jsonl:3" in notes, notes
    assert "6004 tokens" in notes or "tokens" in notes, notes


# Canaries


async def test_canaries_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Numbers):
        def heldout(self, n: int) -> list[Prompt]:
            return [Prompt(i, "", [1] * (9000 if i == 1 else i + 1), {}) for i in range(n)]

    monkeypatch.setattr(rollout_rig, "Numbers", Long)
    async with rig(make_config(tmp_path)) as r:
        await r.manager.restore(0)
        ticket = await r.manager.begin_push()
        await r.manager.end_push(ticket, [])
        lengths = [len(ids) for ids in ticket.canaries]
        assert lengths and max(lengths) <= 512, lengths


class Refusing(ScriptedEngine):
    """It refuses prompts of more than 8 tokens, as SGLang does what is longer than the model's context."""

    def _generate(self, body: dict[str, Any]) -> tuple[int, str]:
        if len(body["input_ids"]) > 8:
            return 400, json.dumps(
                {"error": {"message": "The input is longer than the model's context length"}}
            )
        return super()._generate(body)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("only", [False, True], ids=["beside others", "alone"])
async def test_an_engine_that_refuses_a_canary_is_not_dead(only: bool) -> None:
    async with routing(Refusing("http://a:1")) as r:
        r.version += 1
        for address in await r.router.begin_push(r.version):
            assert address.url == r.engine.url
            r.engine.load(r.version)
        long = list(range(4, 24))
        canaries = [
            Canary(ids, canary_logprobs(ids, r.version)) for ids in ([long] if only else [CANARY_IDS, long])
        ]
        push_result = await outcome(r.router.end_push(r.version, canaries))
        if only:  # nothing speaks for its weights
            assert "refused" in str(push_result), push_result
        else:
            assert r.router.stats()["engines_serving"] == 1, r.router.engine_states()
            assert push_result["push_canaries_refused"] == 1


# A sample's boundary


OWN = """
import asyncio, sys
def own(config, tokenizer, speak):
    async def generate(sample, prompt):
        if sample.index == 0 and prompt.index in {1, 4}:
            what = prompt.index + sample.index
            await asyncio.sleep(0)
            RAISES
        await speak(sample)
    return generate
"""
RAISES = {
    "ConnectionError": "raise ConnectionResetError('the search server is away')",
    "TimeoutError": "raise TimeoutError('nothing in 3 s')",
    "KeyError": "{}['hits']",
    "of a file": "open('/no/such/file')",
    "group": "raise ExceptionGroup('two of them', [ValueError('a'), KeyError('b')])",
    "its own cancellation": "raise asyncio.CancelledError('a task of its own')",
    "exit": "sys.exit(3)",
    "half an emoji": "raise ValueError('\\ud83d')",
    "5 MB": "raise ValueError('y' * 5_000_000)",
    "nothing said": "return",
    "a turn under way": "asyncio.ensure_future(speak(sample)); await asyncio.sleep(0); raise ValueError('beside it')",
    "no words": "raise type('Mute', (Exception,), {'__str__': lambda self: self.words})()",
    "words that are no text": "raise type('Number', (Exception,), {'__str__': lambda self: 5})()",
    "no Exception": "raise type('Stop', (BaseException,), {})('outside')",
    "a database of its own": "import sqlite3; sqlite3.connect(':memory:').execute('SELECT a FROM t')",
    "too large an array": "bytearray(10**17)",
    "a folder that is gone": (
        "import os, tempfile; was = os.getcwd(); new = tempfile.mkdtemp(); os.chdir(new); os.rmdir(new); "
        "asyncio.get_running_loop().call_later(0.01, os.chdir, was); raise ValueError('there')"
    ),
    "what would fool the loss": "from rlsys.core.errors import GeneratorError; raise GeneratorError('no sample')",
}


@pytest.mark.parametrize("raises", RAISES)
async def test_a_generator_that_raises_costs_the_sample(
    raises: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("RAISES", RAISES[raises]))
    rollout = {
        "groups_per_step": 8,
        "group_size": 8,
        "generator": f"{tmp_path}/own.py:own",
        "stall_timeout": 2,
    }
    async with rig(make_config(tmp_path, rollout=rollout)) as r:
        await r.start()
        batch = await outcome(r.take(1))
        assert not isinstance(batch, BaseException), batch
        assert [g.group_id for g in batch.groups] == [0, 2, 3, 5, 6, 7, 8, 9]
        censored = r.manager.samples(SampleQuery(status="censored", limit=10))
        reasons = [s.sample.censor_reason or "" for s in censored]
        assert len(reasons) == 2 and all(0 < len(reason) <= 2000 for reason in reasons), reasons
        assert batch.metrics["censored_samples_exception"] == 2
    assert "Traceback" in caplog.text
    assert "own.py" in caplog.text or raises == "nothing said"


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(0), BaseExceptionGroup("two", [KeyboardInterrupt(), ValueError("a")])],
)
def test_exit_exceptions_of_item_code_censor_the_item(error: BaseException) -> None:
    result: Any = None
    try:
        with boundary("rows.jsonl:1") as item:
            raise error
        result = item.censored
    except (KeyboardInterrupt, BaseExceptionGroup) as e:
        result = e
    assert isinstance(result, Censored) and result.cause is CensorCause.EXCEPTION, repr(result)


async def test_a_cancelled_item_that_raises_is_not_censored() -> None:
    async def work() -> Any:
        with boundary("rows.jsonl:1") as item:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                raise ConnectionError("the browser is closed") from None
        return item.censored

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    assert isinstance(await outcome(task), asyncio.CancelledError)


async def test_more_than_a_share_of_samples_that_fail_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        OWN.replace(
            "sample.index == 0 and prompt.index in {1, 4}", "sample.index == prompt.index % 4"
        ).replace("RAISES", RAISES["KeyError"])
    )
    rollout = {"groups_per_step": 8, "group_size": 16, "generator": f"{tmp_path}/own.py:own"}
    async with rig(make_config(tmp_path, rollout=rollout)) as r:
        await r.start()
        error = await outcome(r.take(1))
        assert isinstance(error, RunError), error
        assert "KeyError: 'hits'" in str(error) and "own.py" in str(error), error
        assert "rollout.max_failed_share" in str(error) and "prompt" in str(error), error


@pytest.mark.parametrize("error", ["RunError", "OSError(28, 'No space left on device')", "sqlite3"])
async def test_errors_of_the_run_end_it(error: str, tmp_path: Path) -> None:
    raised = {
        "RunError": "from rlsys.core.errors import RunError; raise RunError('the ledger is gone')",
        "sqlite3": (
            "import sqlite3; from rlsys.ledger.samples import last_step; last_step(sqlite3.connect(':memory:'))"
        ),
    }.get(error, f"raise {error}")
    (tmp_path / "own.py").write_text(OWN.replace("RAISES", raised))
    rollout = {"groups_per_step": 8, "group_size": 4, "generator": f"{tmp_path}/own.py:own"}
    async with rig(make_config(tmp_path, rollout=rollout)) as r:
        await r.start()
        result = await outcome(r.take(1))
        assert isinstance(result, RunError), result


async def test_a_source_that_raises_for_one_row_costs_that_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Numbers):
        def train(self, index: int) -> Prompt:
            if index == 1:
                raise TypeError("TextInputSequence must be str")
            return super().train(index)

    monkeypatch.setattr(rollout_rig, "Numbers", Odd)
    async with rig(make_config(tmp_path, rollout={"groups_per_step": 8, "group_size": 2})) as r:
        await r.start()
        batch = await outcome(r.take(1))
        assert not isinstance(batch, BaseException), batch
        assert [g.group_id for g in batch.groups] == [0, *range(2, 9)]
        (reason, _) = [
            s.sample.censor_reason for s in r.manager.samples(SampleQuery(status="censored", limit=10))
        ]
        assert "prompt 1" in str(reason) and "TextInputSequence" in str(reason)


async def test_the_client_error_names_the_cause_instead_of_an_http_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(make_config(tmp_path)) as r, served(r) as client:

        async def evaluate() -> Any:
            raise ZeroDivisionError("no such thing")

        monkeypatch.setattr(r.manager, "evaluate", evaluate)
        monkeypatch.setattr(client, "_headers", {**client._headers, "X-Rlsys-Start": "1"})
        await ticking(r, client.restore, 0)
        error = await outcome(ticking(r, client.evaluate))
        assert "ZeroDivisionError: no such thing" in str(error) and "got itself in trouble" not in str(error)


USER_CODE = {
    "rlsys/agents/host.py", "rlsys/algo/trial.py", "rlsys/core/imports.py", "rlsys/config/plugins.py",
    "rlsys/generators/calculator.py", "rlsys/core/process_pool.py", "rlsys/environments/leases.py",
    "rlsys/environments/serve.py", "rlsys/rewards/isolated.py",
    "rlsys/environments/connectors/mcp_tools.py",
}  # fmt: skip
"""Where somebody else's code is tried before the start, or runs in a process of its own."""


def test_only_one_module_has_a_broad_except_clause() -> None:
    """Of those that do not raise on. A library that raises nothing narrower is the other one."""
    file_names = []
    for path in sorted((ROOT / "rlsys").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for handler in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ExceptHandler)):
            kinds = "" if handler.type is None else ast.unparse(handler.type)
            broad = handler.type is None or {"Exception", "BaseException"} & set(re.findall(r"\w+", kinds))
            if broad and not isinstance(handler.body[-1], ast.Raise) and name not in USER_CODE:
                file_names.append(name)
    assert file_names == ["rlsys/generators/censoring.py"]


async def test_a_row_that_a_generator_cannot_use_is_not_unexpected(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        OWN.replace("sample.index == 0 and ", "").replace(
            "RAISES", "from rlsys.core.errors import RowError; raise RowError('it offers no tools')"
        )
    )
    rollout = {"groups_per_step": 8, "group_size": 4, "generator": f"{tmp_path}/own.py:own"}
    async with rig(make_config(tmp_path, rollout=rollout)) as r:
        await r.start()
        batch = await r.take(1)
        assert batch.metrics["censored_samples_row"] == 8
        reasons = {
            s.sample.censor_reason for s in r.manager.samples(SampleQuery(status="censored", limit=10))
        }
        assert "it offers no tools (prompt 1, sample 4)" in reasons


@pytest.mark.virtual_clock
async def test_a_request_that_an_engine_refuses_is_that_samples_matter() -> None:
    class Refuses(ScriptedEngine):
        async def stream(self, body: dict[str, Any]) -> Any:
            if body["rid"].partition("-")[2].startswith("1-"):
                raise EngineError("400: stop is too long", 400)
            async for chunk in super().stream(body):
                yield chunk

    async with routing(Refuses("http://a:1")) as r:
        await r.push()
        samples = [sample(i) for i in range(3)]
        results = await asyncio.gather(*(r.start(s) for s in samples), return_exceptions=True)
        assert isinstance(results[1], RefusedRequest)
        assert [s.status for s in samples] == [Status.FINISHED, Status.PARKED, Status.FINISHED]
        assert r.router.stats()["engines_serving"] == 1
        await r.router.wait_idle(samples[1])


# Environments


class Episode:
    """What an environment says, as it comes over the wire."""

    tools: Sequence[Any] = ()
    restarts = 0

    def __init__(self, messages: Any, step: Any) -> None:
        self.messages, self._step = messages, step

    async def step(self, text: str, calls: Sequence[Any] = ()) -> Any:
        return self._step


class Services:
    restarts = 0

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    @asynccontextmanager
    async def episode(self, task: Any, seed: int) -> AsyncIterator[Episode]:
        yield self._episode


async def played(messages: Any, step: Any) -> Any:
    """The sample, or what the generator raised."""
    rollout = {
        "generator": "environment", "generator_params": {"connector": "gymnasium", "max_turns": 2},
    }  # fmt: skip
    config = Config.model_validate({"model": {"path": MODEL}, "rollout": rollout})

    async def speak(sample: Sample, **_: Any) -> None:
        ids = TOKENIZER.encode("7<eos>")
        sample.append(Segment(ids, [-0.5] * len(ids), [VersionSpan(1, 0, len(ids))]))
        sample.status = Status.FINISHED

    generate: Any = build_generator(config, TOKENIZER, speak)
    generate._services = Services(Episode(messages, step))
    ids = TOKENIZER.encode(TOKENIZER.apply_chat([{"role": "user", "content": "go"}]))
    sample = Sample(5, 1, 0, ids, seed=1)
    raised = await outcome(generate(sample, Prompt(0, "", ids, {}, "go")))
    return sample if raised is None else raised


STEP = {"messages": [{"role": "user", "content": "4"}], "reward": 1.0, "done": False, "right": None}


@pytest.mark.parametrize(
    "odd",
    [
        {"reward": None}, {"reward": float("nan")}, {"reward": float("-inf")}, {"reward": "1.0"}, {"reward": [1.0]},
        {"reward": 10**400}, {"messages": "hello"}, {"messages": ["hello"]}, {"messages": {"role": "user"}},
        {"messages": [{"content": "no role"}]}, {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": {"text": "x"}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 3}]},
        {"done": "no"}, {"messages": None},
    ],
    ids=str,
)  # fmt: skip
async def test_a_bad_answer_of_an_environment_censors_with_its_reason(odd: dict[str, Any]) -> None:
    error = await played((), {**STEP, **odd})
    assert isinstance(error, ToolFailed), error
    assert next(iter(odd)) in str(error), error


@pytest.mark.parametrize("missing", ["messages", "reward", "done"])
async def test_an_answer_that_lacks_a_part_censors(missing: str) -> None:
    error = await played((), {k: v for k, v in STEP.items() if k != missing})
    assert isinstance(error, ToolFailed) and missing in str(error), error


async def test_a_bad_opening_censors() -> None:
    for messages in ("hello", [{"content": "no role"}], [3]):
        error = await played(messages, STEP)
        assert isinstance(error, ToolFailed), error


async def test_texts_of_an_environment_are_read_as_those_of_agents() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    for content, text in (
        (parts, "42"),
        (None, ""),
        (f"4{HALF}", "4\ufffd"),
        ([{"type": "text", "text": HALF}], "\ufffd"),
    ):
        result = await played((), {**STEP, "messages": [{"role": "user", "content": content}]})
        assert isinstance(result, Sample), result
        (span,) = result.observed
        expected = TOKENIZER.decode(TOKENIZER.encode(f"<user>{text}<assistant><think>"))
        assert TOKENIZER.decode(result.response_ids[span.start : span.end]) == expected


# Agents


@asynccontextmanager
async def endpoint() -> AsyncIterator[Any]:
    """Asks the endpoint of an agent whose every question is answered."""
    async with Endpoint().listening() as agent_endpoint, aiohttp.ClientSession() as session:
        opened = agent_endpoint.open()

        async def answering() -> None:
            while True:
                question = await opened.questions.get()
                question.answer.set_result(Answer("1", "7", "", (), "stop", 3, 2))

        async def ask(path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {opened.key}", "Content-Type": "application/json"}
            async with session.post(opened.url + path, data=data, headers=headers) as answer:
                return answer.status, await answer.text()

        task = asyncio.create_task(answering())
        try:
            yield ask
        finally:
            task.cancel()
            agent_endpoint.close(opened)


CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "3+4?"}]}
MESSAGES: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "3+4?"}],
}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
DEEP = b"[" * 100_000 + b"]" * 100_000


def called(calls: Any) -> dict[str, Any]:
    return {"messages": [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": calls}]}


ODD: dict[str, tuple[str, bytes | dict[str, Any]]] = {
    "stop of an empty text": ("/v1/chat/completions", {**CHAT, "stop": [""]}),
    "an empty stop": ("/v1/chat/completions", {**CHAT, "stop": ""}),
    "stop of a number": ("/v1/chat/completions", {**CHAT, "stop": 5}),
    "stop of numbers": ("/v1/chat/completions", {**CHAT, "stop": [5]}),
    "stop of null": ("/v1/chat/completions", {**CHAT, "stop": [None]}),
    "stop of an object": ("/v1/chat/completions", {**CHAT, "stop": {"a": "b"}}),
    "half an emoji": ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
    "half an emoji to stop": ("/v1/chat/completions", {**CHAT, "stop": [HALF]}),
    "tool_calls of a number": ("/v1/chat/completions", {**CHAT, **called(3)}),
    "tool_calls of a text": ("/v1/chat/completions", {**CHAT, **called("add")}),
    "a call of a text": ("/v1/chat/completions", {**CHAT, **called(["add"])}),
    "a function of null": ("/v1/chat/completions", {**CHAT, **called([{**CALLED, "function": None}])}),
    "stream_options of a text": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": "x"}),
    "stream_options of a list": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": [1]}),
    "messages of texts": ("/v1/chat/completions", {"messages": ["hello"]}),
    "a tool's function of a number": (
        "/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": 3}]},
    ),
    "a tool in the form of responses": (
        "/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    ),
    "deep JSON": ("/v1/chat/completions", b'{"messages": ' + DEEP + b"}"),
    "deep metadata": ("/v1/chat/completions", json.dumps(CHAT).encode()[:-1] + b', "metadata": ' + DEEP + b"}"),
    "no UTF-8": ("/v1/chat/completions", b'{"messages": "\xff"}'),
    "not a number": ("/v1/chat/completions", json.dumps(CHAT).encode()[:-1] + b', "temperature": NaN}'),
    "stop_sequences of a number": ("/v1/messages", {**MESSAGES, "stop_sequences": 5}),
    "stop_sequences of an empty text": ("/v1/messages", {**MESSAGES, "stop_sequences": [""]}),
    "a tool's name of null": ("/v1/messages", {**MESSAGES, "tools": [{"name": None, "input_schema": {}}]}),
    "deep messages": ("/v1/messages", b'{"messages": ' + DEEP + b"}"),
    "input of a number": ("/v1/responses", {"input": 3}),
    "an output of a number": (
        "/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]},
    ),
    "stream_options of responses": ("/v1/responses", {"input": "3+4", "stream": True, "stream_options": "x"}),
    "a reward of a huge number": ("/reward", b'{"reward": 1' + b"0" * 400 + b"}"),
    "a deep reward": ("/reward", b'{"reward": ' + DEEP + b"}"),
    "a reward without an object": ("/reward", b"[1]"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
async def test_a_malformed_request_of_an_agent_is_answered_400(what: str) -> None:
    async with endpoint() as ask:
        status, body = await ask(*ODD[what])
        assert status == 400, (status, body[-300:])
        assert "message" in json.loads(body)["error"]


async def test_unusual_but_valid_requests_are_answered() -> None:
    async with endpoint() as ask:
        unusual: list[dict[str, Any]] = [
            {"stop": None}, {"stop": []}, {"stop": "x"}, {"stop": ["x", "y"]}, {"stream_options": None},
            {"stream": True, "stream_options": {"include_usage": True}}, {"tools": None}, called([CALLED]),
            called(None), {"metadata": {"a": 1}}, {"max_tokens": 2**31 - 1},
        ]  # fmt: skip
        for options in unusual:
            status, body = await ask("/v1/chat/completions", {**CHAT, **options})
            assert status == 200, (options, body)


async def test_a_group_censored_by_a_worker_is_counted_once(tmp_path: Path) -> None:
    """Several workers: all samples of a group are censored before the first of their tasks goes on."""
    async with rig(make_config(tmp_path, rollout={"groups_per_step": 4})) as r:
        streams = r.manager._runner._workers
        generate = streams.generate

        async def told_together(sample: Sample, prompt: Prompt) -> None:
            if sample.group_id != 1:
                await generate(sample, prompt)
            await asyncio.sleep(0)
            group = r.buffer.groups.get(1)
            for sibling in group.samples if group is not None and sample.group_id == 1 else ():
                sibling.censor(CensorCause.PROMPT, "prompt refused: too long")

        streams.generate = told_together  # type: ignore[method-assign, assignment]
        await r.start()
        batch = await outcome(r.take(1))
        assert not isinstance(batch, BaseException), batch
        assert [g.group_id for g in batch.groups] == [0, 2, 3, 4]
        assert batch.metrics["censored_samples_prompt"] == 2 and batch.metrics["censored"] == 1


# Rewards


@pytest.mark.parametrize(
    "raises", ["SystemExit(3)", "KeyboardInterrupt", "BaseExceptionGroup('a', [SystemExit()])"]
)
def test_an_async_reward_that_raises_an_exit_exception_is_reported(raises: str, tmp_path: Path) -> None:
    source = (
        f"def own(config):\n    async def score(prompt, text):\n        raise {raises}\n    return score\n"
    )
    (tmp_path / "own.py").write_text(source)
    config = make_config(tmp_path, data={"reward": f"{tmp_path / 'own.py'}:own"})

    async def ask() -> Any:
        rewards = Rewards(config)
        async with rewards.open() as reward_fn:
            scorer = Scorer(lambda: nullcontext(reward_fn), lambda ids: "", 5)
            return await scorer.score(
                Prompt(0, "", [], {}), Sample(0, 0, 0, [5], seed=0, status=Status.FINISHED)
            )

    try:
        verdict: Any = asyncio.run(ask())
    except (SystemExit, KeyboardInterrupt, BaseExceptionGroup) as e:
        verdict = e
    assert isinstance(verdict, Verdict), repr(verdict)
    assert raises.partition("(")[0] in str(verdict.reason) and "own.py" in str(verdict.reason)


@pytest.mark.parametrize("value", [{"a": 1e308, "b": 1e308}, 1e39, -1e300, {"score": 1e30}])
async def test_a_reward_that_the_trainer_cannot_hold_is_none(value: Any, tmp_path: Path) -> None:
    async def reward(prompt: Prompt, text: str) -> Any:
        return (
            value
            if prompt.index == 1
            else {"a": 1.0, "b": 0.0}
            if "a" in str(value)
            else float(len(text) % 2)
        )

    async with rig(make_config(tmp_path, rollout={"groups_per_step": 4}), reward=reward) as r:
        await r.start()
        batch = await outcome(r.take(1))
        assert not isinstance(batch, BaseException), batch
        assert [g.group_id for g in batch.groups] == [0, 2, 3, 4]
        assert batch.metrics["censored_samples_reward"] == 2


def test_weights_of_rewards_do_not_overflow() -> None:
    with pytest.raises(InvalidReward):
        join_rewards(["a", "b"], [10.0, 1.0], [RewardResult(9e17), RewardResult(9e17)])


def test_a_reward_metric_beyond_the_float_range_is_omitted() -> None:
    assert parse_reward({"score": 1, "digits": 10**400, "other": 2}).metrics == {"other": 2.0}


@pytest.mark.parametrize(
    "value",
    [
        {1: 0.5, "1": 0.25}, {"score": 1, None: 2, "None": 3}, {"x" * 10_000_000: 1.0}, {"score": 1, "y" * 201: 2.0},
        {str(i): 1e-6 for i in range(1001)}, b"1",
    ],
    ids=["two keys alike", "two figures alike", "a key of 10 MB", "a long figure", "many parts", "bytes"],
)  # fmt: skip
def test_names_of_parts_are_short_and_different(value: Any) -> None:
    with pytest.raises(InvalidReward) as raised:
        parse_reward(value)
    assert len(str(raised.value)) < 400


# What ends up in words


async def test_lone_surrogates_in_reward_errors_and_names_are_tolerated(tmp_path: Path) -> None:
    async def reward(prompt: Prompt, text: str) -> Any:
        if prompt.index == 1:
            raise ValueError(HALF * 3_000_000)
        return {f"right{HALF}": 1.0}

    async with rig(make_config(tmp_path, rollout={"groups_per_step": 4}), reward=reward) as r:
        await r.start()
        batch = await outcome(r.take(1))
        assert not isinstance(batch, BaseException), batch
        (reason, _) = [
            s.sample.censor_reason for s in r.manager.samples(SampleQuery(status="censored", limit=10))
        ]
        assert reason is not None and len(reason) <= 2000
        assert batch.metrics["censored_samples_reward"] == 2
        assert r.manager.status()["censored"] == 1


async def test_an_over_long_training_prompt_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with rig(make_config(tmp_path, rollout={"groups_per_step": 4})) as r:
        r.router.refuse = lambda s: s.group_id == 1
        await r.start()
        batch = await r.take(1)
        assert batch.metrics.get("censored_samples_prompt") == 2


# Functions


CUT = "def cut(): return 'a\\ud83d'\n\ndef echo(a): return a\n\ndef fails(): raise ValueError('\\ud83d')\n"


@pytest.mark.gate  # it starts the processes of functions
async def test_function_results_are_converted_to_valid_unicode(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CUT)
    names = [f"{tmp_path / 'own.py'}:{name}" for name in ("cut", "echo", "fails")]
    rollout = {"generator": "functions", "generator_params": {"functions": names}}
    functions = Functions(Config.model_validate({"model": {"path": MODEL}, "rollout": rollout}), names, 30)
    try:
        answers = [
            await functions(Call(*c)) for c in (("cut", "{}"), ("echo", '{"a": "b\\ud83d"}'), ("fails", "{}"))
        ]
    finally:
        await functions.close()
    assert answers == ["a\ufffd", "b\ufffd", "error: ValueError: \ufffd"]


async def test_arguments_with_half_an_emoji_are_shown_as_valid_text(tmp_path: Path) -> None:
    """The model's own: SGLang's parser takes the escape for the character."""
    write_model(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    tokenizer._template_text = TEMPLATE
    says = iter(("ask[add]<eos>", "done<eos>"))

    async def speak(sample: Sample) -> None:
        ids = tokenizer.encode(next(says))
        sample.append(Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
        sample.status = Status.FINISHED

    async def answer(call: Call) -> str:
        return "7"

    async def read(text: str, before: str, tools: Any) -> Turn:
        return Turn(text, "", (Call("add", '{"a": "\\ud83d"}'),) if "[add]" in text else ())

    generate = FunctionTurns(
        speak, tokenizer, read, answer, lambda prompt: [SCHEMA], ends=TurnEnds({tokenizer.eos_id}), max_turns=3,
        max_response_tokens=200,
    )  # fmt: skip
    sample = Sample(1, 1, 0, [5], seed=0)
    assert await outcome(generate(sample, Prompt(0, "", [5], {}))) is None
    assert sample.status is Status.FINISHED and len(sample.observed) == 1


async def test_an_agents_history_with_half_an_emoji_in_its_arguments_is_answered() -> None:
    rendering = Rendering(TOKENIZER)
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}]
    deep = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * 90_000}}]
    for tool_calls in (calls, deep):
        history = [
            {"role": "user", "content": "7"},
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
        ]
        try:
            prompt_ids: Any = rendering.prompt(history, ())
        except (TypeError, RecursionError) as e:
            prompt_ids = e
        assert isinstance(prompt_ids, list) and prompt_ids, prompt_ids


# Texts of megabytes: a tokenizer reads a megabyte or less a second, in the event loop of everybody


LARGE = "3" * 10_000_000


def test_a_text_that_no_context_holds_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(TOKENIZER, "_fast", SimpleNamespace(encode=lambda text, **_: read.append(len(text))))
    with pytest.raises((ValueError, AttributeError)):
        TOKENIZER.encode(LARGE)
    assert read == []


def test_a_row_that_no_context_holds_is_a_refused_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", {"prompt": LARGE, "answer": ""}, {"prompt": "1+1", "answer": "2"}
    )
    heldout_path = write_rows(
        tmp_path / "held.jsonl", *({"prompt": f"7+{i}", "answer": "1"} for i in range(3))
    )
    monkeypatch.setattr(Tokenizer, "apply_chat", lambda self, messages, **_: messages[0]["content"])
    source = build_source(config_of_rows(tmp_path, rows, heldout_path), TOKENIZER)
    encode, read = Tokenizer.encode, []

    def watched(self: Tokenizer, text: str) -> list[int]:
        if len(text) < 100:
            return encode(self, text)

        def tokenized(text: str, **_: Any) -> Any:
            read.append(len(text))
            return SimpleNamespace(ids=[3] * 5000)

        fast = SimpleNamespace(encode=tokenized, get_vocab=dict)
        with monkeypatch.context() as m:
            m.setattr(self, "_fast", fast)
            return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    refused = [p for p in (source.train(i) for i in range(2)) if p.refusal]
    assert [(p.refusal_cause, "rows.jsonl:1" in p.refusal) for p in refused] == [(CensorCause.PROMPT, True)]
    assert read == []


async def test_an_oversized_environment_response_fails_its_episode() -> None:
    start_time = time.process_time()
    error = await played((), {**STEP, "messages": [{"role": "user", "content": LARGE}]})
    assert isinstance(error, ToolFailed) and "characters" in str(error), error
    assert time.process_time() - start_time < 5


@pytest.mark.gate  # it starts the processes of functions
async def test_function_results_have_a_size_limit(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def large(): return 'a' * 80_000_000\n")
    names = [f"{tmp_path / 'own.py'}:large"]
    rollout = {"generator": "functions", "generator_params": {"functions": names}}
    functions = Functions(Config.model_validate({"model": {"path": MODEL}, "rollout": rollout}), names, 30)
    try:
        answers = [await functions(Call("large", "{}")), await functions(Call("none", "{}"))]
    finally:
        await functions.close()
    assert answers[0].startswith("error") and len(answers[0]) < 400, answers[0][:100]
