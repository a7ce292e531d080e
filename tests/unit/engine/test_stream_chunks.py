"""Chunks of /generate streams with and without --incremental-streaming-output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlsys.engine.chunks import decode_chunk, read_chunk

IDS, LOGPROBS = [5, 6, 7, 8], [-0.5, -0.25, -1.0, -2.0]


def chunk(ids: list[int], logprobs: list[float], tokens: int, **more: Any) -> bytes:
    entries = [[value, 0, None] for value in logprobs]
    tops = [[[value, 1, None]] for value in logprobs]
    meta = {
        "weight_version": "1", "prompt_tokens": 3, "completion_tokens": tokens, "output_token_logprobs": entries,
        "output_top_logprobs": tops, **more,
    }  # fmt: skip
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


STREAMS = {
    "incremental": [chunk(IDS[:2], LOGPROBS[:2], 2), chunk(IDS[2:], LOGPROBS[2:], 4), chunk([], [], 4)],
    "cumulative": [chunk(IDS[:2], LOGPROBS[:2], 2), chunk(IDS, LOGPROBS, 4), chunk(IDS, LOGPROBS, 4)],
    "ahead of its log-probs": [
        chunk(IDS[:3], LOGPROBS[:2], 2), chunk(IDS, LOGPROBS[:3], 3), chunk(IDS, LOGPROBS, 4)
    ],
    "aborted in the queue": [
        chunk(IDS, LOGPROBS, 4),
        chunk(IDS[-1:], LOGPROBS, 4, prompt_tokens=0, finish_reason={"type": "abort"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", list(STREAMS))
def test_each_token_of_a_stream_is_read_once(kind: str) -> None:
    ids: list[int] = []
    mu: list[float] = []
    tops: list[Any] = []
    for event in STREAMS[kind]:
        segment = read_chunk(decode_chunk(event), len(ids), int)
        ids += segment.ids
        mu += segment.mu
        tops += segment.tops or []
    assert (ids, mu) == (IDS, LOGPROBS)
    assert tops == [[(value, 1)] for value in LOGPROBS]
