"""Decoding of the chunks that SGLang's /generate streams: new tokens, their weight versions, routed experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pybase64

from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import Segment
from rlsys.segments import support
from rlsys.segments.route_records import read_pointer

ROUNDING = 1e-4
"""Positive log-probs up to this value are rounding errors of the quotients of sums under a sampling mask."""

VersionOf = Callable[[str], int]
"""Weight label -> version."""


class LogProb(msgspec.Struct, array_like=True, gc=False):
    """The first element of SGLang's (log-prob, id, text) of a token. `output_ids` has the id; the text is unused."""

    value: float


class WeightSpan(msgspec.Struct):
    """Tokens [start, end) of a request, sampled with one version of the weights."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    """SGLang's `finish_reason` of a request."""

    type: str
    status_code: int | None = None
    message: str | None = None


class Meta(msgspec.Struct):
    """The fields of a chunk's `meta_info` that this module reads."""

    weight_version: str | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_token_logprobs: list[LogProb] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None
    spec_verify_ct: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream. Decoding checks the types and builds no objects for unused fields."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: Any = None


class RequestRefused(Exception):
    """Raised when an engine reports an error in a chunk. `status`: an HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


_CHUNK = msgspec.json.Decoder(Chunk)


def decode_chunk(event: bytes | memoryview) -> Chunk:
    """Decode the JSON of an event.

    Raises:
        ValueError: The event is no chunk of SGLang.
    """
    return _CHUNK.decode(event)


def read_chunk(chunk: Chunk, received: int, version_of: VersionOf, truncated: bool = False) -> Segment:
    """Convert a chunk to a segment of new tokens. The caller checks the ids against the vocabulary.

    Args:
        chunk: A decoded event.
        received: Number of tokens that earlier chunks of the stream contained.
        version_of: Maps a weight label to a version.
        truncated: Whether the engine returns a sampling mask, so that `mu` is the log-prob under this mask.

    Raises:
        RequestRefused: The engine reports an error.
        ValueError: The chunk lacks values that SGLang always sends, or a value is not a log-prob.
    """
    meta = _meta_of(chunk)
    reason = meta.finish_reason
    ids, mu, masks, tops = _new_tokens(chunk.output_ids, meta, received, truncated)
    if len(ids) != len(mu) or meta.weight_version is None or (tops is not None and len(tops) != len(ids)):
        raise ValueError(
            f"a chunk with {len(ids)} ids, {len(mu)} log-probs and weight version {meta.weight_version}; expected "
            "equal numbers, and a version"
        )
    mu, rounded = check_log_probs(mu)
    rows = [row for row in chain(masks, ([i for _, i in top] for top in tops or ())) if row]
    return Segment(
        ids=ids,
        mu=mu,
        id_range=(min(map(min, rows)), max(map(max, rows))) if rows else None,
        rounded=rounded,
        spans=[VersionSpan(version_of(meta.weight_version), 0, len(ids))],
        finish=reason.type if reason else None,
        cached_tokens=meta.cached_tokens,
        prompt_tokens=meta.prompt_tokens,
        call_spans=_call_spans(meta, received + len(ids), version_of) if reason else None,
        support=support.encode(masks, ids) if truncated else None,
        tops=tops,
        checks=meta.spec_verify_ct if reason else 0,
        checked=meta.completion_tokens if reason and meta.spec_verify_ct else 0,
    )


def _meta_of(chunk: Chunk) -> Meta:
    """Return the chunk's `meta_info`.

    Raises:
        RequestRefused: The engine reports an error.
        ValueError: The chunk has neither `meta_info` nor an error.
    """
    meta, error = chunk.meta_info, chunk.error
    if meta is None and error is None:
        raise ValueError("the chunk has no meta_info and no error; expected one of them")
    if meta is None:
        code = error.get("code") if isinstance(error, dict) else None
        raise RequestRefused(f"{error}", code if isinstance(code, int) else 400)
    reason = meta.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code:
        raise RequestRefused(f"HTTP {reason.status_code}: {reason.message}", reason.status_code)
    return meta


def _new_tokens(
    ids: list[int], meta: Meta, received: int, truncated: bool
) -> tuple[list[int], list[float], list[list[int]], list[list[tuple[float, int]]] | None]:
    """Return ids, log-probs, sampling masks and most probable ids of the tokens that are new in this chunk."""
    mu: list[float]
    masks: list[list[int]]
    if truncated:
        mu, masks = meta.output_token_sampling_logprobs or [], meta.output_token_sampling_mask or []
    else:
        mu, masks = [entry.value for entry in meta.output_token_logprobs or []], []
    top_entries = meta.output_top_logprobs
    if meta.completion_tokens and len(ids) > meta.completion_tokens - received >= 0:
        # Without --incremental-streaming-output a server repeats all earlier tokens, and may append tokens whose
        # log-probs are in the next chunk.
        new = slice(received, meta.completion_tokens)
        ids, mu, masks = ids[new], mu[new], masks[new]
        top_entries = None if top_entries is None else top_entries[new]
    if not meta.prompt_tokens:
        # The request was aborted in the queue, where a retracted request waits for memory. Its last chunk then
        # repeats the last token and all log-probs; `completion_tokens` determines how many tokens are new.
        count = meta.completion_tokens - received
        ids, mu, masks = ids[:count], mu[:count], masks[:count]
    tops = None if top_entries is None else [_alternatives(entries) for entries in top_entries[: len(ids)]]
    return ids, mu, masks, tops


def check_log_probs(values: Iterable[float]) -> tuple[list[float], int]:
    """Check log-probs, and set those in (0, ROUNDING] to 0.

    Returns:
        The log-probs, and the number of those that were set to 0.

    Raises:
        ValueError: A value is not a log-prob.
    """
    log_probs, rounded = list(values), 0
    for i, value in enumerate(log_probs):
        if not -math.inf < value <= ROUNDING:
            raise ValueError(f"log-prob {value!r}; expected a finite value of at most 0")
        if value > 0:
            log_probs[i] = 0.0
            rounded += 1
    return log_probs, rounded


def _alternatives(entries: list[tuple[float | None, int, Any]]) -> list[tuple[float, int]]:
    """Return (log-prob, id) of the entries, without those whose log-prob is null, which means -inf."""
    pairs = [(value, i) for value, i, _ in entries if value is not None]
    values, _ = check_log_probs(value for value, _ in pairs)
    return [(value, i) for value, (_, i) in zip(values, pairs, strict=True)]


def _call_spans(meta: Meta, tokens: int, version_of: VersionOf) -> list[VersionSpan] | None:
    """Return the version spans of a finished request.

    Args:
        tokens: Number of generated tokens.

    Returns:
        None if all tokens have one version.

    Raises:
        ValueError: The spans do not cover the tokens without gaps.
    """
    spans = meta.weight_versions or []
    if len(spans) < 2 or not tokens:
        return None
    ends = [0, *(s.end for s in spans)]
    if (
        any(s.start != start or s.end < s.start for s, start in zip(spans, ends, strict=False))
        or ends[-1] < tokens
    ):
        raise ValueError(f"weight versions do not cover {tokens} tokens without gaps: {spans}"[:300])
    return [
        VersionSpan(version_of(s.version), s.start, min(s.end, tokens)) for s in spans if s.start < tokens
    ]


def read_routes(meta: Meta, prompt: int, received: int, first: int) -> RouteSpan | None:
    """Return the routed experts of a request's sequence from position `first` on.

    If the weights changed during the request, the result starts at the first position of the newest weights, because
    the prefill of the prefix replaced the earlier experts.

    Args:
        meta: `meta_info` of the last chunk.
        prompt: Number of prompt tokens.
        received: Number of tokens that the request has generated.
        first: First position whose experts were requested.

    Returns:
        None if the engine returned no experts, or the weights changed after the last token.

    Raises:
        ValueError: The weights changed outside of the requested positions.
    """
    end = prompt + received - 1
    rows = end - first
    if meta.routed_experts is None or rows <= 0:
        return None
    data = pybase64.b64decode(meta.routed_experts)
    versions = meta.weight_versions or []
    start = prompt + versions[-1].start - 1 if len(versions) > 1 else first
    if not first <= start <= end:
        raise ValueError(
            f"the weights changed at position {start}; expected a position in [{first}, {end}], because the experts "
            "of these positions were requested"
        )
    if start == end:  # the weights changed after the last token
        return None
    if (pointer := read_pointer(data, first, rows)) is not None:
        return RouteSpan(start, end, b"", pointer)
    experts = np.frombuffer(data, dtype="<i4").reshape(rows, -1)[start - first :]
    return RouteSpan(start, end, experts.astype("u1" if experts.max() < 256 else "<u2").tobytes())
