"""An engine that answers otherwise than SGLang does: its fault, its back-off; no token is lost and no run ends."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tests.helpers.router_rig import A, B, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine


def without_meta(chunk: dict[str, Any]) -> bytes:
    return json.dumps({"output_ids": chunk["output_ids"]}).encode()


def fewer_logprobs(chunk: dict[str, Any]) -> bytes:
    chunk["meta_info"]["output_token_logprobs"].pop()
    return json.dumps(chunk).encode()


def words_for_ids(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk | {"output_ids": ["a" for _ in chunk["output_ids"]]}).encode()


def null_logprobs(chunk: dict[str, Any]) -> bytes:
    entries = [[None, *entry[1:]] for entry in chunk["meta_info"]["output_token_logprobs"]]
    chunk["meta_info"]["output_token_logprobs"] = entries
    return json.dumps(chunk).encode()


def a_list(chunk: dict[str, Any]) -> bytes:
    return b"{}"


def cut_short(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk).encode()[:40]


def no_version(chunk: dict[str, Any]) -> bytes:
    chunk["meta_info"]["weight_version"] = None
    return json.dumps(chunk).encode()


def outside_the_vocabulary(chunk: dict[str, Any]) -> bytes:
    return json.dumps(chunk | {"output_ids": [128 for _ in chunk["output_ids"]]}).encode()


def more_than_asked(chunk: dict[str, Any]) -> bytes:
    chunk["meta_info"]["output_token_logprobs"] *= 100
    return json.dumps(chunk | {"output_ids": chunk["output_ids"] * 100}).encode()


class Babbler(ScriptedEngine):
    """Garbles the second chunk of its first response, once."""

    def __init__(self, url: str, garbled: Callable[[dict[str, Any]], bytes]) -> None:
        super().__init__(url)
        self._garbled: Callable[[dict[str, Any]], bytes] | None = garbled

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        number = 0
        async for line in super().stream(body):
            number += 1
            if number == 2 and self._garbled is not None:
                line, self._garbled = b"data: " + self._garbled(json.loads(line[6:])) + b"\n", None
            yield line


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    "garbled",
    [
        without_meta,
        fewer_logprobs,
        words_for_ids,
        null_logprobs,
        a_list,
        cut_short,
        no_version,
        outside_the_vocabulary,
        more_than_asked,
    ],
)
async def test_a_garbled_chunk_costs_a_back_off_and_no_token(garbled: Callable[..., bytes]) -> None:
    """Before: the exception ended the sample's task, and with it the run."""
    async with routing(Babbler(A, garbled), ScriptedEngine(B)) as stage:
        await stage.push()
        finished_sample = await stage.start(sample())
        check(finished_sample, versions={1})
        assert (await stage.settle())["lost"] == 0


@pytest.mark.virtual_clock
async def test_a_counter_that_is_no_number_is_a_dead_engine() -> None:
    """Before: the interrupt raised ValueError, and the trainer got a bare 500."""
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as stage:
        await stage.push()
        stage.engines[0]._metrics = lambda _: (200, "sglang:generation_tokens_total many\n")  # type: ignore[method-assign]
        assert (await stage.settle())["engines_serving"] == 1
