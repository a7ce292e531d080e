"""Agents hear what the engines made, the sample has exactly that, and no agent ends anybody but its sample."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import venv
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from rlsys.agents import endpoint, remote
from rlsys.agents.messages import Answer
from rlsys.config import Config, identity, load_config
from rlsys.config.data import DataConfig
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.generator import build_generator
from rlsys.generators.tools import ToolFailed
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.rewards import make_score
from rlsys.rollout.dry_run import dry_run
from rlsys.router.turn_ends import TurnEnds
from rlsys.worker.scoring import with_turn_rewards
from tests.helpers.responses import response_of
from tests.helpers.rollout_rig import make_config

pytestmark = pytest.mark.gate  # each starts a process that agents are forked from

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
AGENTS = ROOT / "tests/data/agents/plain.py"
TOKENIZER = Tokenizer(MODEL)
SAID = [
    "so</think><python>3+4</python><eos>",
    "and</think><python>2+2</python><eos>",
    "<answer>11</answer><eos>",
]
WHOLE = f"{SAID[0]}<user>7<assistant><think>{SAID[1]}<user>4<assistant><think>{SAID[2]}"


def config(agent: str, params: dict[str, Any] | None = None, **rollout: Any) -> Config:
    generator_params = {"run": f"{AGENTS}:{agent}", **(params or {})}
    return Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {"generator": "agent", "generator_params": generator_params, **rollout},
        }
    )


def prompt(**entry: Any) -> Prompt:
    text = TOKENIZER.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
    return Prompt(0, text, TOKENIZER.encode(text), {"answer": "11", **entry}, "3+4+(2+2)")


def fresh() -> Sample:
    return Sample(5, 1, 0, prompt().ids, seed=1)


class Model:
    """It says SAID, turn by turn; of the tokens of this call, at most `at_once` before it is cancelled. In further
    sequences it says how often it was asked there."""

    def __init__(self, said: Sequence[str] = SAID, budget: int = 256, at_once: int | None = None) -> None:
        self.said, self.budget, self.at_once = [TOKENIZER.encode(t) for t in said], budget, at_once
        self.sides: list[str] = []
        self.asked: list[str] = []

    async def __call__(
        self, sample: Sample, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        await asyncio.sleep(0)
        ends = TurnEnds({TOKENIZER.eos_id}, stop_texts, TOKENIZER.decode)
        start = sample.observed[-1].end if sample.observed else 0
        if sample.sequence:
            if not sample.tokens or sample.observed_last:
                self.sides.append(TOKENIZER.decode([*sample.prompt_ids, *sample.response_ids]))
            turn = TOKENIZER.encode(f"{len(self.sides)}<eos>")
        else:
            turn = self.said[len(sample.observed)]
            self.asked.append(TOKENIZER.decode(sample.response_ids))
        limit = min(self.budget, self.budget if max_tokens is None else max_tokens)
        for token in turn[sample.tokens - start :]:
            if sample.tokens >= limit:
                break
            if self.at_once == 0:
                raise asyncio.CancelledError
            self.at_once = None if self.at_once is None else self.at_once - 1
            sample.append(Segment([token], [-sample.tokens / 7], [VersionSpan(1, 0, 1)]))
            if ends.is_ended(sample.response_ids[start:]):
                sample.status = Status.FINISHED
                return
        sample.status = Status.TRUNCATED


async def made(
    made_for: Config, sample: Sample | None = None, model: Model | None = None, **entry: Any
) -> Sample:
    sample = sample or fresh()
    generate = build_generator(made_for, TOKENIZER, model or Model())
    await generate(sample, prompt(**entry))
    return sample


def told(s: Sample) -> tuple[object, ...]:
    return s.prompt_ids, s.response_ids, s.mu, s.observed, s.status


@pytest.mark.parametrize("agent", ["sums", "sums_async", "command"])
async def test_the_sample_contains_agent_turns_exactly_as_generated(agent: str) -> None:
    as_program = {"run": None, "command": [sys.executable, str(AGENTS)]}
    s = await made(config(agent, as_program if agent == "command" else None))
    assert TOKENIZER.decode(s.response_ids) == WHOLE
    observed = [TOKENIZER.decode(s.response_ids[o.start : o.end]) for o in s.observed]
    assert observed == ["<user>7<assistant><think>", "<user>4<assistant><think>"]
    assert (s.status, s.own_prompt, s.prompt_ids) == (Status.FINISHED, False, prompt().ids)
    assert [m for m, is_trained in zip(s.mu, s.trained(), strict=True) if is_trained] == [
        -i / 7 for i, is_trained in enumerate(s.trained()) if is_trained
    ]


async def test_agents_of_many_samples_run_at_the_same_time() -> None:
    generate = build_generator(config("sums"), TOKENIZER, Model())
    samples = [Sample(i, 1, i, prompt().ids, seed=i) for i in range(12)]
    await asyncio.gather(*(generate(s, prompt()) for s in samples))
    assert {TOKENIZER.decode(s.response_ids) for s in samples} == {WHOLE}


async def test_an_agent_restarted_at_any_token_produces_the_same_response() -> None:
    """The agent runs anew and hears again what was saved; no engine is asked for that a second time."""
    model = Model()
    generate = build_generator(config("sums"), TOKENIZER, model)
    await generate(reference := fresh(), prompt())
    for tokens in range(0, sum(reference.trained()), 5):
        s, model.at_once = fresh(), tokens
        with pytest.raises(asyncio.CancelledError):
            await generate(s, prompt())
        assert sum(s.trained()) == tokens
        s.status, model.at_once, model.asked = Status.PARKED, None, []
        await generate(s, prompt())
        assert told(s) == told(reference)
        assert all(len(TOKENIZER.encode(text)) >= s.observed[0].start for text in model.asked[1:])


@pytest.mark.parametrize("budget", range(1, len(TOKENIZER.encode(WHOLE)) + 2, 14))
async def test_no_response_exceeds_its_budget(budget: int) -> None:
    """Not even where the agent cannot read a turn that was cut off."""
    s = await made(config("sums", max_response_tokens=budget), model=Model(budget=budget))
    assert 0 < s.tokens <= budget
    assert TOKENIZER.encode(WHOLE)[: s.tokens] == list(s.response_ids)
    assert s.status is (Status.FINISHED if s.tokens == len(TOKENIZER.encode(WHOLE)) else Status.TRUNCATED)


async def test_an_endless_response_is_truncated_without_an_agent_failure() -> None:
    s = await made(config("asks_for_ever", max_response_tokens=60), model=Model(["no<eos>"] * 9, budget=60))
    assert s.status is Status.TRUNCATED and 0 < s.tokens <= 60


@pytest.mark.parametrize(
    ("agent", "params", "why"),
    [
        ("raises", {}, r"plain.py:raises: KeyError: '3\+4\+\(2\+2\)' \(.*plain.py:\d+\)"),
        ("silent", {}, "plain.py:silent: ended without requesting an answer of the model"),
        ("runs_away", {"max_calls": 3}, r"runs_away: made more than 3 requests \(.*max_calls\)"),
        ("stands_still", {"idle_seconds": 0.2}, r"stands_still: sent no request for 0.2 s after request 1"),
        ("is_always_killed", {}, "is_always_killed: killed 3 times, the last time by signal 9"),
        (
            "hot",
            {},
            r"RuntimeError: 400 temperature = 0.3: expected no value, or rollout.temperature = 1.0, .*plain.py:\d+",
        ),
    ],
)
async def test_an_agent_that_fails_censors_its_sample_and_is_named(
    agent: str, params: dict[str, Any], why: str
) -> None:
    with pytest.raises(ToolFailed, match=why):
        await made(config(agent, params))


async def test_a_program_that_fails_censors_too() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(ToolFailed, match="ended with code 3"):
        await made(config("", {"run": None, "command": command}))
    command[2] = "import os; raise SystemExit(4 if 'PYTHONPATH' in os.environ else 5)"
    with pytest.raises(ToolFailed, match="ended with code 5"):  # so that it may run in a venv of its own
        await made(config("", {"run": None, "command": command}))
    with pytest.raises(UserError, match="command = '/no/such/program': expected a program"):
        await made(config("", {"run": None, "command": ["/no/such/program"]}))


@pytest.mark.parametrize(
    ("agent", "worth", "marks"),
    [
        ("worth", 0.5, [0.5]),
        ("worth", True, [1.0]),
        ("worth", None, None),
        ("worth", "an answer", None),
        ("says_its_worth", -2, [0.0, 0.0, -2.0]),
    ],
)
async def test_an_agent_may_return_a_reward_for_its_response(
    agent: str, worth: object, marks: list[float] | None
) -> None:
    """It is the worth of the last turn."""
    turn_rewards = (await made(config(agent), worth=worth)).turn_rewards
    assert (None if turn_rewards is None else [mark.reward for mark in turn_rewards]) == marks


async def test_the_agent_reward_is_the_value_returned_by_the_agent() -> None:
    wanting = config("worth").model_copy(update={"data": DataConfig.model_validate({"reward": "agent"})})
    s = await made(wanting, worth=0.5)
    score = make_score(wanting)
    assert score(with_turn_rewards(prompt(), s), response_of("")) == 0.5
    with pytest.raises(ToolFailed, match=r"returned no reward, which data\.reward = agent requires"):
        await made(wanting, worth=None)
    with pytest.raises(ToolFailed, match="reward = nan: expected a finite number"):
        await made(wanting, worth=float("nan"))
    endless = config("asks_for_ever", max_response_tokens=60).model_copy(update={"data": wanting.data})
    full = await made(endless, model=Model(["no<eos>"] * 9, budget=60))
    assert full.turn_rewards is not None and {mark.reward for mark in full.turn_rewards} == {0.0}
    with pytest.raises(UserError, match=r"rollout\.generator = 'single_turn': expected"):
        make_score(Config.model_validate({"model": {"path": MODEL}, "data": {"reward": "agent"}}))


async def test_an_agent_in_the_python_of_a_venv_without_any_package(tmp_path: Path) -> None:
    """Nothing of rlsys' own packages is there, and what an agent needs of rlsys is."""
    venv.create(tmp_path / "venv")
    (tmp_path / "agent.py").write_text(
        "import importlib.util\nfrom rlsys.environments.client import URL\n"
        "assert not any(map(importlib.util.find_spec, ('pydantic', 'psutil', 'aiohttp')))\n"
        + AGENTS.read_text()
    )
    params = {"run": f"{tmp_path}/agent.py:sums", "python": str(tmp_path / "venv/bin/python")}
    assert TOKENIZER.decode((await made(config("", params))).response_ids) == WHOLE
    with pytest.raises(UserError, match="python = '/no/such/python': expected a program"):
        await made(config("", {**params, "python": "/no/such/python"}))
    (tmp_path / "agent.py").write_text("import aiohttp")
    with pytest.raises(UserError, match=r"run = .*agent.py:sums': cannot import .*No module named 'aiohttp'"):
        await made(config("", params))


async def test_a_killed_agent_is_rerun_with_the_same_responses(tmp_path: Path) -> None:
    replies, model = ["<answer>1</answer><eos>", "<answer>2</answer><eos>"], Model()
    model = Model(replies)
    generate, s = build_generator(config("is_killed_once"), TOKENIZER, model), fresh()
    assert isinstance(generate, AgentGenerator)
    await generate(s, prompt(mark=str(tmp_path / "mark")))
    assert generate.counts["agent_restarts"] == 1
    assert TOKENIZER.decode(s.response_ids) == f"{replies[0]}<user>7<assistant><think>{replies[1]}"
    assert len(model.asked) == 2, "the first turn was told from the sample"


async def test_an_agent_that_diverges_after_a_restart_is_censored(tmp_path: Path) -> None:
    s = fresh()
    with pytest.raises(asyncio.CancelledError):
        await made(config("sums"), s, Model(at_once=len(TOKENIZER.encode(SAID[0])) + 1))
    s.status = Status.PARKED
    with pytest.raises(ToolFailed, match="returned another result after a restart"):
        await made(config("asks_for_ever"), s)
    s.prompt_ids = TOKENIZER.encode("<bos><user>1+1<assistant><think>")
    with pytest.raises(ToolFailed, match="sent other requests after a restart"):
        await made(config("sums"), s)
    s.prompt_ids = prompt().ids
    with pytest.raises(ToolFailed, match="requested fewer turns after a restart"):
        await made(config("once"), s)


async def test_the_process_of_the_agents_may_die() -> None:
    """All agents go with it, and are run again in a new one."""
    made_for = config("sums")
    generate = build_generator(made_for, TOKENIZER, Model())
    assert isinstance(generate, AgentGenerator)
    await generate(fresh(), prompt())
    (host,) = [p for p in psutil.Process().children() if "rlsys.agents.host" in " ".join(p.cmdline())]
    host.kill()
    s = fresh()
    await generate(s, prompt())
    assert TOKENIZER.decode(s.response_ids) == WHOLE


@pytest.mark.parametrize("train", ["all", "first"])
async def test_another_conversation_is_a_sequence_of_its_own(train: str) -> None:
    replies = ["<answer>1</answer><eos>", "<answer>2</answer><eos>"]
    model = Model(replies)
    generate = build_generator(config("rewrites", {"train": train}), TOKENIZER, model)
    assert isinstance(generate, AgentGenerator)
    s = fresh()
    await generate(s, prompt())
    assert TOKENIZER.decode(s.response_ids) == f"{replies[0]}<user>1<assistant><think>{replies[1]}"
    assert model.sides == ["<bos><user>in short?<assistant><think>"]
    (side_sequence,) = s.extra_sequences
    assert (side_sequence.sample_id, side_sequence.sequence, side_sequence.parent, side_sequence.aside) == (
        5,
        1,
        None,
        train == "first",
    )
    assert (TOKENIZER.decode(side_sequence.prompt_ids), TOKENIZER.decode(side_sequence.response_ids)) == (
        model.sides[0],
        "1<eos>",
    )
    aside = int(train == "first")
    counts = {"agent_calls": 3, "agent_side_calls": aside, "agent_sequences": 1, "agent_restarts": 0}
    assert generate.counts == counts
    # The one that spoke last is what a reward reads last.
    transcript = TOKENIZER.decode(s.response_ids)
    assert TOKENIZER.decode(s.judged_ids) == (transcript if train == "first" else f"1<eos>{transcript}")


async def test_a_repeated_request_receives_the_same_answer() -> None:
    model = Model(["<answer>1</answer><eos>", "<answer>2</answer><eos>"])
    s = await made(config("asks_again"), model=model)
    assert (len(model.asked), model.sides, s.status) == (2, [], Status.FINISHED)


class Patient(Model):
    """It says nothing before `open` is set."""

    def __init__(self, said: Sequence[str]) -> None:
        super().__init__(said)
        self.open, self.saved_branches = asyncio.Event(), asyncio.Event()

    async def __call__(
        self, sample: Sample, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        self.saved_branches.set()
        await self.open.wait()
        await super().__call__(sample, max_tokens=max_tokens, stop_texts=stop_texts)


async def test_a_reconnected_client_receives_the_answer_of_its_first_request() -> None:
    model, s = Patient(["<answer>1</answer><eos>"]), fresh()
    generate = build_generator(config("gives_up"), TOKENIZER, model)
    assert isinstance(generate, AgentGenerator)
    running = asyncio.ensure_future(generate(s, prompt()))
    await model.saved_branches.wait()
    while generate.counts["agent_calls"] < 2:
        await asyncio.wait({running}, timeout=0.01)
        assert not running.done()
    model.open.set()
    await running
    assert (model.sides, len(model.asked), s.status) == ([], 1, Status.FINISHED)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_waiting_client_receives_keep_alive_data(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blanks before its JSON, or comments in its stream; then the answer."""
    monkeypatch.setattr(endpoint, "ALIVE_SECONDS", 0.01)
    async with endpoint.Endpoint().listening() as made_endpoint, aiohttp.ClientSession() as client:
        session = made_endpoint.open()
        body = {"messages": [{"role": "user", "content": "1"}], "stream": stream}
        headers = {"Authorization": f"Bearer {session.key}"}
        async with client.post(f"{session.url}/v1/chat/completions", json=body, headers=headers) as answer:
            first = await answer.content.readline()  # while nobody has answered
            question = await session.questions.get()
            question.answer.set_result(Answer("a", "one", "", (), "stop", 1, 1))
            rest = (await answer.content.read()).decode()
    assert first == (b": waiting\n" if stream else b"\n")
    if stream:
        assert '"content": "one"' in rest and rest.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(rest)["choices"][0]["message"]["content"] == "one"


async def test_an_address_is_of_no_use_without_its_key() -> None:
    async with endpoint.Endpoint().listening() as made_endpoint, aiohttp.ClientSession() as client:
        session, other_session = made_endpoint.open(), made_endpoint.open()
        for url, key in [
            (session.url, other_session.key),
            (session.url, ""),
            (session.url + "x", session.key),
        ]:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{url}/v1/chat/completions", json={}, headers=headers) as answer:
                assert answer.status == 401
        headers = {"x-api-key": session.key}
        for body, why in [
            ({}, "messages = None: expected a list"),
            ({"messages": [{"role": "boss"}]}, "messages[0].role = 'boss'"),
            (
                {"messages": [{"role": "user", "content": "1"}], "top_logprobs": 3},
                "top_logprobs = 3: not supported",
            ),
            ({"messages": [{"role": "user", "content": "1"}], "tempature": 3}, "tempature: unknown field"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "a part of type 'image_url'",
            ),
        ]:
            async with client.post(
                f"{session.url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                assert answer.status == 400 and why in (await answer.json())["error"]["message"]
        made_endpoint.close(session)
        async with client.get(f"{session.url}/v1/models", headers=headers) as answer:
            assert answer.status == 401
        assert session.questions.empty() and other_session.questions.empty()


def test_child_processes_of_an_agent_end_with_the_event_loop(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    asyncio.run(made(config("leaves_a_child"), mark=str(mark), model=Model(["1<eos>"])))
    assert not runs(int(mark.read_text()))
    assert not [p for p in psutil.Process().children() if "rlsys.agents.host" in " ".join(p.cmdline())]


def runs(pid: int) -> bool:
    """A process that has ended may wait for somebody to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Service:
    """Runs an agent of the tests' file for each request; the first `losing` connections break."""

    def __init__(self, losing: int = 0) -> None:
        self.losing, self.asked = losing, 0

    async def _run(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.json()
        if self.asked <= self.losing:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        command = [sys.executable, str(AGENTS)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, env={**os.environ, **body["env"]}
        )
        await process.communicate(json.dumps(body["task"]).encode())
        return web.Response(status=200 if process.returncode == 0 else 500, text="no luck")

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.post("/run", self._run)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/run"
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("losing", [0, 1])
async def test_an_agent_may_be_a_service(losing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    service = Service(losing)
    async with service.listening() as url:
        s = await made(config("", {"run": None, "url": url}))
    assert (TOKENIZER.decode(s.response_ids), service.asked) == (WHOLE, losing + 1)


async def test_a_failing_or_unreachable_agent_service_censors_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "UNREACHABLE_SECONDS", 0.0)
    async with Service().listening() as url:
        with pytest.raises(ToolFailed, match="the agent's service returned HTTP 500: no luck"):
            await made(config("", {"run": None, "url": url}), model=Model(["<python>no</python><eos>"]))
    with pytest.raises(
        ToolFailed, match=r"killed 3 times, the last time because the service at .* does not respond: Client"
    ):
        await made(config("", {"run": None, "url": url}))


async def test_invalid_agent_settings_are_rejected() -> None:
    with pytest.raises(UserError, match="has no function 'nobody'"):
        await made(config("nobody"))
    for params, why in [
        ({"run": None}, "expected exactly one of them"),
        ({"command": ["x"]}, "expected exactly one of them"),
        ({"patients": 3}, "patients"),
        ({"run": None, "url": "ftp://x"}, "url"),
        ({"run": None, "command": ["x"], "python": "y"}, "expected `run`, which"),
        (
            {"run": None, "url": "http://x", "env": ["A"]},
            "expected no env, because",
        ),
    ]:
        with pytest.raises(UserError, match=why):
            build_generator(config("sums", params), TOKENIZER, Model())
    with pytest.raises(UserError, match="requires a tokenizer"):
        build_generator(config("sums"), None, Model())


def test_the_agent_of_the_page_passes_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert dry_run(load_config(Path("solver.yaml"))).rewards == ()
    (tmp_path / "solver.py").write_text("def solve(task):\n    task['nothing']\n")
    with pytest.raises(UserError, match=r"'agent': the agent .*solve: KeyError: 'nothing' \(solver.py:2\)"):
        dry_run(load_config(Path("solver.yaml")))


def test_a_prompt_of_its_own_is_in_the_ledger(tmp_path: Path) -> None:
    with rig_buffer(tmp_path) as buffer:
        group = buffer.issue(Prompt(0, "", [5, 6], {}), [1, 2])
        custom_sample, plain_sample = group.samples
        custom_sample.prompt_ids, custom_sample.own_prompt = [7, 8, 9], True
        for sample in group.samples:
            sample.append(Segment([3], [-1.0], [VersionSpan(1, 0, 1)]))
        buffer.save(group.samples)
        buffer.flush()
    with rig_buffer(tmp_path) as buffer:
        (group,) = buffer.active()
        custom_sample, plain_sample = group.samples
    assert (custom_sample.prompt_ids, custom_sample.own_prompt, custom_sample.trained_prompt) == (
        [7, 8, 9],
        True,
        None,
    )
    assert (plain_sample.prompt_ids, plain_sample.own_prompt, plain_sample.trained_prompt) == (
        [5, 6],
        False,
        None,
    )


@contextmanager
def rig_buffer(folder: Path) -> Iterator[RolloutBuffer]:
    made_for = make_config(folder)
    buffer = RolloutBuffer(folder / FILE_NAME, identity(made_for), 2)
    try:
        yield buffer
    finally:
        buffer.close()
