"""Requests through the front of a stand-alone router: no byte is changed, an interruption does not show."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from rlsys.gateway.skip import Broken, skipper
from rlsys.gateway.stitch import can_go_on, join
from tests.helpers.front_rig import PROMPT, generate, made, parse, serving
from tests.helpers.http_engine import letters


async def test_no_known_field_is_dropped_and_no_other_passes() -> None:
    async with serving() as rig:
        body = generate(return_routed_experts=True, return_logprob=True, extra_key="k")
        status, answer = await rig.post("/generate", body)
        assert (status, answer["output_ids"]) == (200, made(8))
        assert json.loads(rig.engines[0].raw[0]) == body
        assert (await rig.post("/generate", {**body, "anything": {"new": [1]}}))[0] == 400
        assert len(rig.engines[0].raw) == 1


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
        first, *both, last = (body for _, body in rig.engines[0].requests)
        assert isinstance(first["seed"], int) and first["tools"] == [{"x": 1}]
        assert [body["n"] for body in both] == [1, 1]
        assert both[0]["seed"] != both[1]["seed"], "several responses from one seed would be the same"
        assert last["seed"] == 5


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
        asked: dict[str, Any] = {"prompt": "four"} if path == "/v1/completions" else {"messages": []}
        task = asyncio.create_task(rig.post(path, {"max_tokens": 9, "stream": stream, **asked}))
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
        next(e for e in rig.fleet.pool.engines if e.load).mark_dead()
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


def delta(finish: str | None = None, index: int = 0, **fields: Any) -> bytes:
    """As SGLang writes it: all fields, those without a value null."""
    empty = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
    choice = {"index": index, "delta": empty | fields, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode()


def call(
    arguments: str = "", name: str | None = None, key: str | None = None, index: int = 0
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": key, "index": index, "type": "function", "function": function}]}


AGAIN = [
    delta(role="assistant", content=""),
    delta(reasoning_content="12 and"),
    delta(reasoning_content=" 30"),
    delta(content="so"),
    delta(**call(name="add", key="call_b")),
    delta(**call('{"a": 12, ')),
    delta(**call('"b": 30}')),
    delta(**call(name="sub", key="call_c", index=1)),
    delta(**call("{}", index=1)),
    delta("tool_calls"),
    b"data: [DONE]",
]


def put_together(events: list[bytes]) -> dict[str, Any]:
    """As a client does."""
    told: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": {}, "finish": None}
    for event in events[:-1]:
        (choice,) = json.loads(event[6:])["choices"]
        for name in ("reasoning_content", "content"):
            told[name] += choice["delta"].get(name) or ""
        for part in choice["delta"].get("tool_calls") or []:
            one = told["calls"].setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            one["id"] += part["id"] or ""
            one["name"] += part["function"]["name"] or ""
            one["arguments"] += part["function"]["arguments"] or ""
        told["finish"] = choice["finish_reason"] or told["finish"]
    return told


@pytest.mark.parametrize("kept", range(len(AGAIN) - 1))
def test_reasoning_and_tool_calls_go_on_where_the_client_is(kept: int) -> None:
    """Wherever the first stream was cut. Its pieces had other sizes, and its call another id."""
    sent = AGAIN[:kept]
    if kept > 2:
        sent[1:3] = [delta(reasoning_content="12 an"), delta(reasoning_content="d 30")]
    sent = [e.replace(b"call_b", b"call_a") for e in sent]
    again = skipper("/v1/chat/completions", sent, incremental=True)
    rest = [e for event in AGAIN if (e := again.skip(event))]
    whole = put_together(AGAIN)
    whole["calls"][0]["id"] = "call_a" if kept > 4 else "call_b"
    assert put_together([*sent, *rest]) == whole
    assert rest[-1] == b"data: [DONE]"


def test_blanks_before_a_call_are_told_or_not() -> None:
    """As SGLang's chunks happen to end."""
    again = skipper("/v1/chat/completions", [delta(content="so ")], incremental=True)
    rest = [e for event in AGAIN if (e := again.skip(event))]
    assert [c["arguments"] for c in put_together(rest)["calls"].values()] == ['{"a": 12, "b": 30}', "{}"]


def test_another_call_or_an_earlier_end_breaks_the_stream() -> None:
    sent = AGAIN[:6]
    for other in (
        [*AGAIN[:4], delta(**call(name="sub", key="x"))],
        [*AGAIN[:5], delta(**call('{"b"'))],
        [*AGAIN[:5], delta("length")],
        [delta(content="12")],
    ):
        again = skipper("/v1/chat/completions", sent, incremental=True)
        with pytest.raises(Broken, match="made again it is not the same"):
            for event in other:
                again.skip(event)


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
        state.mark_dead()
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
