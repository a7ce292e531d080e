"""Trees of responses: a sample that begins with another one's tokens, and one that loses its last ones.

A fork has the first tokens of another sample of the same prompt, with their log-probs, versions and supports: they
are its own tokens as if it had been sampled so far by itself, and are trained in it. It may go on with a token that
the sampler did not draw (`Forced`), and then with what engines make for it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlsys.core.spans import Fork, RouteSpan, VersionSpan, before
from rlsys.core.types import Sample


class Forced(NamedTuple):
    """A token in the place of the one that was drawn, with its log-prob under the same weights."""

    token: int
    mu: float


def fork(
    source: Sample, at: int, into: Sample, forced: Forced | None = None, inserted: Sequence[int] = ()
) -> None:
    """`into`, which has no token yet, begins with the first `at` response tokens of `source`, and `forced` behind
    them; or behind them ids are `inserted` that are never trained, of the version of the token in their place.

    Routes that an engine has put into a file of its own stay the source's: these tokens train without replay here.
    Raises ValueError for samples of different prompts or groups, or a place that is not there.
    """
    if into.tokens or into.sample_id == source.sample_id or into.group_id != source.group_id:
        raise ValueError(f"sample {into.sample_id} cannot begin as sample {source.sample_id}")
    if into.prompt_ids != source.prompt_ids or into.trained_prompt != source.trained_prompt:
        raise ValueError(f"samples {into.sample_id} and {source.sample_id} have different prompts")
    if not 0 <= at <= len(source.response_ids) - (forced is not None):
        raise ValueError(f"sample {source.sample_id} has no token {at} to fork at")
    if forced is not None and source.support:
        raise ValueError(
            f"sample {source.sample_id}: tokens were drawn from a part of the ids, and none can be forced"
        )
    into.response_ids.extend(source.response_ids[:at])
    into.mu.extend(source.mu[:at])
    into.spans, into.observed = before(source.spans, at), before(source.observed, at)
    into.behaviour = source.behaviour[:at]
    into.support = source.support[: _rows_end(source.support, at)] if source.support else bytearray()
    if at or forced is not None:
        positions = len(source.prompt_ids) + at - (forced is None)
        into.routes = [r for r in _routes_before(source.routes, positions) if r.place is None]
    if forced is not None:
        into.response_ids.append(forced.token)
        into.mu.append(forced.mu)
        version = next(s.version for s in source.spans if s.end > at)
        if into.spans and into.spans[-1].version == version:
            into.spans[-1].end = at + 1
        else:
            into.spans.append(VersionSpan(version, at, at + 1))
    if inserted:
        version = next(s.version for s in source.spans if s.end >= max(at, 1))
        into.spans = into.spans or [VersionSpan(version, 0, 0)]
        into.observe(inserted)
    into.mu_sum = sum(into.mu)
    into.fork, into.given, into.engine = Fork(source.index, at), into.sampled_tokens, source.engine


def cut(sample: Sample, at: int) -> None:
    """Drop the response tokens from `at` on; those that were made for it are counted in `discarded`."""
    received = sample.received_tokens
    del sample.response_ids[at:], sample.mu[at:], sample.behaviour[at:]
    sample.spans, sample.observed = before(sample.spans, at), before(sample.observed, at)
    if sample.support:
        del sample.support[_rows_end(sample.support, at) :]
    sample.routes = _routes_before(sample.routes, len(sample.prompt_ids) + at - 1) if at else []
    sample.teacher_logprobs, sample.taught = b"", False
    sample.mu_sum = sum(sample.mu)
    sample.given = min(sample.given, sample.sampled_tokens)
    sample.discarded += received - sample.received_tokens
    if sample.fork is not None and at <= sample.fork.at:
        sample.fork = sample.fork._replace(at=at) if at else None


def _rows_end(support: bytearray, rows: int) -> int:
    """Where so many rows end (rlsys/segments/support.py)."""
    end = 0
    for _ in range(rows):
        end = support.index(0, end) + 1
    return end


def _routes_before(routes: list[RouteSpan], position: int) -> list[RouteSpan]:
    """Up to a position. A span in a file cannot be cut, and goes."""
    kept = []
    for span in routes:
        if span.end <= position:
            kept.append(span)
        elif span.start < position and span.place is None:
            width = len(span.experts) // (span.end - span.start)
            kept.append(RouteSpan(span.start, position, span.experts[: width * (position - span.start)]))
    return kept
