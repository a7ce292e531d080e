"""The HTTP front of a stand-alone router, before small servers in this process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rlsys.cli import main
from rlsys.engine.client import make_session
from rlsys.errors import UserError
from rlsys.router.checks import samples_of
from rlsys.router.fleet import Fleet, FleetInterruption
from rlsys.router.front import FORWARDED, Front, FrontLimits
from rlsys.router.places import Places
from rlsys.router.serve import RouterOptions, is_loopback, read_token
from rlsys.router.skip import Broken, skipper
from rlsys.router.stitch import can_go_on, join
from tests.helpers.http_engine import HttpEngine, letters, token_at

PROMPT = [1, 2, 3, 4]


class Rig:
    def __init__(self, engines: list[HttpEngine], urls: list[str], fleet: Fleet, client: TestClient) -> None:
        self.engines, self.urls, self.fleet, self.client = engines, urls, fleet, client

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, **kwargs) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    engines: int = 1,
    *,
    token: str | None = None,
    limits: FrontLimits | None = None,
    interruption: FleetInterruption = "abort",
    queue_seconds: float = 10.0,
) -> AsyncIterator[Rig]:
    fakes = [HttpEngine() for _ in range(engines)]
    urls = [await e.start() for e in fakes]
    async with make_session() as session:
        fleet = Fleet(
            urls,
            session,
            strategy="prefix_affinity",
            interruption=interruption,
            queue_seconds=queue_seconds,
            vocab_size=100,
        )
        app = Front(fleet, token, limits or FrontLimits()).app()
        watch = asyncio.create_task(fleet.watch())
        async with TestClient(TestServer(app)) as client:
            rig = Rig(fakes, urls, fleet, client)
            await rig.until(lambda: fleet.limits is not None or not engines)
            yield rig
        watch.cancel()
    for engine in fakes:
        engine.free.set()
        await engine.stop()


def made(n: int, prompt: int = len(PROMPT)) -> list[int]:
    return [token_at(prompt + i - 1) for i in range(n)]


def generate(n: int = 8, **more: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": n, "sampling_seed": 3}, **more}


def parse(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(e[6:]) for e in text.split("\n\n")[:-2]]


# Bytes through


async def test_no_field_is_dropped() -> None:
    async with serving() as rig:
        body = generate(return_routed_experts=True, return_logprob=True, extra_key="k", anything={"new": [1]})
        status, answer = await rig.post("/generate", body)
        assert (status, answer["output_ids"]) == (200, made(8))
        assert json.loads(rig.engines[0].raw[0]) == body


async def test_a_stream_comes_through_event_by_event() -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 3
        async with rig.client.post("/generate", json=generate(stream=True)) as answer:
            first = await answer.content.readuntil(b"\n\n")
            assert json.loads(first[6:])["output_ids"] == made(1), "before the answer is complete"
            rig.engines[0].free.set()
            rest = (first + await answer.read()).decode()
        assert [c["output_ids"][0] for c in parse(rest)] == made(8)


async def test_a_chat_without_a_seed_gets_one_so_that_it_could_be_repeated() -> None:
    async with serving() as rig:
        await rig.post("/v1/chat/completions", {"messages": [], "tools": [{"x": 1}], "n": 1})
        await rig.post("/v1/chat/completions", {"messages": [], "n": 2})
        await rig.post("/v1/chat/completions", {"messages": [], "seed": 5})
        first, second, third = (body for _, body in rig.engines[0].requests)
        assert isinstance(first["seed"], int) and first["tools"] == [{"x": 1}]
        assert "seed" not in second, "several responses from one seed would be the same"
        assert third["seed"] == 5


# Interruptions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [False, True])
async def test_an_interrupted_generate_goes_on_from_its_tokens(stream: bool, text: bool) -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        body = generate(12, stream=stream)
        if text:
            body["text"] = "four"
            del body["input_ids"]
        task = asyncio.create_task(rig.post("/generate", body))
        await rig.until(lambda: any(e.requests for e in rig.engines))
        await asyncio.sleep(0.05)
        for engine in rig.engines:
            engine.hold_at = None
        status, new = await rig.post("/update_weights_from_disk", {"model_path": "next"})
        assert (status, new["weight_version"]) == (200, 1)
        status, answer = await task
        assert status == 200
        if stream:
            chunks = parse(answer)
            assert [i for c in chunks for i in c["output_ids"]] == made(12)
            assert "".join(c["text"] for c in chunks) == letters(made(12))
            answer = chunks[-1]
            assert {c["meta_info"]["id"] for c in chunks} == {"id1"}
            assert not any(c["meta_info"]["finish_reason"] for c in chunks[:-1])
        else:
            assert answer["output_ids"] == made(12)
            assert [e[1] for e in answer["meta_info"]["output_token_logprobs"]] == made(12)
        meta = answer["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 12)
        assert meta["finish_reason"] == {"type": "length"}
        sent = [body for e in rig.engines for _, body in e.requests]
        assert [b["sampling_params"]["max_new_tokens"] for b in sent] == [12, 6]
        assert sent[1]["input_ids"] == (list(range(4)) if text else PROMPT) + made(6)
        assert all(e.loads == ["next"] for e in rig.engines)
        assert rig.fleet.proxy.counts["continued"] == 1


async def test_the_last_token_before_an_abort_may_be_the_end() -> None:
    async with serving() as rig:
        rig.fleet.proxy.stop_ids = {made(6)[-1]}
        rig.engines[0].hold_at = 5
        tasks = [
            asyncio.create_task(rig.post("/generate", generate(n, stream=s)))
            for n, s in ((20, False), (20, True), (6, False))
        ]
        await rig.until(lambda: len(rig.engines[0].requests) == 3)
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        whole, stream, _ = [(await t)[1] for t in tasks]
        assert (whole["output_ids"], whole["meta_info"]["finish_reason"]["type"]) == (made(6), "stop")
        chunks = parse(stream)
        assert [i for c in chunks for i in c["output_ids"]] == made(6)
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(rig.engines[0].requests) == 3, "nothing is written past the end"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_other_requests_are_made_again_and_the_client_sees_one_answer(path: str, stream: bool) -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 5
        task = asyncio.create_task(rig.post(path, {"max_tokens": 9, "stream": stream, "messages": []}))
        await rig.until(lambda: bool(rig.engines[0].requests))
        await asyncio.sleep(0.05)
        rig.engines[0].hold_at = None
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        _, answer = await task
        first, second = (body for _, body in rig.engines[0].requests)
        assert first == second and first["seed"] is not None
        parts = parse(answer) if stream else [answer]
        choices = [c["choices"][0] for c in parts]
        assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices) == letters(
            made(9)
        )
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


async def test_a_stream_that_cannot_go_on_gives_no_token_twice_after_a_death() -> None:
    """What comes next depends on more than the tokens, so it is made again; the client has a part of it."""

    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        body = generate(12, stream=True)
        body["sampling_params"]["frequency_penalty"] = 0.5
        task = asyncio.create_task(rig.post("/generate", body))
        await rig.until(lambda: any(e.load == 1 for e in rig.fleet.pool.engines))
        await asyncio.sleep(0.05)
        for engine in rig.engines:
            engine.hold_at = None
        next(e for e in rig.fleet.pool.engines if e.load).died()
        chunks = parse((await task)[1])
        assert [i for c in chunks for i in c["output_ids"]] == made(12)
        assert "".join(c["text"] for c in chunks) == letters(made(12))
        assert [e[1] for c in chunks for e in c["meta_info"]["output_token_logprobs"]] == made(12)
        assert {c["meta_info"]["id"] for c in chunks} == {"id1"}
        assert [b["input_ids"] for e in rig.engines for _, b in e.requests] == [PROMPT, PROMPT]
        assert rig.fleet.proxy.counts == {"continued": 0, "repeated": 1, "broken": 0}


@pytest.mark.parametrize("incremental", [True, False])
def test_of_a_repeated_stream_only_what_is_new_is_left(incremental: bool) -> None:
    """Two responses in one request; chunks are cut elsewhere the second time."""

    def event(index: int, first: int, end: int, finish: str | None = None) -> bytes:
        ids = made(end)[first if incremental else 0 :]
        meta = {"id": f"r{index}", "finish_reason": finish, "output_token_logprobs": [[0, i] for i in ids]}
        chunk = {"index": index, "output_ids": ids, "text": letters(ids), "meta_info": meta}
        return b"data: " + json.dumps(chunk).encode()

    again = skipper("/generate", [event(0, 0, 2), event(1, 0, 1), event(0, 2, 5)], incremental=incremental)
    assert again.skip(event(0, 0, 4)) == b""
    assert again.skip(event(1, 0, 1)) == b""
    assert json.loads(again.skip(event(0, 4, 7))[6:]) == json.loads(event(0, 5, 7)[6:])
    assert again.skip(event(2, 0, 3)) == event(2, 0, 3), "the client had nothing of it"
    assert json.loads(again.skip(event(1, 1, 3, "stop"))[6:]) == json.loads(event(1, 1, 3, "stop")[6:])
    assert again.skip(b"data: [DONE]") == b"data: [DONE]"
    different = event(0, 0, 3).replace(b'"output_ids": [4', b'"output_ids": [9')
    for other in (different, event(0, 0, 3, "stop")):  # other tokens; an end before what the client has
        with pytest.raises(Broken, match="made again it is not the same"):
            skipper("/generate", [event(0, 0, 5)], incremental=incremental).skip(other)


@pytest.mark.parametrize(
    ("sampling", "goes_on"),
    [
        ({}, True),
        ({"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0, "stop": []}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"stop": "x"}, False),
        ({"n": 2}, False),
    ],
)
def test_only_what_follows_from_its_tokens_goes_on_from_them(sampling: dict[str, Any], goes_on: bool) -> None:
    assert can_go_on({"input_ids": PROMPT, "sampling_params": sampling}) is goes_on


@pytest.mark.parametrize(
    ("first", "second", "whole"), [(b"ab", b"cd", b"abcd"), (None, b"cd", None), (b"ab", None, None)]
)
def test_routes_of_a_part_are_not_passed_as_the_wholes(
    first: bytes | None, second: bytes | None, whole: bytes | None
) -> None:
    def answer(routes: bytes | None) -> dict[str, Any]:
        meta: dict[str, Any] = {"completion_tokens": 1, "prompt_tokens": 1}
        if routes is not None:
            meta["routed_experts"] = base64.b64encode(routes).decode()
        return {"text": "a", "output_ids": [1], "meta_info": meta}

    def routes(answer: dict[str, Any]) -> bytes | None:
        found = answer["meta_info"].get("routed_experts")
        return None if found is None else base64.b64decode(found)

    joined = join(answer(first), answer(second), incremental=False)
    assert routes(joined) == whole
    again = join(joined, answer(b"ef"), incremental=False)  # interrupted once more
    assert routes(again) == (None if whole is None else whole + b"ef")


async def test_a_stream_that_cannot_be_the_same_ends_with_an_error() -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 5
        body = {"max_tokens": 9, "stream": True, "prompt": "a"}
        task = asyncio.create_task(rig.post("/v1/completions", body))
        await rig.until(lambda: bool(rig.engines[0].requests))
        await asyncio.sleep(0.05)
        said = rig.engines[0]._answer

        def other(path: str, prompt: list[int], made: list[int], *args: Any, **more: Any) -> dict[str, Any]:
            return said(path, prompt, [i + 1 for i in made], *args, **more)

        rig.engines[0]._answer = other  # type: ignore[method-assign]
        rig.engines[0].hold_at = None
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        _, text = await task
        error = json.loads(text.rstrip().rsplit("\n\n", 1)[1][6:])["error"]
        assert error["code"] == 503 and "new weights say something else" in error["message"]


async def test_a_dead_engine_costs_no_request() -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        tasks = [
            asyncio.create_task(rig.post("/generate", generate(12, stream=True, session_id=str(i))))
            for i in range(4)
        ]
        await rig.until(lambda: all(len(e.requests) == 2 for e in rig.engines))
        await asyncio.sleep(0.05)
        rig.engines[1].hold_at = None
        rig.engines[1].free.set()
        state = rig.fleet.pool.find(rig.urls[0])
        assert state is not None
        state.died()
        for task in tasks:
            _, text = await task
            assert [i for c in parse(text) for i in c["output_ids"]] == made(12)
        assert len(rig.engines[1].requests) == 4
        rig.engines[0].free.set()


async def test_a_server_fault_is_tried_elsewhere_and_told_when_there_is_no_elsewhere() -> None:
    async with serving(2) as rig:
        rig.engines[0].fail_with = 500
        for i in range(4):
            status, answer = await rig.post("/generate", generate(session_id=str(i)))
            assert (status, answer["output_ids"]) == (200, made(8))
        assert rig.fleet.pool.engines[0].breaker.failures
        assert not rig.fleet.pool.engines[1].breaker.failures


async def test_a_request_that_no_engine_can_answer_is_told_and_costs_no_engine_its_place() -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.fail_with = 500
        status, answer = await rig.post("/generate", generate())
        assert (status, answer) == (500, {"error": {"message": "broken"}})
        assert not any(e.breaker.failures for e in rig.fleet.pool.engines)


# Limits


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"input_ids": [1, 100]}', "token id 100 is outside the vocabulary of 100"),
        (b'{"input_ids": [[1], [-1]]}', "token id -1 is outside the vocabulary of 100"),
        (b'{"prompt": [7, 10000000000]}', "token id 10000000000 is outside the vocabulary of 100"),
        (b'{"input_ids": [1.5]}', "input_ids: expected whole numbers"),
        (b'{"input_ids": [1, true]}', "input_ids: expected whole numbers"),
        (b'{"input_ids": []}', "the prompt is empty"),
        (json.dumps({"input_ids": [5] * 200}).encode(), "the prompt has 200 tokens; there is room for 193"),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "not a JSON object"),
        (b'{"text": "a", "sampling_params": {"temperature": 1e999}}', "not a JSON object"),
        (b'{"text": "a", "sampling_params": {"temperature": "hot"}}', "temperature = 'hot': expected a finite"),
        (b'{"text": "a", "sampling_params": {"temperature": -1}}', "temperature = -1: expected a value"),
        (b'{"text": "a", "sampling_params": [{"top_p": 0}]}', "top_p = 0: expected a value in (0, 1]"),
        (b'{"text": "a", "sampling_params": {"stop_token_ids": [400]}}', "token id 400 is outside"),
        (b'{"text": "a", "sampling_params": 3}', "sampling_params = '3': expected an object"),
        (b'{"messages": [], "logit_bias": {"400": 1}}', "token id 400 is outside"),
        (b'{"messages": [], "n": 1000000}', "n = 1000000: expected a value in [1, 128]"),
        (b'{"messages": [], "seed": 1.5}', "seed = 1.5: expected a whole number"),
        (b'{"text": "a", "sampling_params": {"temperature": ' + b"9" * 400 + b"}}", "expected a finite number"),
        (b'{"input_ids": [[1], 2]}', "input_ids: expected lists of whole numbers"),
        (b'{"input_ids": [[1], null]}', "input_ids: expected lists of whole numbers"),
        (b'{"text": ""}', "the prompt is empty"),
        (b'{"text": ["a", ""]}', "the prompt is empty"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"text": "a", "sampling_params": {"stop_regex": "("}}', "stop_regex = '(': no regular expression"),
        (b'{"input_ids": {"a": 1}}', "input_ids = {'a': 1}: expected whole numbers"),
        (b'{"input_ids": "abc"}', "input_ids = 'abc': expected whole numbers"),
        (b'{"text": "a", "sampling_params": {"stop": 5}}', "stop = 5: expected text, or a list of texts"),
        (b'{"prompt": "a", "stop": ["a", null]}', "stop = ['a', None]: expected text, or a list of texts"),
        (b'{"text": "a", "sampling_params": {"stop_regex": [1]}}', "stop_regex = [1]: expected text"),
        (b'{"messages": [], "stop_token_ids": 5}', "stop_token_ids = 5: expected whole numbers"),
        (b'{"messages": [], "stop_token_ids": ["a"]}', "stop_token_ids = ['a']: expected whole numbers"),
        (b'{"text": ["a"], "token_ids_logprob": [[400]]}', "token id 400 is outside"),
        (b'{"messages": [], "logit_bias": 5}', "logit_bias = 5: expected an object"),
        (b'{"messages": [], "logit_bias": {"--5": 1}}', "logit_bias: '--5': expected a token id"),
        (b'{"messages": [], "logit_bias": {"' + b"9" * 5000 + b'": 1}}', "expected a token id"),
        (b'{"messages": [], "logit_bias": {"5": "x"}}', "logit_bias of token 5 = 'x': expected a finite"),
        (b'{"text": "a", "top_logprobs_num": 101}', "top_logprobs_num = 101: expected 0 to 100"),
        (b'{"text": ["a"], "top_logprobs_num": [101]}', "top_logprobs_num = 101: expected 0 to 100"),
        (b'{"messages": [], "logprobs": true, "top_logprobs": -1}', "top_logprobs = -1: expected 0 to 100"),
        (b"[1]", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[" * 100000, "not a JSON object"),
    ],
)  # fmt: skip
async def test_nonsense_never_reaches_an_engine(body: bytes, why: str) -> None:
    async with serving() as rig:
        for path in FORWARDED:
            async with rig.client.post(path, data=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, 400)
                assert why in error["message"]
        assert not rig.engines[0].requests


async def test_a_body_that_cannot_be_read_and_a_token_of_bad_bytes_are_refused() -> None:
    async with serving(token="0123456789abcdef") as rig:
        bearer = {"Authorization": "Bearer 0123456789abcdef"}
        async with rig.client.post(
            "/generate", data=b"{}", headers={**bearer, "Content-Encoding": "gzip"}
        ) as answer:
            assert answer.status == 400
            assert "the body cannot be read" in (await answer.json())["error"]["message"]
        address = rig.client.server
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /engines HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("version", [True, -1, 1.0, 2**63, "9" * 5000, "-1", "\u00b2", [1]])
async def test_a_weight_version_is_a_number_that_engines_can_hold(version: Any) -> None:
    async with serving() as rig:
        body = {"model_path": "next", "weight_version": version}
        status, answer = await rig.post("/update_weights_from_disk", body)
        assert status == 400
        assert "expected a whole number below 2**63" in answer["error"]["message"]
        assert not rig.engines[0].loads


@pytest.mark.parametrize(
    "url",
    ["localhost:30000", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://[bad", "ftp://a:1",
     f"http://{'a' * 70}.org:1", "http://a..b:1", "http://a:1?x=1", "http://a b:80", "http://\0:1", ""],
)  # fmt: skip
async def test_what_is_no_url_does_not_become_an_engine(url: str) -> None:
    """One in the pool would end the watch over all of them."""

    async with serving() as rig:
        status, _ = await rig.post("/engines", {"url": url})
        assert status == 400
        assert [e.url for e in rig.fleet.pool.engines] == rig.urls


async def test_an_engine_given_twice_is_a_mistake() -> None:
    async with make_session() as session:
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1 is in the pool already"):
            Fleet(
                ["http://127.0.0.1:1", "http://127.0.0.1:1/"], session,
                strategy="least_tokens", interruption="abort", queue_seconds=1,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--max-body-mb inf", "--max-body-mb inf: expected more than 0, and finite"),
        ("--queue -1", "--queue -1: expected 0 or more"),
        ("--vocab-size 0", "--vocab-size 0: expected 1 or more"),
        ("--engine localhost:1", "engine URL 'localhost:1': expected http://HOST:PORT"),
        (f"--host {'a' * 70}.x --token-file TOKEN", "no host name or address"),
    ],
)
def test_the_command_refuses_what_cannot_serve(
    options: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    argv = ["router", "--port", "0", *options.replace("TOKEN", str(token)).split()]
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rlsys: error: ") and why in error


async def test_too_large_too_many_and_nobody_there() -> None:
    async with serving(limits=FrontLimits(body_bytes=1000, concurrency=1, queue=1)) as rig:
        status, answer = await rig.post("/generate", generate(x="y" * 2000))
        assert (status, answer["error"]["code"]) == (413, 413)
        rig.engines[0].hold_at = 1
        tasks = [asyncio.create_task(rig.post("/generate", generate())) for _ in range(2)]
        await rig.until(lambda: bool(rig.engines[0].requests))
        await asyncio.sleep(0.05)
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["type"]) == (429, "invalid_request_error")
        assert len(rig.engines[0].requests) == 1, "one at a time"
        rig.engines[0].free.set()
        assert [(await t)[0] for t in tasks] == [200, 200]

    async with serving(queue_seconds=0.05) as rig:
        rig.fleet.dispatcher.open = False
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (503, "no engine could take the request within 0.05 s")

    async with serving(0) as rig:
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (503, "no engine has answered yet")
        assert (await rig.client.get("/health")).status == 200
        assert (await rig.client.get("/ready")).status == 503


@pytest.mark.parametrize(
    ("body", "samples"),
    [
        ({"input_ids": PROMPT}, 1),
        ({"input_ids": [PROMPT] * 3, "sampling_params": {"n": 4}}, 12),
        ({"input_ids": [PROMPT] * 3, "sampling_params": [{"n": 2}, {}, {"n": 5}]}, 15),
        ({"text": ["a", "b"]}, 2),
        ({"prompt": [[1], [2]], "n": 2, "best_of": 6}, 12),
        ({"messages": [{}, {}], "n": 3}, 3),
        ({"prompt": "abc", "n": "many", "best_of": 10**9, "sampling_params": 3}, 1),
    ],
)
def test_a_request_counts_as_what_it_asks_for(body: dict[str, Any], samples: int) -> None:
    assert samples_of(body) == samples


async def test_one_request_does_not_get_round_the_limits() -> None:
    async with serving(limits=FrontLimits(concurrency=4, queue=2)) as rig:
        status, answer = await rig.post("/generate", {"input_ids": [[]] * 5})
        assert (status, answer["error"]["message"]) == (413, "5 samples in one request; expected at most 4")
        status, answer = await rig.post("/v1/completions", {"prompt": ["a"] * 4, "n": 2})
        assert (status, answer["error"]["code"]) == (413, 413)
        rig.engines[0].hold_at = 1
        bodies: list[dict[str, Any]] = [{"messages": [], "n": n} for n in (3, 2, 1)]
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(rig.post("/v1/chat/completions", body)))
            await asyncio.sleep(0.05)
        assert len(rig.engines[0].requests) == 1, "the second does not fit beside, the third not before it"
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (
            429,
            "6 samples are here already, of at most 6; try again later",
        )
        tasks[1].cancel()
        await rig.until(lambda: len(rig.engines[0].requests) == 2)
        rig.engines[0].free.set()
        assert [(await t)[0] for t in (tasks[0], tasks[2])] == [200, 200]
        assert rig.fleet.pool.in_flight == 0


async def test_places_are_given_in_order_and_come_back() -> None:
    places, order = Places(3), []

    async def taker(name: str, n: int, free: asyncio.Event) -> None:
        async with places.take(n):
            order.append(name)
            await free.wait()

    free, never = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(taker(*x)) for x in (("a", 2, free), ("b", 3, never), ("c", 1, never))]
    await asyncio.sleep(0)
    assert order == ["a"], "c would fit, but b was there first"
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    await asyncio.sleep(0)
    assert order == ["a", "c"]
    tasks += [asyncio.create_task(taker("d", 2, never))]
    await asyncio.sleep(0)
    free.set()
    tasks[3].cancel()  # in the moment in which its places come free
    await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
    last = asyncio.create_task(taker("e", 2, free))
    await last
    assert order == ["a", "c", "e"]
    tasks[2].cancel()


async def test_a_token_is_asked_for() -> None:
    async with serving(token="s3cret-s3cret-s3cret") as rig:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret-s3cret-s3cret"}):
            status, answer = await rig.post("/generate", generate(), headers=headers)
            assert (status, answer["error"]["code"]) == (401, 401)
            assert (await rig.client.get("/engines", headers=headers)).status == 401
        right = {"Authorization": "Bearer s3cret-s3cret-s3cret"}
        assert (await rig.post("/generate", generate(), headers=right))[0] == 200
        assert (await rig.client.get("/health")).status == 200


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    assert read_token(RouterOptions([], 0)) is None
    with pytest.raises(UserError, match=r"--host 0.0.0.0: other machines can reach it; --token-file"):
        read_token(RouterOptions([], 0, host="0.0.0.0"))
    file = tmp_path / "token"
    with pytest.raises(UserError, match="No such file"):
        read_token(RouterOptions([], 0, token_file=file))
    file.write_text("short\n")
    with pytest.raises(UserError, match="5 characters, expected at least 16"):
        read_token(RouterOptions([], 0, token_file=file))


# Engines


async def test_engines_join_are_brought_up_to_date_and_leave() -> None:
    async with serving() as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "next", "weight_version": 7})
        joiner = HttpEngine()
        url = await joiner.start()
        assert await rig.post("/engines", {"url": url}) == (201, {"url": url})
        status, answer = await rig.post("/engines", {"url": url})
        assert (status, answer["error"]["message"]) == (400, f"{url} is in the pool already")
        await rig.until(lambda: len(rig.fleet.pool.serving()) == 2)
        assert (joiner.loads, joiner.version) == (["next"], 7)
        async with rig.client.delete("/engines", json={"url": rig.urls[0]}) as gone:
            assert gone.status == 202
        await rig.until(lambda: len(rig.fleet.pool.engines) == 1)
        async with rig.client.get("/engines") as listed:
            rows = (await listed.json())["engines"]
        assert [(r["url"], r["state"]) for r in rows] == [(url, "version 7")]
        assert (await rig.post("/generate", generate()))[0] == 200
        assert len(joiner.requests) == 1
        for bad in ({"url": "ftp://x"}, {"url": 3}, {}):
            assert (await rig.post("/engines", bad))[0] == 400
        assert (await rig.client.delete("/engines?url=http://nobody:1")).status == 400
        await joiner.stop()


async def test_an_engine_that_takes_long_to_load_holds_nobody_up() -> None:
    async with serving() as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        slow, quick = HttpEngine(), HttpEngine()
        slow.may_load.clear()
        urls = [await e.start() for e in (slow, quick)]
        for url in urls:
            await rig.post("/engines", {"url": url})
        await rig.until(lambda: slow.loads == ["next"] and len(rig.fleet.pool.serving()) == 2)
        slow.version = 1  # it has them, and its cache is not flushed yet
        await rig.fleet.pool.probe()
        assert len(rig.fleet.pool.serving()) == 2
        later = asyncio.create_task(rig.post("/update_weights_from_disk", {"model_path": "later"}))
        await asyncio.sleep(0.05)
        assert not later.done(), "one load after the other"
        slow.may_load.set()
        assert (await later)[1]["weight_version"] == 2
        assert (slow.loads, quick.loads) == (["next", "later"], ["next", "later"])
        quick.may_load.clear()
        last = asyncio.create_task(rig.post("/update_weights_from_disk", {"model_path": "last"}))
        await rig.until(lambda: "last" in quick.loads)
        state = rig.fleet.pool.find(urls[1])
        assert state is not None
        state.died()  # as probes find
        assert (await last)[1]["weight_version"] == 3
        quick.may_load.set()
        for engine in (slow, quick):
            await engine.stop()


async def test_an_engine_of_other_weights_waits_for_a_folder_and_it_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as rig:
        other = HttpEngine(version=3)
        url = await other.start()
        await rig.post("/engines", {"url": url})
        told = f"{url} has weight version 3, the pool 0: it serves after POST /update_weights_from_disk"
        await rig.until(lambda: told in caplog.messages)
        for _ in range(3):
            rig.fleet._bring_up_to_date()
        assert caplog.messages.count(told) == 1
        assert len(rig.fleet.pool.serving()) == 1
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        assert len(rig.fleet.pool.serving()) == 2
        await other.stop()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [(200, "{}", "is no SGLang server"), (200, "<html>", "is no SGLang server"), (404, "gone", "404 gone")],
)
async def test_a_server_that_is_no_engine_is_named(status: int, body: str, told: str) -> None:
    async def model_info(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with serving() as rig:
        app = web.Application()
        app.router.add_get("/model_info", model_info)
        async with TestServer(app) as stranger:
            url = str(stranger.make_url("")).rstrip("/")
            rig.fleet.add(url)
            state = rig.fleet.pool.find(url)
            assert state is not None
            await rig.until(lambda: told in state.state)
            assert state.state.startswith("dead: ") and not state.alive


async def test_a_folder_that_nobody_can_load_changes_nothing() -> None:
    async with serving(interruption="retract") as rig:
        status, answer = await rig.post("/update_weights_from_disk", {"model_path": "bad"})
        assert status == 500 and "no engine could load bad" in answer["error"]["message"]
        assert (await rig.post("/generate", generate()))[0] == 200
        assert rig.fleet.pool.version == 0
        status, answer = await rig.post("/update_weights_from_disk", {"model_path": "a", "weight_version": 0})
        assert status == 400 and "expected more than 0" in answer["error"]["message"]


@pytest.mark.parametrize("interruption", ["abort", "retract"])
async def test_no_prefix_outlives_the_weights_that_read_it(interruption: FleetInterruption) -> None:
    async with serving(2, interruption=interruption) as rig:
        await rig.post("/update_weights_from_disk", {"model_path": "a"})
        for engine in rig.engines:
            assert engine.calls.index("flush_cache") > engine.calls.index("update_weights_from_disk")


async def test_prometheus_reads_it() -> None:
    async with serving(2) as rig:
        await rig.post("/generate", generate())
        await rig.post("/generate", {"input_ids": [1000]})
        async with rig.client.get("/metrics") as answer:
            text = await answer.text()
        assert 'rlsys_router_requests_total{code="200",path="/generate"} 1.0' in text
        assert "rlsys_router_refused_total 1.0" in text
        assert f'rlsys_router_engine_up{{engine="{rig.urls[0]}"}} 1.0' in text


async def test_a_prefix_stays_with_its_engine() -> None:
    async with serving(2) as rig:
        for _ in range(3):
            for first in (1, 2):
                await rig.post("/generate", {**generate(), "input_ids": [first, *PROMPT]})
        for engine in rig.engines:
            assert len({tuple(b["input_ids"]) for _, b in engine.requests}) <= 2
        owners = {
            first: {i for i, e in enumerate(rig.engines) for _, b in e.requests if b["input_ids"][0] == first}
            for first in (1, 2)
        }
        assert all(len(o) == 1 for o in owners.values())
