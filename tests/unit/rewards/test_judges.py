"""Judges of a group's correct responses: who is asked, and that one who hangs or fails holds no group up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlsys.config import Config, identity
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.planning.planning import Planning
from rlsys.rewards.judges import JudgeWithTimeout, UrlJudge, build_judge
from rlsys.rollout.preflight import check_names
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.assembly import ask_engines
from tests.helpers.planning_cases import Lengths, config_of, group_of
from tests.helpers.rollout_rig import Numbers, rig
from tests.helpers.scripted_engine import EOS, Network, ScriptedEngine, token

SOUND = r"\boxed{-1}"


async def nobody(question: str) -> str:
    raise AssertionError("the engines are not asked")


def judged(plan: Planning) -> dict[str, float]:
    return {name: n for name, n in plan.counts.items() if name.startswith("judge")}


def judged_by(tmp_path: Path, judge: JudgeWithTimeout, **fapo: Any) -> Planning:
    tokenizer: Any = Lengths()
    config = config_of(tmp_path, group_reward={"name": "fapo", **fapo})
    return Planning(config, Numbers(), tokenizer, judge)


# A server of another model


class ScriptedServer:
    """Answers as an OpenAI-compatible server: `reply` to the question of a chat. `models` is what it says it has."""

    def __init__(self, reply: Callable[[str], Awaitable[web.Response]]) -> None:
        self._reply = reply
        self.models: Any = {"data": [{"id": "judge-7b"}]}
        self.asked: list[dict[str, Any]] = []
        self.model_questions = 0
        self.tokens: list[str | None] = []

    async def _models(self, _: web.Request) -> web.Response:
        self.model_questions += 1
        return web.json_response(self.models)

    async def _chat(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        self.asked.append(await request.json())
        return await self._reply(self.asked[-1]["messages"][0]["content"])

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def says(text: str | None) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_url_judge_scores_only_correct_responses(tmp_path: Path, suffix: str) -> None:
    async def reply(question: str) -> web.Response:
        return says(f"The first step is wrong: {SOUND.replace('-1', '0')}" if "\nxx\n" in question else SOUND)

    server = ScriptedServer(reply)
    async with server.listening() as url:
        data = {"judge": url + suffix, "judge_timeout": 20}
        config = Config.model_validate({"model": {"path": tmp_path}, "data": data})
        check_names(config)
        judge = build_judge(config, nobody)
        assert judge is not None
        plan, group = judged_by(tmp_path, judge), group_of(["a", "b", "c"], [1, 1, 0])
        assert await plan.reward(Numbers().train(0), group) is None
        assert [s.reward for s in group.samples] == [1, 0, -1]
        assert [a["model"] for a in server.asked] == ["judge-7b"] * 2
        assert {a["temperature"] for a in server.asked} == {0}
        assert all("Problem:\n0\n" in a["messages"][0]["content"] for a in server.asked)
        assert judged(plan) == {"judge_hung": 0, "judge_failed": 0}
        question_count = server.model_questions
        await judge("once more")
        assert server.model_questions == question_count


async def test_the_judge_token_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(question: str) -> web.Response:
        return says(SOUND)

    server = ScriptedServer(reply)
    async with server.listening() as url:
        await UrlJudge(url)("?")
        monkeypatch.setenv("RLSYS_JUDGE_TOKEN", "abc")
        await UrlJudge(url)("?")
        assert server.tokens == [None, "Bearer abc"]


async def broken(question: str) -> web.Response:
    return web.Response(status=503, text="no\n  worker")


async def no_json(question: str) -> web.Response:
    return web.Response(text="<html>")


async def no_choice(question: str) -> web.Response:
    return web.json_response({"choices": []})


async def no_text(question: str) -> web.Response:
    return says(None)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (broken, "HTTP 503: no worker"),
        (no_json, "response '<html>': expected JSON"),
        (no_choice, ": expected text at choices.0.message.content"),
        (no_text, "expected text at choices.0.message.content"),
    ],
)
async def test_a_server_that_fails_gives_no_verdict_and_is_counted(
    tmp_path: Path, reply: Callable[[str], Awaitable[web.Response]], told: str
) -> None:
    server = ScriptedServer(reply)
    async with server.listening() as url:
        plan = judged_by(tmp_path, JudgeWithTimeout(UrlJudge(url), 20))
        reason = await plan.reward(Numbers().train(0), group_of(["a", "b", "c"], [1, 1, 0]))
        assert reason is not None
        assert reason.startswith(
            "algo.group_reward fapo could not judge 2 samples of the group; the judge failed: JudgeErr"
        )
        assert told in reason
        assert judged(plan) == {"judge_hung": 0, "judge_failed": 2}


async def test_a_server_without_model_and_an_unreachable_one_give_no_verdict() -> None:
    server = ScriptedServer(broken)
    server.models = {"data": []}
    async with server.listening() as url:
        judge = JudgeWithTimeout(UrlJudge(url), 20)
        assert await judge("?") is None
        assert "expected text at data.0.id" in judge.last
    assert await judge("?") is None
    assert "Client" in judge.last
    assert judge.failures == 2


async def test_a_hanging_judge_times_out_and_is_queried_for_later_groups(tmp_path: Path) -> None:
    disconnect = asyncio.Event()

    async def reply(question: str) -> web.Response:
        if "\nxx\n" not in question:
            return says(SOUND)
        try:
            await asyncio.Event().wait()
        finally:
            disconnect.set()
        raise AssertionError

    async with ScriptedServer(reply).listening() as url:
        judge = JudgeWithTimeout(UrlJudge(url), 0.3)
        censored = await judged_by(tmp_path, judge).reward(Numbers().train(0), group_of(["a", "b"], [1, 1]))
        assert censored == (
            "algo.group_reward fapo could not judge 1 samples of the group; "
            "the judge took longer than data.judge_timeout = 0.3 s"
        )
        await disconnect.wait()  # its connection was closed
        group = group_of(["a", "b", "c"], [1, 1, 0])
        plan = judged_by(tmp_path, judge, no_verdict="sound")
        assert await plan.reward(Numbers().train(0), group) is None
        assert [s.reward for s in group.samples] == [1, 1, -1]
        assert judged(plan) == {"judge_hung": 2, "judge_failed": 0}


# Time


@pytest.mark.virtual_clock
async def test_the_judge_timeout_excludes_time_when_the_judge_is_paused() -> None:
    """A minute of work, one of rest, then the other half of its limit."""
    loop, rests = asyncio.get_running_loop(), [False]
    judge = JudgeWithTimeout(lambda text: asyncio.Event().wait(), 120, lambda: not rests[0])  # type: ignore[arg-type, return-value]
    judge_task = asyncio.create_task(judge("?"))
    await asyncio.sleep(60)
    rests[0] = True
    await asyncio.sleep(3600)
    assert not judge_task.done()
    rests[0] = False
    assert await judge_task is None
    assert loop.time() == pytest.approx(60 + 3600 + 60, abs=1)
    assert judge.timeouts == 1


async def test_a_hung_judge_costs_its_group_and_not_the_run(tmp_path: Path) -> None:
    """In group 0 it never answers; the others are judged meanwhile, and a step is taken without group 0."""

    async def never_of_prompt_zero(text: str) -> str:
        if text.startswith("Problem:\n0\n"):
            await asyncio.Event().wait()
        return SOUND

    async def odd(prompt: Prompt, text: str) -> float:
        return 1.0

    async with rig(config_of(tmp_path, group_reward="fapo"), reward=odd) as r:
        judge = JudgeWithTimeout(never_of_prompt_zero, 0.2)
        r.manager._runner._planning._judge = judge
        r.manager._runner._planning._tokenizer = Lengths()  # type: ignore[assignment]
        await r.start()
        taking = asyncio.create_task(r.manager.take(1))
        while not taking.done():
            await asyncio.sleep(0.001)
            r.router.tick()
        batch = taking.result()
        assert batch is not None
        assert [g.group_id for g in batch.groups] == [1, 2]
        assert batch.metrics["judge_hung"] == 2
        assert batch.metrics["censored"] == 1


# The run's own engines


@pytest.mark.virtual_clock
async def test_the_policy_judges_itself_through_the_runs_router_over_an_interrupt(tmp_path: Path) -> None:
    """Its verdict goes on after the interrupt, is outside the ledger, and its time stands still in between."""

    class Ids:
        """One id a character; what the engine says, in its ids."""

        def encode(self, text: str) -> list[int]:
            return [5] * len(text)

        def decode(self, ids: Sequence[int]) -> str:
            return json.dumps([int(i) for i in ids])

        def apply_chat(self, messages: list[dict[str, str]]) -> str:
            return "user: " + messages[0]["content"]

    engine = ScriptedEngine("http://a:1", ends_at=lambda seed: 150, chunk=1)
    network: Any = Network(engine)
    router = Router(
        [EngineClient(engine.url, network)], vocab_size=128, context_length=200, stop_ids={EOS},
        bounds=Bounds(1e-6, 1e-4), routes=False,
    )  # fmt: skip
    tokenizer: Any = Ids()

    async def push(version: int, canaries: list[Canary]) -> None:
        await router.begin_push(version)
        engine.load(version)
        await router.end_push(version, canaries)
        router.resume()

    config = Config.model_validate(
        {"model": {"path": tmp_path}, "data": {"judge": "engines", "judge_timeout": 20}}
    )
    judge = build_judge(
        config, lambda question: ask_engines(router, tokenizer, 30, question), lambda: router.open
    )
    assert judge is not None
    await push(1, [])
    judge_task = asyncio.create_task(judge("1+1=2?"))
    while router.stats()["evaluation_tokens"] < 10:
        await asyncio.sleep(0.005)
    await router.interrupt()
    assert not router.open
    await asyncio.sleep(1000)
    assert not judge_task.done()
    await push(2, [])
    ids = json.loads(str(await judge_task))
    start = len("user: 1+1=2?")
    split = engine.prompts[1][start:]
    assert 10 <= len(split) < 30
    assert ids == [token(0, start + i, 1 if i < len(split) else 2) for i in range(30)]
    assert router.stats()["evaluation_tokens"] == 30
    assert (judge.timeouts, judge.failures) == (0, 0)
    assert await judge("long " * 100) is None
    assert "RefusedPrompt" in judge.last


# Names


def test_an_unknown_judge_is_reported_before_the_start(tmp_path: Path) -> None:
    for name, message in (("engine", "did you mean engines?"), ("no.such:judge", "cannot import no.such")):
        config = Config.model_validate({"model": {"path": tmp_path}, "data": {"judge": name}})
        with pytest.raises(UserError, match=f"data.judge = '{name}': .*{message}".replace("?", r"\?")):
            check_names(config)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://", "expected a URL http://HOST:PORT"),
        ("HTTP://a:1", "expected a URL"),
        ("ftp://a", "expected a URL"),
        ("localhost:8000", "expected a URL"),
        ("http://a b/v1", "expected a URL"),
        ("https://a:99999", "not a URL: Port out of range"),
        ("http://[::1/v1", "not a URL: Invalid IPv6"),
    ],
)
def test_an_invalid_judge_url_is_refused(tmp_path: Path, url: str, told: str) -> None:
    config = Config.model_validate({"model": {"path": tmp_path}, "data": {"judge": url}})
    with pytest.raises(UserError, match=re.escape(f"data.judge = '{url}': {told}")):
        check_names(config)


def test_a_secret_in_a_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    for section, field in (("data", "judge"), ("engine", "reference")):
        config = Config.model_validate({"model": {"path": tmp_path}, section: {field: "http://me:hush@a:1"}})
        with pytest.raises(
            UserError, match=f"{section}.{field}: the URL has a user name or a password"
        ) as caught:
            check_names(config)
        assert "hush" not in str(caught.value)


def test_a_judge_may_move_between_two_starts_of_a_run(tmp_path: Path) -> None:
    def of(judge: str | None) -> str:
        return identity(Config.model_validate({"model": {"path": tmp_path}, "data": {"judge": judge}}))

    assert of("http://a:1") == of("http://b:2/v1")
    assert len({of("http://a:1"), of("engines"), of(None)}) == 3
