"""A reward behind a URL: what is asked, what is asked again, what censors, and that nobody else is told anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rlsys.config import Config
from rlsys.core.errors import RowError, UserError
from rlsys.core.types import Prompt
from rlsys.data import Tokenizer
from rlsys.rewards import Rewards, find_reward, service
from rlsys.rollout.dry_run import dry_run
from rlsys.worker.assembly import build_scorer
from rlsys.worker.scoring import Verdict
from tests.helpers.responses import sample_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
TOKENIZER = Tokenizer(MODEL)
IDS = [*TOKENIZER.encode("3+4=7</think><answer>7</answer>"), TOKENIZER.eos_id]
ROW = Prompt(4, "<bos><user>3+4=", [5, 6], {"prompt": "3+4=", "answer": "7", "difficulty": 2})
Reply = Callable[[int], Awaitable[web.StreamResponse]]


class ScriptedService:
    """`reply` to the question of this number, from 0."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        return await self._reply(len(self.asked) - 1)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.post("/score", self._answer)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        finally:
            await runner.cleanup()


async def verdict_of(reward: Any, seconds: float = 20.0, ids: list[int] = IDS) -> Verdict:
    config = Config.model_validate(
        {"model": {"path": MODEL}, "data": {"reward": reward}, "rollout": {"reward_timeout": seconds}}
    )
    rewards = Rewards(config)
    try:
        return await build_scorer(config, rewards, TOKENIZER).score(ROW, sample_of(ids))
    finally:
        await rewards.close()


def says(value: Any, status: int = 200, **headers: str) -> web.Response:
    return web.json_response(value, status=status, headers=headers)


async def test_a_service_receives_slime_requests_and_returns_any_reward_function_result() -> None:
    values = [1, {"score": 0.5, "acc": True, "seconds": 3}, {"right": 1, "brief": -0.25}]

    async def reply(number: int) -> web.Response:
        return says(values[number])

    server = ScriptedService(reply)
    async with server.listening() as url:
        plain, scored, named_verdict = [await verdict_of(url) for _ in values]
    assert (plain.reward, plain.right, scored.reward, scored.right) == (1, True, 0.5, True)
    assert scored.metrics["seconds"] == 3
    assert (named_verdict.reward, named_verdict.parts) == (0.75, {"right": 1, "brief": -0.25})
    first = server.asked[0]
    response_text = (
        "3+4=7</think><answer>7</answer>"  # as for other frameworks' functions, without the end's token
    )
    assert (first["prompt"], first["response"], first["label"]) == ("3+4=", response_text, "7")
    assert first["entry"] == ROW.entry
    assert {h["Idempotency-Key"] for h in server.headers} == {first["id"]} == {a["id"] for a in server.asked}


async def test_another_response_has_another_id_and_a_row_may_hold_anything() -> None:
    assert service.question(ROW, "a")["id"] != service.question(ROW, "b")["id"]
    odd = Prompt(0, "", [], {"messages": [{"role": "user", "content": "x"}], "at": Path("/x")})
    assert service.question(odd, "a")["prompt"] == odd.entry["messages"]


LOST = {
    "bytes": ({"a": {"b": [b"x"]}}, "rows.parquet, row 3: a.b[0] is bytes"),
    "a number and its text": ({"a": {1: "x", "1": "y"}}, "rows.parquet, row 3: a.1 is the name of two keys"),
    "nothing and its text": ({None: 1, "null": 2}, "rows.parquet, row 3: null is the name of two keys"),
    "a pair and its text": (
        {"a": [{(1, 2): 1, "[1, 2]": 2}]},
        "rows.parquet, row 3: a[0].[1, 2] is the name of",
    ),
}


@pytest.mark.parametrize("case", LOST.values(), ids=LOST)
def test_a_row_that_json_cannot_hold_is_refused_by_name(case: tuple[dict[Any, Any], str]) -> None:
    entry, message = case
    row = Prompt(3, "", [], {"prompt": "3+4=", **entry}, location="rows.parquet, row 3")
    (error,) = outcomes(lambda: service.question(row, "a"))
    assert isinstance(error, RowError) and str(error).startswith(message) and "\n" not in str(error), error


def test_a_row_of_numpy_is_sent_as_it_is() -> None:
    entry: dict[Any, Any] = {"n": np.int64(3), "x": np.arange(2000), 5: {"b": 1, 2: "c"}}
    row = Prompt(3, "", [], entry)
    expected = {"n": 3, "x": list(range(2000)), "5": {"b": 1, "2": "c"}}
    (sent_entry,) = outcomes(lambda: service.question(row, "a")["entry"])
    assert sent_entry == expected


def outcomes(call: Callable[[], Any]) -> list[Any]:
    try:
        return [call()]
    except (TypeError, UserError) as e:
        return [e]


@pytest.mark.parametrize("status", sorted(service.RETRY_STATUSES))
async def test_a_retryable_status_is_retried_with_the_same_id(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MIN_PAUSE", 0.0)

    async def reply(number: int) -> web.Response:
        return says("busy", status) if number < 3 else says(1)

    server = ScriptedService(reply)
    async with server.listening() as url:
        assert (await verdict_of(url)).reward == 1
    assert len(server.asked) == 4 and len({a["id"] for a in server.asked}) == 1


async def test_a_broken_connection_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MIN_PAUSE", 0.0)

    async def reply(number: int) -> web.StreamResponse:
        if number:
            return says(1)
        raise ConnectionResetError

    server = ScriptedService(reply)
    async with server.listening() as url:
        assert (await verdict_of(url)).reward == 1
    assert len(server.asked) == 2


async def test_a_service_that_is_never_available_censors_with_the_reason() -> None:
    async def reply(number: int) -> web.Response:
        return says("no worker", 503, **{"Retry-After": "99"})

    server = ScriptedService(reply)
    async with server.listening() as url:
        verdict = await verdict_of(url)
    assert verdict.reward is None and verdict.reason is not None
    assert 'HTTP 503 "no worker"; 1 attempts in 18 s' in verdict.reason


@pytest.mark.virtual_clock
async def test_tries_end_with_the_time_of_a_reward() -> None:
    verdict = await verdict_of("http://127.0.0.1:9/score", 30)
    assert verdict.reason is not None
    assert "ClientConnectorError" in verdict.reason and "attempts in 27 s" in verdict.reason


async def test_a_service_that_hangs_censors_within_the_time() -> None:
    async def reply(number: int) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with ScriptedService(reply).listening() as url:
        verdict = await verdict_of(url, 0.2)
    assert verdict.reward is None and "TimeoutError; 1 attempts" in str(verdict.reason)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda: says({"detail": "no such task"}, 422), 'HTTP 422 {"detail": "no such task"}'),
        (lambda: web.Response(text="<html>"), "response '<html>': expected JSON"),
        (
            lambda: web.Response(body=b"1" * (service.MAX_ANSWER_BYTES + 1)),
            "the response has more than 1048576 bytes",
        ),
        (lambda: says("1"), "returned '1'; expected a finite number"),
        (lambda: says({}), "returned {}; expected a number"),
        (lambda: web.Response(text="NaN"), "response 'NaN': expected JSON"),
    ],
)
async def test_an_invalid_reward_is_reported_without_a_retry(
    answer: Callable[[], web.Response], told: str
) -> None:
    async def reply(number: int) -> web.Response:
        return answer()

    server = ScriptedService(reply)
    async with server.listening() as url:
        verdict = await verdict_of(url)
    assert verdict.reward is None and told in str(verdict.reason)
    assert len(server.asked) == 1, "a poisonous question is not asked again"


async def test_a_redirect_is_refused_and_the_token_is_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSYS_REWARD_TOKEN", "abc")

    async def one(number: int) -> web.Response:
        return says(1)

    stranger = ScriptedService(one)
    async with stranger.listening() as stranger_url:

        async def away(number: int) -> web.Response:
            return web.Response(status=307, headers={"Location": stranger_url})

        server = ScriptedService(away)
        async with server.listening() as url:
            monkeypatch.setenv("http_proxy", stranger_url)
            verdict = await verdict_of(url)
    assert f"redirects to {stranger_url}; expected the final URL in data.reward" in str(verdict.reason)
    assert stranger.asked == [] and server.headers[0]["Authorization"] == "Bearer abc"


async def test_a_service_joins_other_rewards_under_the_name_of_its_host() -> None:
    async def one(number: int) -> web.Response:
        return says(1)

    async with ScriptedService(one).listening() as url:
        verdict = await verdict_of(["exact_answer", {"name": url, "weight": 0.5}])
    assert verdict.parts == {"exact_answer": 1, "127.0.0.1": 0.5}


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://me:secret@host/x", "the URL has a user name or a password; expected a URL without"),
        ("http://:80", "expected a URL"),
        ("http://host:abc", "not a URL"),
        ("http://a b/", "expected a URL"),
    ],
)
def test_an_invalid_service_url_is_refused_before_the_start(url: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        find_reward(url)


def test_a_dry_run_sends_no_request_to_a_service() -> None:
    config = {"model": {"path": MODEL}, "data": {"reward": ["exact_answer", "http://nobody.invalid/score"]}}
    assert dry_run(Config.model_validate(config)).rewards is None
