"""What the front of a stand-alone router refuses: nonsense, too much, strangers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli.main import main
from rlsys.core.errors import UserError
from rlsys.engine.wire import make_session
from rlsys.engine_requests import API_FIELDS
from rlsys.gateway.api_requests import sample_count
from rlsys.gateway.fleet import Fleet
from rlsys.gateway.front import FrontLimits
from rlsys.gateway.serve import RouterOptions, Tokens, is_loopback, read_tokens
from tests.helpers.front_rig import PROMPT, generate, serving


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"input_ids": [1, 100]}', "token id 100 is outside the vocabulary of 100"),
        (b'{"input_ids": [[1], [-1]]}', "token id -1 is outside the vocabulary of 100"),
        (b'{"prompt": [7, 10000000000]}', "token id 10000000000 is outside the vocabulary of 100"),
        (b'{"input_ids": [1.5]}', "input_ids has 1.5; expected whole numbers"),
        (b'{"input_ids": [1, true]}', "input_ids has True; expected whole numbers"),
        (b'{"input_ids": []}', "the prompt is empty"),
        (json.dumps({"input_ids": [5] * 200}).encode(), "the prompt has 200 tokens; expected at most 193"),
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
        (b'{"input_ids": [[1], 2]}', "input_ids has 2 among lists; expected lists of whole numbers"),
        (b'{"input_ids": [[1], null]}', "input_ids has None among lists; expected lists of whole numbers"),
        (b'{"text": ""}', "the prompt is empty"),
        (b'{"text": ["a", ""]}', "the prompt is empty"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"text": "a", "sampling_params": {"stop_regex": "("}}', "stop_regex = '(': not served"),
        (b'{"input_ids": {"a": 1}}', "input_ids = {'a': 1}: expected whole numbers"),
        (b'{"input_ids": "abc"}', "input_ids = 'abc': expected whole numbers"),
        (b'{"text": "a", "sampling_params": {"stop": 5}}', "stop = 5: expected text, or a list of texts"),
        (b'{"prompt": "a", "stop": ["a", null]}', "stop = ['a', None]: expected text, or a list of texts"),
        (b'{"text": "a", "sampling_params": {"stop_regex": [1]}}', "stop_regex = [1]: not served"),
        (b'{"messages": [], "stop_token_ids": 5}', "stop_token_ids = 5: expected whole numbers"),
        (b'{"messages": [], "stop_token_ids": ["a"]}', "stop_token_ids = ['a']: expected whole numbers"),
        (b'{"text": ["a"], "token_ids_logprob": [[400]]}', "token_ids_logprob = [[400]]: not served"),
        (b'{"messages": [], "logit_bias": 5}', "logit_bias = 5: expected an object"),
        (b'{"messages": [], "logit_bias": {"--5": 1}}', "logit_bias: '--5': expected a token id"),
        (b'{"messages": [], "logit_bias": {"' + b"9" * 5000 + b'": 1}}', "expected a token id"),
        (b'{"messages": [], "logit_bias": {"5": "x"}}', "logit_bias of token 5 = 'x': expected a finite"),
        (b'{"text": "a", "top_logprobs_num": 101}', "top_logprobs_num = 101: expected 0 to 100"),
        (b'{"text": ["a"], "top_logprobs_num": [101]}', "top_logprobs_num = 101: expected 0 to 100"),
        (b'{"messages": [], "top_logprobs": -1}', "top_logprobs = -1: expected 0 to 100"),
        (b"[1]", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[" * 100000, "not a JSON object"),
    ],
)  # fmt: skip
async def test_nonsense_never_reaches_an_engine(body: bytes, why: str) -> None:
    async with serving() as rig:
        for path in API_FIELDS:
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
            assert answer.status == 415
            assert "compressed bodies are not supported" in (await answer.json())["error"]["message"]
        address = rig.client.server
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /engines HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("version", [True, -1, 1.0, 2**63, "9" * 19, "9" * 5000, "-1", "\u00b2", [1]])
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
async def test_an_invalid_url_is_not_added_as_an_engine(url: str) -> None:
    """One in the pool would end the watch over all of them."""

    async with serving() as rig:
        status, _ = await rig.post("/engines", {"url": url})
        assert status == 400
        assert [e.url for e in rig.fleet.pool.engines] == rig.urls


async def test_a_duplicate_engine_url_is_rejected() -> None:
    async with make_session() as session:
        with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1 is already in the pool"):
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
        (f"--host {'a' * 70}.x --token-file TOKEN", "expected a host name or address"),
    ],
)
def test_the_command_rejects_invalid_options(
    options: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    argv = ["router", "--port", "0", *options.replace("TOKEN", str(token)).split()]
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rlsys: error: ") and why in error


async def test_the_front_refuses_large_bodies_excess_requests_and_an_empty_pool() -> None:
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
        rig.engines[0].release.set()
        assert [(await t)[0] for t in tasks] == [200, 200]

    async with serving(queue_seconds=0.05) as rig:
        rig.fleet.dispatcher.open = False
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (
            503,
            "no engine could accept the request within 0.05 s",
        )

    async with serving(0) as rig:
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (503, "no engine has responded yet")
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
def test_a_request_counts_as_its_number_of_samples(body: dict[str, Any], samples: int) -> None:
    assert sample_count(body) == samples


async def test_one_request_does_not_get_round_the_limits() -> None:
    async with serving(limits=FrontLimits(concurrency=4, queue=2)) as rig:
        status, answer = await rig.post("/generate", {"input_ids": [[]] * 5})
        assert (status, answer["error"]["message"]) == (413, "5 samples in one request: expected at most 4")
        status, answer = await rig.post("/v1/completions", {"prompt": ["a"] * 4, "n": 2})
        assert (status, answer["error"]["code"]) == (413, 413)
        rig.engines[0].hold_at = 1
        question = [{"role": "user", "content": "a"}]
        bodies: list[dict[str, Any]] = [{"messages": question, "n": n} for n in (3, 2, 1)]
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(rig.post("/v1/chat/completions", body)))
            await asyncio.sleep(0.05)
        assert len(rig.engines[0].requests) == 4, "of six samples four at a time"
        status, answer = await rig.post("/generate", generate())
        assert (status, answer["error"]["message"]) == (
            429,
            "6 samples are in progress, and the request has 1 more: expected at most 6 in total; try again later",
        )
        tasks[1].cancel()
        await rig.until(lambda: len(rig.engines[0].requests) == 5)
        rig.engines[0].release.set()
        assert [(await t)[0] for t in (tasks[0], tasks[2])] == [200, 200]
        assert rig.fleet.pool.in_flight == 0


async def test_requests_require_the_bearer_token() -> None:
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
    assert read_tokens(RouterOptions([], 0)) == Tokens()
    with pytest.raises(
        UserError, match=r"--host 0.0.0.0: other machines can reach this address; expected --token-file"
    ):
        read_tokens(RouterOptions([], 0, host="0.0.0.0"))
    file = tmp_path / "token"
    with pytest.raises(UserError, match="No such file"):
        read_tokens(RouterOptions([], 0, token_file=file))
    file.write_text("short\n")
    with pytest.raises(UserError, match="5 characters; expected at least 16"):
        read_tokens(RouterOptions([], 0, token_file=file))
