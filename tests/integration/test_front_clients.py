"""`rlsys router` as a process before a real SGLang server, seen by stock clients: the openai package, SGLang's own
load client, and plain HTTP. The weights are updated during their requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from rlsys.config import Config
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from tests.helpers.engine_stack import EOS, PROMPT, SLOW, Stack, routes, sample, wait_until, worst_gap
from tests.helpers.servers import running_engine, running_router

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "12 + 30 + 5"}]
LONG = {"max_new_tokens": 80, "temperature": 1.0, "sampling_seed": 11}


@pytest.fixture
def router(engine: str, tmp_path: Path) -> Iterator[str]:
    """One at a time owns the engine: a second one would take its weights for stale, and load its own."""
    with running_router(tmp_path, "--engine", engine) as url:
        yield url


@pytest.fixture
def aborting_router(engine: str, tmp_path: Path) -> Iterator[str]:
    with running_router(tmp_path, "--engine", engine, "--interruption", "abort") as url:
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(c: openai.OpenAI, **more: Any) -> Any:
    defaults = {"model": "any", "messages": QUESTION, "seed": 5, "max_tokens": 12, "temperature": 1.0}
    return c.chat.completions.create(**{**defaults, **more})


def test_the_openai_client_gets_the_same_responses_from_router_and_engine(router: str, engine: str) -> None:
    through, direct = client(router), client(engine)
    assert [m.id for m in through.models.list()] == [m.id for m in direct.models.list()]
    a = chat(through, logprobs=True, top_logprobs=3, n=2).choices
    b = [chat(direct, logprobs=True, top_logprobs=3, seed=5 + i).choices[0] for i in range(2)]
    assert [x.message.content for x in a] == [x.message.content for x in b]
    assert len(a) == 2 and len(a[0].logprobs.content) == 12
    assert a[0].message.content != a[1].message.content, "each has a seed of its own"
    assert [t.logprob for t in a[0].logprobs.content] == pytest.approx(
        [t.logprob for t in b[0].logprobs.content], abs=1e-5
    )
    text = a[0].message.content
    streamed = list(chat(through, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == text
    assert streamed[-1].usage.completion_tokens == 12
    stopped = chat(through, stop=[text[4]]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(text[4])], "stop")
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    with pytest.raises(openai.BadRequestError, match="does not render tools"):
        chat(through, tools=[tool])
    wants = {"model": "any", "prompt": PROMPT, "max_tokens": 10, "seed": 3, "logprobs": 2, "temperature": 1.0}
    p, q = (c.completions.create(**wants).choices[0] for c in (through, direct))
    assert (p.text, p.logprobs.tokens) == (q.text, q.logprobs.tokens)
    pieces = [c.choices[0].text for c in through.completions.create(**wants, stream=True)]
    assert "".join(pieces) == p.text
    with pytest.raises(openai.BadRequestError, match="token id 4000 is outside the vocabulary of 128"):
        through.completions.create(model="any", prompt=[1, 4000])
    with pytest.raises(openai.BadRequestError, match="temperature = -1"):
        chat(through, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="tokens; expected at most"):
        chat(through, messages=[{"role": "user", "content": "1 + " * 1000}])


def test_sglangs_load_client_gets_the_same_results_through_the_router(
    router: str, engine: str, tiny_moe: Path, tmp_path: Path
) -> None:
    through, direct = (
        load_client(url, tiny_moe, tmp_path / name) for url, name in ((router, "through"), (engine, "direct"))
    )
    assert through["completed"] == 24
    assert through["output_lens"] == direct["output_lens"]
    assert through["generated_texts"] == direct["generated_texts"]


def load_client(url: str, model: Path, folder: Path) -> dict[str, Any]:
    """What `sglang.bench_serving` writes after 24 requests, eight at a time."""
    folder.mkdir()
    out = folder / "bench.jsonl"
    argv = [
        sys.executable, "-c",
        "from rlsys.engine.cpu.platform import declare_torchvision_ops as d; d(); import runpy\n"
        "runpy.run_module('sglang.bench_serving', run_name='__main__')",
        "--backend", "sglang", "--base-url", url, "--model", str(model), "--dataset-name", "random-ids",
        "--random-input-len", "24", "--random-output-len", "16", "--random-range-ratio", "1", "--num-prompts", "24",
        "--max-concurrency", "8", "--output-file", str(out), "--output-details", "--seed", "1",
    ]  # fmt: skip
    process = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=os.environ)
    assert out.exists(), process.stdout[-1000:] + process.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


async def slow_request(url: str, path: str, body: dict[str, Any], engine: str, folder: Path) -> Any:
    """The answer to a request under which the same weights were loaded again."""
    async with make_session() as session:
        direct = EngineClient(engine, session)
        await direct.slow_down(SLOW)
        try:
            task = asyncio.create_task(ask(session, url, path, body))
            await asyncio.sleep(SLOW * 25)
            assert not task.done()
            async with session.post(
                f"{url}/update_weights_from_disk", json={"model_path": str(folder)}
            ) as answer:
                assert answer.status == 200, await answer.text()
            await direct.slow_down(None)
            return await task
        finally:
            await direct.slow_down(None)


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Any:
    async with session.post(url + path, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if not body.get("stream"):
        return json.loads(text)
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return [json.loads(e[6:]) for e in text.split("\n\n")[:-2]]


async def once(url: str, path: str, body: dict[str, Any]) -> Any:
    async with make_session() as session:
        return await ask(session, url, path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_generate_request_resumes_from_its_tokens(
    stream: bool, aborting_router: str, engine: str, tiny_moe: Path
) -> None:
    """Aborted in the middle, it equals the unbroken one: ids, text, log-probs, routes."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": LONG,
        "return_logprob": True,
        "return_routed_experts": True,
    }
    body["stream"] = stream
    asyncio.run(once(aborting_router, "/update_weights_from_disk", {"model_path": str(tiny_moe)}))
    reference = asyncio.run(once(aborting_router, "/generate", body))
    broken = asyncio.run(slow_request(aborting_router, "/generate", body, engine, tiny_moe))
    chunks_of_both = [x if stream else [x] for x in (reference, broken)]
    for field in ("output_ids", "text"):
        a, b = ([y for c in chunks for y in c[field]] for chunks in chunks_of_both)
        assert a == b and len(a) >= 60
    a, b = ([e[0] for c in x for e in c["meta_info"]["output_token_logprobs"]] for x in chunks_of_both)
    assert worst_gap(a, b) <= 1e-5
    last_a, last_b = (chunks[-1]["meta_info"] for chunks in chunks_of_both)
    assert last_a["routed_experts"] == last_b["routed_experts"]
    for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert last_a[name] == last_b[name]
    assert [len(m["weight_versions"]) for m in (last_a, last_b)] == [1, 2]


@pytest.mark.parametrize("how", ["retract", "abort"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_survives_a_weight_update(
    how: str, stream: bool, engine: str, tiny_moe: Path, tmp_path: Path
) -> None:
    body = {
        "model": "any",
        "messages": QUESTION,
        "seed": 11,
        "max_tokens": 60,
        "temperature": 1.0,
        "stream": stream,
        "ignore_eos": True,
    }
    with running_router(tmp_path, "--engine", engine, "--interruption", how) as url:
        asyncio.run(once(url, "/update_weights_from_disk", {"model_path": str(tiny_moe)}))
        reference = asyncio.run(once(url, "/v1/chat/completions", body))
        broken = asyncio.run(slow_request(url, "/v1/chat/completions", body, engine, tiny_moe))
    assert said(broken) == said(reference) and len(said(reference)) > 30


def said(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer["choices"][0]["message"]["content"])
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in answer if c["choices"])


@pytest.fixture(scope="module")
def second_engine(engine_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(engine_config, tmp_path_factory.mktemp("second")) as url:
        yield url


@pytest.mark.slow
def test_requests_in_a_stopped_engine_are_answered_by_another(
    engine: str, second_engine: str, tiny_moe: Path, tmp_path: Path
) -> None:
    """SIGSTOP: its sockets stay open without an answer. Each response continues on the other engine."""

    def body(i: int) -> dict[str, Any]:
        sampling = {**LONG, "sampling_seed": i, "ignore_eos": True}
        return {"input_ids": PROMPT, "sampling_params": sampling, "session_id": str(i), "stream": True}

    async def all_of_them(url: str) -> list[list[int]]:
        answers = await asyncio.gather(*(once(url, "/generate", body(i)) for i in range(6)))
        return [[i for chunk in chunks for i in chunk["output_ids"]] for chunks in answers]

    async def stopped(url: str) -> list[list[int]]:
        async with make_session() as session:
            clients = [EngineClient(e, session) for e in (engine, second_engine)]
            processes = tree_of(second_engine)
            for client in clients:
                await client.slow_down(SLOW)
            try:
                task = asyncio.create_task(all_of_them(url))
                await asyncio.sleep(SLOW * 30)
                assert not task.done()
                for process in processes:
                    process.suspend()
                await clients[0].slow_down(None)
                return await task
            finally:
                for process in processes:
                    process.resume()
                for client in clients:
                    await client.slow_down(None)

    with running_router(tmp_path, "--engine", engine, "--engine", second_engine) as url:
        asyncio.run(once(url, "/update_weights_from_disk", {"model_path": str(tiny_moe)}))
        reference = asyncio.run(all_of_them(url))
        assert asyncio.run(stopped(url)) == reference
        assert [len(ids) for ids in reference] == [80] * 6
    log = next(tmp_path.glob("router-*.log")).read_text()
    assert f"{second_engine}: has not answered 5 probes" in log


def tree_of(url: str) -> list[psutil.Process]:
    """The server's processes, without its keeper."""
    words = ["--port", url.rpartition(":")[2]]
    [server] = [
        p
        for p in psutil.process_iter(["cmdline"])
        if set(words) <= set(c := p.info["cmdline"] or []) and "launch.keeper" not in c
    ]
    return [server, *server.children(recursive=True)]


async def test_interrupted_five_times_and_moved_equals_unbroken(
    engine_config: Config, engine: str, second_engine: str, engine_run: Path
) -> None:
    """At random places. Token for token, log-prob for log-prob, route for route."""
    drawn = sorted(random.Random(5).sample(range(3, 52), 5))
    thresholds = [
        threshold + 8 * n for n, threshold in enumerate(drawn)
    ]  # so far apart that each segment has tokens
    async with make_session() as session:
        a, b = EngineClient(engine, session), EngineClient(second_engine, session)
        s = Stack(engine_config, a)
        await s.push(0)
        unbroken = await s.generate(sample(1, seed=11), tokens=100)
        two_engine_stack = Stack(engine_config, a)
        two_engine_stack.router.add_engine(b)
        await two_engine_stack.push(0)
        broken = sample(2, seed=11)
        for c in (a, b):
            await c.slow_down(SLOW)
        task = asyncio.create_task(two_engine_stack.generate(broken, tokens=100))
        homes = []
        for n, at_least in enumerate(thresholds):
            await wait_until(lambda n=at_least: len(broken.response_ids) >= n, task)  # type: ignore[misc]
            await two_engine_stack.router.interrupt()
            homes.append(broken.engine)
            if n == 2:
                assert broken.engine is not None
                two_engine_stack.router.remove_engine(broken.engine)
            two_engine_stack.router.resume()
        for c in (a, b):
            await c.slow_down(None)
        await task
        assert homes[:3] == [homes[0]] * 3 and homes[3] == homes[4] != homes[0]
        assert broken.response_ids == unbroken.response_ids and len(broken.response_ids) == 100
        assert EOS not in broken.response_ids and broken.resumes == 5
        assert worst_gap(broken.mu, unbroken.mu) <= 1e-5
        assert routes(broken, engine_run) == routes(unbroken, engine_run)
        await two_engine_stack.router.interrupt()
        assert two_engine_stack.router.stats()["lost"] == 0
