"""What SGLang's /generate says, in our words: new tokens, the versions that made them, routed experts."""

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
"""By how much a rounding may put a log-prob above 0: those among kept ids are quotients of sums."""

VersionOf = Callable[[str], int]
"""The version that a label stands for."""


class LogProb(msgspec.Struct, array_like=True, gc=False):
    """The first of an entry's values; its id is in `output_ids`, and its text is nobody's."""

    value: float


class Made(msgspec.Struct):
    """Tokens [start, end) of a request, by one version of the weights."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    type: str
    status_code: int | None = None
    message: str | None = None


class Meta(msgspec.Struct):
    """What we read of a chunk's `meta_info`."""

    weight_version: str | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_token_logprobs: list[LogProb] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    weight_versions: list[Made] | None = None
    routed_experts: str | None = None
    spec_verify_ct: int = 0


class Chunk(msgspec.Struct):
    """One event of a stream. Types are checked while it is decoded: nothing is made of what nobody reads."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: Any = None


class Refused(Exception):
    """A chunk that tells of an error. `status`: as HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


_CHUNK = msgspec.json.Decoder(Chunk)


def decode_chunk(event: bytes | memoryview) -> Chunk:
    """Raises ValueError for what is no chunk of SGLang's."""
    return _CHUNK.decode(event)


def read_chunk(chunk: Chunk, received: int, version_of: VersionOf, truncated: bool = False) -> Segment:
    """One chunk of a stream of which `received` tokens have come before. `truncated`: the engine says which ids
    sampling kept, and `mu` is the log-prob among these.

    Raises Refused for an error that the engine tells, ValueError for what is no chunk of SGLang's, and for numbers
    that are no log-probs. The caller knows the vocabulary, and checks ids.
    """
    meta = chunk.meta_info
    if meta is None:
        error = chunk.error
        if error is None:
            raise ValueError("neither meta_info nor an error")
        code = error.get("code") if isinstance(error, dict) else None
        raise Refused(f"{error}", code if isinstance(code, int) else 400)
    reason = meta.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code:
        raise Refused(f"{reason.status_code} {reason.message}", reason.status_code)
    ids = chunk.output_ids
    if truncated:
        mu, kept = meta.output_token_sampling_logprobs or [], meta.output_token_sampling_mask or []
    else:
        mu, kept = [entry.value for entry in meta.output_token_logprobs or []], []
    if meta.completion_tokens and len(ids) > meta.completion_tokens - received >= 0:
        # A server without --incremental-streaming-output repeats all tokens so far, and may add later ones, whose
        # log-probs are in its next chunk.
        unread = slice(received, meta.completion_tokens)
        ids, mu = ids[unread], mu[unread]
        kept[:] = kept[unread]
        if meta.output_top_logprobs is not None:
            meta.output_top_logprobs = meta.output_top_logprobs[unread]
    if not meta.prompt_tokens:
        # Aborted in the queue, where a request that has run before may wait for memory: this closing chunk then
        # repeats its last token and all its log-probs. The count of all its tokens tells how many are new.
        new = meta.completion_tokens - received
        ids, mu, kept = ids[:new], mu[:new], kept[:new]
    tops = None
    if meta.output_top_logprobs is not None:
        tops = [_alternatives(place) for place in meta.output_top_logprobs[: len(ids)]]
    if len(ids) != len(mu) or meta.weight_version is None or (tops is not None and len(tops) != len(ids)):
        raise ValueError(f"{len(ids)} ids, {len(mu)} log-probs, weight version {meta.weight_version}")
    mu, rounded = check_log_probs(mu)
    rows = [row for row in chain(kept, ([i for _, i in place] for place in tops or ())) if row]
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
        support=support.encode(kept, ids) if truncated else None,
        tops=tops,
        checks=meta.spec_verify_ct if reason else 0,
        checked=meta.completion_tokens if reason and meta.spec_verify_ct else 0,
    )


def check_log_probs(values: Iterable[float]) -> tuple[list[float], int]:
    """The values, those that a rounding has put above 0 as 0, and how many these are. Raises ValueError for one that
    is no log-prob."""
    found, rounded = list(values), 0
    for i, value in enumerate(found):
        if not -math.inf < value <= ROUNDING:
            raise ValueError(f"log-prob {value!r}, expected a finite one of at most 0")
        if value > 0:
            found[i] = 0.0
            rounded += 1
    return found, rounded


def _alternatives(place: list[tuple[float | None, int, Any]]) -> list[tuple[float, int]]:
    """Without those of log-prob null, which is -inf: sampling cannot draw them."""
    found = [(value, i) for value, i, _ in place if value is not None]
    values, _ = check_log_probs(value for value, _ in found)
    return [(value, i) for value, (_, i) in zip(values, found, strict=True)]


def _call_spans(meta: Meta, tokens: int, version_of: VersionOf) -> list[VersionSpan] | None:
    """Of all `tokens` of a request that ended, when more than one version made them. Raises ValueError unless they
    tile the tokens."""
    spans = meta.weight_versions or []
    if len(spans) < 2 or not tokens:
        return None
    ends = [0, *(s.end for s in spans)]
    if (
        any(s.start != before or s.end < s.start for s, before in zip(spans, ends, strict=False))
        or ends[-1] < tokens
    ):
        raise ValueError(f"versions of weights that do not tile {tokens} tokens: {spans}"[:300])
    return [
        VersionSpan(version_of(s.version), s.start, min(s.end, tokens)) for s in spans if s.start < tokens
    ]


def read_routes(meta: Meta, prompt: int, received: int, first: int) -> RouteSpan | None:
    """Of a request's whole sequence from position `first` on; None where the engine has none.

    When the weights changed under the request, only positions that the new ones predicted from: the old ones' routes
    are gone, since the prefix was read again. Raises ValueError when they changed outside of these positions.
    """
    end = prompt + received - 1
    rows = end - first
    if meta.routed_experts is None or rows <= 0:
        return None
    data = pybase64.b64decode(meta.routed_experts)
    versions = meta.weight_versions or []
    seam = prompt + versions[-1].start - 1 if len(versions) > 1 else first
    if not first <= seam <= end:
        raise ValueError(f"new weights from position {seam} on, and routes of [{first}, {end})")
    if seam == end:  # they changed behind the last token
        return None
    if (place := read_pointer(data, first, rows)) is not None:
        return RouteSpan(seam, end, b"", place)
    experts = np.frombuffer(data, dtype="<i4").reshape(rows, -1)[seam - first :]
    return RouteSpan(seam, end, experts.astype("u1" if experts.max() < 256 else "<u2").tobytes())
