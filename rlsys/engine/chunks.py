"""What SGLang's /generate says, in our words: new tokens, the versions that made them, routed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pybase64

from rlsys import support
from rlsys.route_records import read_pointer
from rlsys.types import RouteSpan, Segment, VersionSpan

VersionOf = Callable[[str], int]
"""The version that a label stands for."""


class Refused(Exception):
    """A chunk that tells of an error. `status`: as HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read_chunk(
    chunk: dict[str, Any], received: int, version_of: VersionOf, truncated: bool = False
) -> Segment:
    """One chunk of a stream of which `received` tokens have come before. `truncated`: the engine says which ids
    sampling kept, and `mu` is the log-prob among these.

    Raises Refused for an error that the engine tells; for what is no chunk of SGLang's one of ValueError, TypeError,
    KeyError, IndexError and AttributeError.
    """
    if "meta_info" not in chunk:
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        raise Refused(f"{error}", code if isinstance(code, int) else 400)
    meta = chunk["meta_info"]
    reason = meta.get("finish_reason")
    if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
        code = int(reason["status_code"])
        raise Refused(f"{code} {reason.get('message')}", code)
    ids = chunk["output_ids"]
    if truncated:
        mu, kept = (
            meta.get("output_token_sampling_logprobs") or [],
            meta.get("output_token_sampling_mask") or [],
        )
    else:
        mu, kept = [entry[0] for entry in meta.get("output_token_logprobs") or []], []
    prompt_tokens = meta.get("prompt_tokens", 0)
    if not prompt_tokens:
        # Aborted in the queue, where a request that has run before may wait for memory: this closing chunk then
        # repeats its last token and all its log-probs. The count of all its tokens tells how many are new.
        new = meta["completion_tokens"] - received
        ids, mu, kept = ids[:new], mu[:new], kept[:new]
    if len(ids) != len(mu) or {*map(type, ids)} - {int} or {*map(type, mu)} - {int, float}:
        raise ValueError(f"ids {ids[:8]}, log-probs {mu[:8]}")
    return Segment(
        ids=ids,
        mu=mu,
        spans=[VersionSpan(version_of(meta["weight_version"]), 0, len(ids))],
        finish=reason["type"] if reason else None,
        cached_tokens=meta.get("cached_tokens", 0),
        prompt_tokens=prompt_tokens,
        call_spans=_call_spans(meta, received + len(ids), version_of) if reason else None,
        support=support.encode(kept, ids) if truncated else None,
    )


def _call_spans(meta: dict[str, Any], tokens: int, version_of: VersionOf) -> list[VersionSpan] | None:
    """Of all `tokens` of a request that ended, when more than one version made them."""
    spans = meta.get("weight_versions") or []
    if len(spans) < 2 or not tokens:
        return None
    return [
        VersionSpan(version_of(s["version"]), s["start"], min(s["end"], tokens))
        for s in spans
        if s["start"] < tokens
    ]


def read_routes(meta: dict[str, Any], prompt: int, received: int, first: int) -> RouteSpan | None:
    """Of a request's whole sequence from position `first` on; None where the engine has none.

    When the weights changed under the request, only positions that the new ones predicted from: the old ones' routes
    are gone, since the prefix was read again.
    """
    encoded = meta.get("routed_experts")
    end = prompt + received - 1
    rows = end - first
    if encoded is None or rows <= 0:
        return None
    data = pybase64.b64decode(encoded)
    versions = meta.get("weight_versions") or []
    seam = prompt + versions[-1]["start"] - 1 if len(versions) > 1 else first
    if (place := read_pointer(data, first, rows)) is not None:
        return RouteSpan(seam, end, b"", place)
    experts = np.frombuffer(data, dtype="<i4").reshape(rows, -1)[seam - first :]
    return RouteSpan(seam, end, experts.astype("u1" if experts.max() < 256 else "<u2").tobytes())
