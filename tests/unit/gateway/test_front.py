"""Requests through the front of a stand-alone router: calls of Router.generate, in the form of three APIs."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from aiohttp import web

from rlsys.core.spans import RouteSpan
from rlsys.core.types import Sample, Status
from rlsys.engine_requests import Limits
from rlsys.gateway.answers import _routes, answer_to
from rlsys.gateway.api_requests import read_request
from rlsys.gateway.generation import DeathHistory, Generation
from rlsys.gateway.response_text import ResponseText
from rlsys.gateway.served_model import ServedModel
from rlsys.generators.parser_client import Call, Turn
from tests.helpers.front_rig import MODEL, PROMPT, Rig, expected_ids, generate, parse, serving
from tests.helpers.http_engine import HttpEngine

QUESTION = [{"role": "user", "content": "12+30="}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL_OF_TESTS = ServedModel(MODEL, {"incremental_streaming_output": True})


def text_of(ids: list[int]) -> str:
    return MODEL_OF_TESTS.decode(ids, skip_special=True)


def chat_ids() -> list[int]:
    return MODEL_OF_TESTS.rendering.prompt(QUESTION, ())


def written(path: str, answer: Any) -> str:
    """Text of an answer, or of a stream, of one response."""
    text = ""
    for chunk in parse(answer) if isinstance(answer, str) else [answer]:
        for choice in chunk["choices"]:
            text += (
                choice.get("text")
                or (choice.get("message") or choice.get("delta") or {}).get("content")
                or ""
            )
    return text


# -- requests --------------------------------------------------------------------------------------------------


async def test_an_engine_receives_token_ids_a_seed_and_sampling_parameters() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "logit_bias": {"5": 1}, "ignore_eos": True}
    async with serving() as rig:
        body = generate()
        body["sampling_params"] |= sampling
        status, answer = await rig.post("/generate", body)
        assert (status, answer["output_ids"], answer["text"]) == (
            200,
            expected_ids(8),
            text_of(expected_ids(8)),
        )
        _, payload = rig.engines[0].requests[0]
        assert payload["input_ids"] == PROMPT and payload["sampling_params"]["sampling_seed"] == 3
        assert {name: payload["sampling_params"][name] for name in sampling} == sampling
        assert (await rig.post("/generate", {**body, "anything": {"new": [1]}}))[0] == 400
        assert len(rig.engines[0].raw_bodies) == 1


async def test_a_chat_is_rendered_with_the_models_template() -> None:
    async with serving() as rig:
        status, answer = await rig.post(CHAT, {"messages": QUESTION, "max_tokens": 3, "seed": 5})
        _, payload = rig.engines[0].requests[0]
        assert payload["input_ids"] == chat_ids() and payload["sampling_params"]["sampling_seed"] == 5
        tokens = expected_ids(3, len(chat_ids()))
        assert answer["choices"][0]["message"]["content"] == text_of(tokens) and status == 200
        prompt = len(chat_ids())
        usage = {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
        assert answer["usage"] == usage


async def test_a_text_is_tokenized_by_the_router() -> None:
    async with serving() as rig:
        for path, body in (("/generate", {"text": "12+30="}), (COMPLETIONS, {"prompt": "12+30="})):
            assert (await rig.post(path, body))[0] == 200
        ids = MODEL_OF_TESTS.encode("12+30=", "text")
        assert [body["input_ids"] for _, body in rig.engines[0].requests] == [ids, ids]
        budgets = [body["sampling_params"]["max_new_tokens"] for _, body in rig.engines[0].requests]
        assert budgets == [128, 16], "SGLang's own defaults"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/generate", {"sampling_params": {"frequency_penalty": 0.1}}),
        ("/generate", {"sampling_params": {"min_new_tokens": 2}}),
        ("/generate", {"sampling_params": {"json_schema": "{}"}}),
        ("/generate", {"return_logprob": True, "logprob_start_len": 0}),
        ("/generate", {"image_data": ["x"]}),
        ("/generate", {"custom_logit_processor": "x"}),
        ("/generate", {"lora_path": "x"}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"repetition_penalty": 1.1}),
        (CHAT, {"tool_choice": "required"}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"best_of": 2}),
    ],
)
async def test_parameters_without_exact_continuation_are_refused(path: str, change: dict[str, Any]) -> None:
    plain = {"/generate": generate(), CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "1"}}
    async with serving() as rig:
        status, answer = await rig.post(path, {**plain[path], **change})
        *_, field = change.get("sampling_params", change)
        assert status == 400 and f"{field} = " in answer["error"]["message"]
        assert "not served" in answer["error"]["message"] and "\n" not in answer["error"]["message"]
        assert not rig.engines[0].requests


async def test_a_router_without_the_models_folder_serves_token_ids() -> None:
    async with serving(model_path=None) as rig:
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["output_ids"], "text" in answer) == (200, expected_ids(8), False)
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": "a"}}),
            (CHAT, {"messages": QUESTION}),
        ):
            status, answer = await rig.post(path, body)
            assert status == 400 and "--model-path" in answer["error"]["message"], answer


def test_absent_sampling_values_take_the_models_defaults(tmp_path: Any) -> None:
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    limits = Limits(100, 200)
    for defaults_source, expected in (("model", (0.6, {"top_k": 20})), ("openai", (1.0, {}))):
        model = ServedModel(tmp_path, {"sampling_defaults": defaults_source})
        (generation,) = read_request(CHAT, {"messages": QUESTION}, limits, model).generations
        assert (generation.temperature, generation.sampling) == expected
        (generation,) = read_request(
            CHAT, {"messages": QUESTION, "temperature": 0}, limits, model
        ).generations
        assert generation.temperature == 0
        (generation,) = read_request("/generate", {"text": "1"}, limits, model).generations
        assert generation.temperature == 1.0, "/generate has SGLang's own defaults"


# -- streams ---------------------------------------------------------------------------------------------------


async def test_a_stream_delivers_tokens_as_they_arrive() -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 3
        async with rig.client.post("/generate", json=generate(stream=True)) as answer:
            first = await answer.content.readuntil(b"\n\n")
            assert json.loads(first[6:])["output_ids"][0] == expected_ids(1)[0], (
                "before the answer is complete"
            )
            rig.engines[0].release.set()
            stream_text = (first + await answer.read()).decode()
        assert [i for c in parse(stream_text) for i in c["output_ids"]] == expected_ids(8)
        assert "".join(c["text"] for c in parse(stream_text)) == text_of(expected_ids(8))


async def test_a_stream_repeats_all_tokens_where_the_engines_do() -> None:
    async with serving() as rig:
        assert rig.fleet.model is not None
        rig.fleet.model.incremental = False
        body = generate(stream=True, return_logprob=True)
        chunks = parse((await rig.post("/generate", body))[1])
        assert chunks[-1]["output_ids"] == expected_ids(8) and chunks[-1]["text"] == text_of(expected_ids(8))
        assert [e[1] for e in chunks[-1]["meta_info"]["output_token_logprobs"]] == expected_ids(8)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_is_the_whole_answer(path: str) -> None:
    prompt_fields = {"prompt": "12"} if path == COMPLETIONS else {"messages": QUESTION}
    body = {**prompt_fields, "max_tokens": 9, "logprobs": 2 if path == COMPLETIONS else True, "seed": 1}
    async with serving() as rig:
        _, answer = await rig.post(path, body)
        stream_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        _, text = await rig.post(path, stream_body)
        chunks = parse(text)
        assert written(path, text) == written(path, answer) != ""
        assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["choices"] == []
        assert len({c["id"] for c in chunks}) == 1
        finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
        assert finishes[-1] == "length" and not any(finishes[:-1])
        logprobs = [c["choices"][0]["logprobs"] for c in chunks[:-1] if c["choices"][0]["logprobs"]]
        name = "tokens" if path == COMPLETIONS else "content"
        assert [x for row in logprobs for x in row[name]] == answer["choices"][0]["logprobs"][name]


class Stock(HttpEngine):
    """SGLang as it starts without arguments: each event repeats all tokens, and the weights have no number."""

    def _answer(self, *args: Any, only_last: bool = False, **more: Any) -> dict[str, Any]:
        answer = super()._answer(*args, **more)
        answer["meta_info"]["weight_version"] = "default"
        return answer

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})


async def test_a_server_that_was_started_without_arguments_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.front_rig.HttpEngine", Stock)
    async with serving() as rig:
        status, answer = await rig.post("/generate", generate(return_logprob=True))
        assert (status, answer["output_ids"]) == (200, expected_ids(8))
        assert [e[1] for e in answer["meta_info"]["output_token_logprobs"]] == expected_ids(8)
        assert answer["meta_info"]["weight_version"] == "default"
        assert rig.fleet.pool.engines[0].deaths == 0


# -- interruptions and deaths ----------------------------------------------------------------------------------


async def interrupted(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request that an update of the weights interrupts after five tokens."""
    for engine in rig.engines:
        engine.hold_at = 5
    task = asyncio.create_task(rig.post(path, body))
    await rig.until(lambda: rig.fleet.router.stats()["received_tokens"] == 5)
    for engine in rig.engines:
        engine.hold_at = None
    status, new = await rig.post("/update_weights_from_disk", {"model_path": "next"})
    assert (status, new["weight_version"]) == (200, 1)
    status, answer = await task
    assert status == 200
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [False, True])
async def test_an_interrupted_generate_continues_from_its_tokens(stream: bool, text: bool) -> None:
    async with serving(2) as rig:
        body, prompt = generate(12, stream=stream, return_logprob=True), PROMPT
        if text:
            prompt = MODEL_OF_TESTS.encode("four", "text")
            body["text"] = "four"
            del body["input_ids"]
        answer = await interrupted(rig, "/generate", body)
        tokens = expected_ids(12, len(prompt))
        if stream:
            chunks = parse(answer)
            assert [i for c in chunks for i in c["output_ids"]] == tokens
            assert "".join(c["text"] for c in chunks) == text_of(tokens)
            answer = chunks[-1]
            assert len({c["meta_info"]["id"] for c in chunks}) == 1
            assert not any(c["meta_info"]["finish_reason"] for c in chunks[:-1])
        else:
            assert answer["output_ids"] == tokens
            assert [e[1] for e in answer["meta_info"]["output_token_logprobs"]] == tokens
        meta = answer["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 12)
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
        assert spans == [("0", 0, 6), ("1", 6, 12)] and meta["weight_version"] == "1"
        payloads = [body for e in rig.engines for _, body in e.requests]
        assert [b["sampling_params"]["max_new_tokens"] for b in payloads] == [12, 6]
        assert payloads[1]["input_ids"] == prompt + tokens[:6]
        assert all(e.loads == ["next"] for e in rig.engines)
        assert rig.fleet.router.stats()["resumes"] == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_requests_continue_from_their_tokens_too(path: str, stream: bool) -> None:
    prompt_fields: dict[str, Any] = {"prompt": "four"} if path == COMPLETIONS else {"messages": QUESTION}
    async with serving() as rig:
        answer = await interrupted(rig, path, {"max_tokens": 9, "stream": stream, **prompt_fields})
        first, second = (body for _, body in rig.engines[0].requests)
        prompt = first["input_ids"]
        assert second["input_ids"] == prompt + expected_ids(6, len(prompt))
        assert second["sampling_params"]["sampling_seed"] == first["sampling_params"]["sampling_seed"]
        assert written(path, answer) == text_of(expected_ids(9, len(prompt)))


async def test_the_last_token_before_an_abort_may_be_the_end() -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 5
        body = generate(20)
        body["sampling_params"]["stop_token_ids"] = [expected_ids(6)[-1]]
        tasks = [
            asyncio.create_task(rig.post("/generate", payload))
            for payload in (body, {**body, "stream": True}, generate(6))
        ]
        await rig.until(lambda: rig.fleet.router.stats()["received_tokens"] == 15)
        await rig.post("/update_weights_from_disk", {"model_path": "next"})
        answer, stream, _ = [(await t)[1] for t in tasks]
        reason = {"type": "stop", "matched": expected_ids(6)[-1]}
        assert (answer["output_ids"], answer["meta_info"]["finish_reason"]) == (expected_ids(6), reason)
        chunks = parse(stream)
        assert [i for c in chunks for i in c["output_ids"]] == expected_ids(6)
        assert "".join(c["text"] for c in chunks) == answer["text"] == text_of(expected_ids(5))
        assert chunks[-1]["meta_info"]["finish_reason"] == reason
        assert len(rig.engines[0].requests) == 3, "nothing is written past the end"


async def test_a_stop_text_ends_a_response_across_an_interruption() -> None:
    """It is in the tokens of both requests, so no engine finds it."""
    stop = text_of(expected_ids(9)[4:8])
    async with serving() as rig:
        body = generate(20, stream=True)
        body["sampling_params"]["stop"] = [stop]
        chunks = parse(await interrupted(rig, "/generate", body))
        assert [i for c in chunks for i in c["output_ids"]] == expected_ids(8)
        assert "".join(c["text"] for c in chunks) == text_of(expected_ids(4))
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_a_dead_engine_costs_no_request() -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        tasks = [
            asyncio.create_task(rig.post("/generate", generate(12, stream=True, session_id=str(i))))
            for i in range(4)
        ]
        await rig.until(lambda: all(len(e.requests) == 2 for e in rig.engines))
        await rig.until(lambda: rig.fleet.router.stats()["received_tokens"] == 20)
        rig.engines[1].hold_at = None
        rig.engines[1].release.set()
        state = rig.fleet.pool.find(rig.urls[0])
        assert state is not None
        state.mark_dead()
        for task in tasks:
            _, text = await task
            assert [i for c in parse(text) for i in c["output_ids"]] == expected_ids(12)
        assert len(rig.engines[1].requests) == 4
        rig.engines[0].release.set()


async def test_a_server_fault_is_retried_on_another_engine() -> None:
    async with serving(2) as rig:
        rig.engines[0].fail_with = 500
        for i in range(4):
            status, answer = await rig.post("/generate", generate(session_id=str(i)))
            assert (status, answer["output_ids"]) == (200, expected_ids(8))
        assert rig.fleet.pool.engines[0].breaker.failures
        assert not rig.fleet.pool.engines[1].breaker.failures


async def test_a_server_fault_of_two_engines_is_an_error() -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.fail_with = 500
        status, answer = await rig.post("/generate", generate())
        assert status == 503 and "2 consecutive responses were server errors" in answer["error"]["message"]


async def test_an_error_after_the_first_event_ends_the_stream() -> None:
    async with serving(queue_seconds=0.2) as rig:
        rig.engines[0].hold_at = 5
        task = asyncio.create_task(rig.post("/generate", generate(stream=True)))
        await rig.until(lambda: rig.fleet.router.stats()["received_tokens"] == 5)
        rig.engines[0].fail_with = 503
        rig.fleet.pool.engines[0].mark_dead()
        _, text = await task
        error = json.loads(text.rstrip().rsplit("\n\n", 1)[1][6:])["error"]
        assert error["code"] == 503 and error["type"] == "server_error"
        rig.engines[0].release.set()


def test_deaths_are_forgotten_after_a_while() -> None:
    clock = [0.0]
    history = DeathHistory(lambda: clock[0])
    history.record(b"a", "http://e", 1)
    history.record(b"a", "http://e", 1)
    assert (history.count(b"a"), history.count(b"b")) == (1, 0)
    clock[0] = 601.0
    assert history.count(b"a") == 0
    history.record(b"a", "http://e", 2)
    assert history.count(b"a") == 1


# -- text, routes and tool calls -------------------------------------------------------------------------------


def response_text(**sampling: Any) -> ResponseText:
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    (request,) = read_request("/generate", body, Limits(200, 200), MODEL_OF_TESTS).generations
    return ResponseText(request, MODEL_OF_TESTS)


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_a_possible_stop_text_is_withheld(cut: int) -> None:
    ids = MODEL_OF_TESTS.encode("abSTabSTOPcd", "text")
    text, pieces = response_text(stop=["STOP"]), []
    for end in range(cut, len(ids) - 2, cut):
        pieces.append(text.advance(ids[:end]))
    assert "".join(pieces) in "abSTab" and not "".join(pieces).endswith(("S", "ST", "STO"))
    pieces.append(text.conclude(ids[:-2], at_stop=True))
    assert "".join(pieces) == "abSTab"
    full = response_text(stop=["STOP"], no_stop_trim=True)
    assert full.final(ids[:-2], at_stop=True) == "abSTabSTOP"
    assert response_text(stop=["STOP"]).conclude(ids[:4], at_stop=False) == "abST", "it was none"


def test_the_end_token_and_special_tokens_are_omitted_by_default() -> None:
    special = [10, 1, 11, 2]
    assert response_text().final(special, at_stop=True) == "01"
    assert response_text(skip_special_tokens=False).final(special, at_stop=True) == "0<bos>1"
    full_text = response_text(skip_special_tokens=False, no_stop_trim=True).final(special, at_stop=True)
    assert full_text == "0<bos>1<eos>"
    unchecked = response_text(ignore_eos=True, skip_special_tokens=False).final(special, at_stop=False)
    assert unchecked == full_text


@pytest.mark.parametrize(
    ("spans", "complete"),
    [
        ([RouteSpan(0, 2, bytes(range(8)), None), RouteSpan(2, 4, bytes(range(8, 16)), None)], True),
        ([RouteSpan(0, 2, bytes(range(8)), None), RouteSpan(3, 4, bytes(4), None)], False),
        ([RouteSpan(0, 2, bytes(range(8)), None)], False),
        ([RouteSpan(0, 4, b"", None)], False),
        ([], False),
    ],
)
def test_routes_are_those_of_the_whole_sequence_or_null(spans: list[RouteSpan], complete: bool) -> None:
    sample = Sample(0, 0, 0, PROMPT, seed=1)
    sample.response_ids.extend([5])
    sample.routes = spans
    routes = _routes(sample, 4)
    if not complete:
        assert routes is None
        return
    assert routes is not None
    assert base64.b64decode(routes) == b"".join(bytes([i, 0, 0, 0]) for i in range(16))


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_reasoning_are_parsed_at_the_end(stream: bool) -> None:
    reader_calls: list[tuple[str, str, list[Any]]] = []

    async def reader(text: str, before: str, tools: list[Any]) -> Turn:
        reader_calls.append((text, before, tools))
        return Turn("so", "because", (Call("add", '{"a": 1}'), Call("sub", "{}")))

    model = ServedModel(MODEL, {"incremental_streaming_output": True})
    model.reader, model.parses_calls = reader, True  # type: ignore[assignment]
    model.rendering._shows_tools = {json.dumps([TOOL], sort_keys=True): True}
    request = read_request(CHAT, {"messages": QUESTION, "tools": [TOOL]}, Limits(200, 200), model)
    sample = Sample(0, 0, 0, request.generations[0].prompt_ids, seed=1, status=Status.FINISHED)
    sample.response_ids.extend([20, 21, 2])
    sample.mu.extend([0.0] * 3)
    generation = Generation(request.generations[0], sample, b"")
    answer: Any = answer_to(request, [generation], model)
    if stream:
        events = [e async for chunk_events in chunks_of(answer) for e in chunk_events]
        deltas = [e["choices"][0]["delta"] for e in events]
        calls = [c for d in deltas for c in d.get("tool_calls") or ()]
        content = "".join(d.get("content") or "" for d in deltas)
        reasoning = "".join(d.get("reasoning_content") or "" for d in deltas)
        finish = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await answer.result())["choices"][0]
        calls, finish = choice["message"]["tool_calls"], choice["finish_reason"]
        content, reasoning = choice["message"]["content"], choice["message"]["reasoning_content"]
    assert (content, reasoning, finish) == ("so", "because", "tool_calls")
    function_calls = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
    assert function_calls == [("add", '{"a": 1}'), ("sub", "{}")]
    assert len({c["id"] for c in calls}) == 2
    ((text, before, tools),) = reader_calls
    assert text == text_of([20, 21]) and before.endswith("<assistant><think>") and tools == [TOOL]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def chunks_of(answer: Any) -> Any:
    """Events of a stream of one response, in two steps."""
    for final in (False, True):
        yield [event async for event in answer.events(0, final=final)]
