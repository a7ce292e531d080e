"""No request ends an engine: what the front, agents and the Tinker server refuse (review: security A2, A18, A19;
world W29, W30; rollout_inputs F5)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from rlsys.agents import anthropic, chat
from rlsys.agents.messages import BadRequest
from rlsys.core.errors import UserError
from rlsys.tenants.requests import Sample, read
from rlsys.tenants.sampler import check_sample
from tests.helpers.front_rig import PROMPT, Rig, generate, serving
from tests.helpers.http_engine import HttpEngine
from tests.helpers.odd_requests import QUESTION, SAMPLING, Raw, edge_requests, odd_requests


async def test_every_odd_value_of_every_field_is_refused() -> None:
    """Before: min_p, logprob_start_len = -9 and a list for a single prompt each ended a scheduler (A18)."""
    passed = []
    async with serving() as rig:
        for odd in odd_requests():
            async with rig.client.post(odd.path, data=odd.raw) as answer:
                body = (await answer.read()).decode(errors="replace")
            if answer.status != 400 or '"code":400' not in body:
                passed.append((odd.name, answer.status))
        assert not passed
        assert not rig.engines[0].requests


async def test_a_refusal_names_the_field_and_the_accepted_values() -> None:
    async with serving() as rig:
        for path, body, fragments in (
            ("/generate", generate(no_such=1), ("no_such: unknown", "input_ids, ", "sampling_params")),
            (
                "/generate",
                {"text": "a", "sampling_params": {"no_such": 1}},
                ("params.no_such: unknown", "top_k"),
            ),
            ("/v1/chat/completions", {"messages": QUESTION, "min_p": 0.1}, ("min_p = 0.1", "deterministic")),
            (
                "/v1/chat/completions",
                {"messages": QUESTION, "no_such": 1},
                ("no_such: unknown", "messages, "),
            ),
            (
                "/v1/completions",
                {"prompt": "a", "stop_regex": "(a+)+b"},
                ("stop_regex = '(a+)+b'", "not served"),
            ),
        ):
            status, answer = await rig.post(path, body)
            assert status == 400
            assert all(words in answer["error"]["message"] for words in fragments), answer["error"]["message"]


async def test_usual_requests_pass() -> None:
    usual: list[tuple[str, dict[str, Any]]] = [
        ("/generate", generate(return_logprob=True, logprob_start_len=-1, top_logprobs_num=3, stream=True)),
        ("/generate", {"input_ids": [PROMPT] * 2, "return_logprob": [True, False], "logprob_start_len": [-1, 0]}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}),
        ("/generate", {"text": "a", "sampling_params": {"stop": None, "min_p": 0, "top_k": -1, "json_schema": ""}}),
        ("/v1/chat/completions", {"messages": QUESTION, "user": "u", "metadata": {"a": 1}, "min_p": 0.0}),
        ("/v1/chat/completions", {"messages": QUESTION, "frequency_penalty": 0, "tool_choice": "auto", "seed": -5}),
        ("/v1/chat/completions", {"messages": QUESTION, "chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/chat/completions", {"messages": QUESTION, "response_format": {"type": "text"}}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": False, "logprobs": 2, "logit_bias": {"5": -100}}),
    ]  # fmt: skip
    async with serving() as rig:
        for path, body in usual:
            async with rig.client.post(path, json=body) as answer:
                assert answer.status == 200, (body, await answer.text())


async def test_the_engines_do_not_get_a_clients_request_id() -> None:
    """An engine aborts all requests whose id begins with a given one."""
    async with serving() as rig:
        for path, body in (
            ("/generate", generate(rid="a")),
            ("/v1/completions", {"prompt": "a", "rid": "b"}),
        ):
            assert (await rig.post(path, body))[0] == 200
        assert not {"a", "b"} & {body["rid"] for _, body in rig.engines[0].requests}


# -- seeds (W29) ----------------------------------------------------------------------------------------------


def seeds(rig: Rig) -> list[int]:
    request_seeds = []
    for _, body in rig.engines[0].requests:
        params = body.get("sampling_params", body)
        request_seeds += [
            p.get("sampling_seed", p.get("seed")) for p in (params if isinstance(params, list) else [params])
        ]
    return request_seeds


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_each_of_n_responses_has_a_seed_of_its_own(path: str, seed: int | None) -> None:
    """Before: one seed for all, or none, which a deterministic engine takes for 42: n equal answers (W29)."""
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": PROMPT, "sampling_params": {"n": 4, "sampling_seed": seed}},
        "/v1/completions": {"prompt": "a", "n": 4, "seed": seed},
        "/v1/chat/completions": {"messages": QUESTION, "n": 4, "seed": seed},
    }
    async with serving() as rig:
        assert (await rig.post(path, bodies[path]))[0] == 200
        assert all(isinstance(s, int) for s in seeds(rig)), seeds(rig)
        assert len(set(seeds(rig))) == 4


async def test_each_request_without_a_seed_has_one_of_its_own() -> None:
    async with serving() as rig:
        for _ in range(4):
            await rig.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
            await rig.post("/generate", {"input_ids": PROMPT})
        assert all(isinstance(s, int) for s in seeds(rig)), seeds(rig)
        assert len(set(seeds(rig))) == 8


async def test_n_responses_are_returned_in_one_answer() -> None:
    async with serving() as rig:
        body = {"prompt": ["a", "bb"], "n": 3, "max_tokens": 2}
        status, answer = await rig.post("/v1/completions", body)
        assert status == 200 and [c["index"] for c in answer["choices"]] == list(range(6))
        status, text = await rig.post(
            "/v1/chat/completions", {"messages": QUESTION, "n": 3, "stream": True, "max_tokens": 2}
        )
        events = text.split("\n\n")[:-1]
        assert status == 200 and events.count("data: [DONE]") == 1 and events[-1] == "data: [DONE]"
        choices = [c for e in events[:-1] for c in json.loads(e[6:])["choices"]]
        assert {c["index"] for c in choices} == {0, 1, 2}
        assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]
        assert len({json.loads(e[6:])["id"] for e in events[:-1]}) == 1


# -- requests under which engines die (A2, A18) ---------------------------------------------------------------


class Mortal(HttpEngine):
    """Dies of the token 66, a while after it came, and all requests in it with it."""

    async def _generate(self, request: Any) -> Any:
        body = await request.json()
        inside = self.__dict__.setdefault("inside", [])
        inside.append(request)
        if 66 in body.get("input_ids", ()):
            self.requests.append((request.path, body))
            await asyncio.sleep(0.05)
            for open_request in inside:
                if open_request.transport is not None:
                    open_request.transport.abort()
            inside.clear()
            return web.Response()
        try:
            return await super()._generate(request)
        finally:
            if request in inside:
                inside.remove(request)


async def test_a_request_that_kills_engines_is_retried_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: three deaths for one request, and as many for the same one again."""
    monkeypatch.setattr("tests.helpers.front_rig.HttpEngine", Mortal)
    async with serving(4) as rig:
        for _ in range(3):
            status, answer = await rig.post("/generate", {**generate(), "input_ids": [1, 66]})
            assert 400 <= status < 500 and "engines died" in answer["error"]["message"], (status, answer)
        deadly = [b for e in rig.engines for _, b in e.requests if 66 in b["input_ids"]]
        assert len(deadly) == 2
        assert (await rig.post("/generate", generate()))[0] == 200


async def test_requests_concurrent_with_a_fatal_one_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second try is alone among all that were in the engine that died."""
    monkeypatch.setattr("tests.helpers.front_rig.HttpEngine", Mortal)
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        neighbours = [
            asyncio.create_task(rig.post("/generate", generate(session_id=f"{i}"))) for i in range(6)
        ]
        await rig.until(lambda: sum(len(e.requests) for e in rig.engines) == 6)
        killer = asyncio.create_task(rig.post("/generate", {**generate(), "input_ids": [1, 66]}))
        await rig.until(lambda: any(66 in b["input_ids"] for e in rig.engines for _, b in e.requests))
        for engine in rig.engines:
            engine.hold_at = None
        await asyncio.sleep(0.2)
        for engine in rig.engines:
            engine.release.set()
        assert (await killer)[0] == 422
        assert [(await task)[0] for task in neighbours] == [200] * 6


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_refused_by_an_engine_is_not_retried_on_another(status: int) -> None:
    async with serving(3) as rig:
        for engine in rig.engines:
            engine.fail_with = status
        assert (await rig.post("/generate", generate()))[0] == 400
        assert sum(len(e.requests) for e in rig.engines) == 1


async def test_the_strictest_engine_decides() -> None:
    """An engine that joins may be deterministic where the others are not."""

    class Plain(HttpEngine):
        deterministic = False

        async def _server_info(self, _: Any) -> Any:
            return web.json_response(
                {"model_path": "nowhere", "max_req_input_len": 194, "incremental_streaming_output": True,
                 "enable_deterministic_inference": self.deterministic, "enable_lora": False}
            )  # fmt: skip

    async def refused(rig: Rig) -> bool:
        return (await rig.post("/v1/chat/completions", {"messages": QUESTION, "min_p": 0.1}))[0] == 400

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.helpers.front_rig.HttpEngine", Plain)
        async with serving() as rig:
            assert not await refused(rig)
            deterministic_engine = Plain()
            deterministic_engine.deterministic = True
            rig.fleet.join(await deterministic_engine.start())
            for _ in range(300):
                if await refused(rig):
                    break
                await asyncio.sleep(0.01)
            assert await refused(rig)
            strange = HttpEngine()
            strange.secrets = {"max_req_input_len": "many", "model_path": "?"}
            rig.fleet.join(await strange.start())
            await rig.until(lambda: len(rig.fleet.pool.serving()) == 3)
            await asyncio.sleep(0.1)
            assert (await rig.post("/generate", generate()))[0] == 200, "it ends no router"
            await deterministic_engine.stop()
            await strange.stop()


# -- agents and the Tinker server -----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], {"a": 1}, 5, ["x"] * 33, "x" * 1025])
def test_an_agents_stops_are_texts(stop: Any) -> None:
    """Before: `stop: [""]` ended the run (F5)."""
    with pytest.raises(BadRequest, match="stop"):
        chat.read({"messages": [{"role": "user", "content": "a"}], "stop": stop})
    with pytest.raises(BadRequest, match="stop_sequences"):
        anthropic.read({"messages": [{"role": "user", "content": "a"}], "stop_sequences": stop})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", float("nan")), ("top_p", 2), ("top_k", 2**31), ("n", []),
        ("max_tokens", 2**31), ("logit_bias", [1]), ("repetition_penalty", 0), ("min_tokens", -1), ("seed", "x"),
    ],
)  # fmt: skip
def test_an_agents_sampling_parameters_keep_to_the_same_ranges(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=name):
        chat.read({"messages": [{"role": "user", "content": "a"}], name: value})


TINKERS = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "top_k", "max_new_tokens", "stop", "no_such_parameter"]
)
def test_a_tenants_sampling_parameters_keep_to_the_same_ranges(name: str) -> None:
    """Before: one `asample` with top_k = 2147483648 ended the server for all (A2)."""
    accepted_values = []
    for value in SAMPLING[name]:
        if (name, value) == ("stop", [1]):
            continue  # token ids, here
        text = str(value) if isinstance(value, Raw) else json.dumps(value)
        body = (
            '{"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, '
            f'"sampling_params": {{"{TINKERS.get(name, name)}": {text}}}}}'
        )
        try:
            check_sample(read(Sample, body.encode()), 100, 194)
        except UserError:
            continue
        accepted_values.append(value)
    assert not accepted_values


async def test_values_at_the_edges_of_their_ranges_pass() -> None:
    """Some are for the engine to refuse, by a 400 of its own."""
    refused = {"input_ids", "prompt", "messages"}  # this one's limits are smaller
    async with serving() as rig:
        wrong = []
        for edge in edge_requests():
            async with rig.client.post(edge.path, data=edge.raw) as answer:
                body = await answer.text()
                if answer.status != 200 and not refused & set(edge.field.split(", ")):
                    wrong.append((edge.name, answer.status, body[:150]))
        assert not wrong


async def test_a_models_own_min_p_does_not_reach_a_deterministic_engine() -> None:
    """SGLang takes it from generation_config.json for chats that have none, and its scheduler ends."""
    async with serving() as rig:
        assert (await rig.post("/v1/chat/completions", {"messages": QUESTION, "min_p": None}))[0] == 200
        assert rig.engines[0].requests[0][1]["sampling_params"]["min_p"] == 0


async def test_identical_requests_in_a_dying_engine_count_its_death_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2) as rig:
        for engine in rig.engines:
            engine.hold_at = 5
        tasks = [asyncio.create_task(rig.post("/generate", generate(session_id="one"))) for _ in range(6)]
        await rig.until(lambda: max(len(e.requests) for e in rig.engines) == 6)
        for engine in rig.engines:
            engine.hold_at = None
        next(e for e in rig.fleet.pool.engines if e.load).mark_dead()
        assert [(await task)[0] for task in tasks] == [200] * 6
