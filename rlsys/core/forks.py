"""Forks of responses: a sample that starts with another sample's tokens, and one that is cut back.

A fork starts with the first tokens of another sample of the same prompt, with their log-probs, weight
versions and supports. They count as its own tokens and are trained in it. It may continue with a token that
the sampler did not draw (`Forced`), then with what engines generate for it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlsys.core.spans import Fork, RouteSpan, VersionSpan, truncate_spans
from rlsys.core.types import Sample


class Forced(NamedTuple):
    """A token that replaces the sampled one, with its log-prob under the same weights."""

    token: int
    mu: float


def fork(
    source: Sample, at: int, into: Sample, forced: Forced | None = None, inserted: Sequence[int] = ()
) -> None:
    """Start `into` with the first `at` response tokens of `source`.

    Routes that an engine wrote to a file of its own are not copied: these tokens are trained without routing
    replay.

    Args:
        source: the sample to fork from.
        at: the number of tokens to copy.
        into: a sample of the same group without tokens.
        forced: a token to append, in place of the sampled one.
        inserted: ids to append that are never trained, with the weight version of the token in their
            position.

    Raises:
        ValueError: the samples have different prompts or groups, or `at` is out of range.
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
    into.spans, into.observed = truncate_spans(source.spans, at), truncate_spans(source.observed, at)
    into.behaviour = source.behaviour[:at]
    into.support = source.support[: _rows_end(source.support, at)] if source.support else bytearray()
    if at or forced is not None:
        positions = len(source.prompt_ids) + at - (forced is None)
        into.routes = [r for r in _routes_before(source.routes, positions) if r.location is None]
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
    into.fork, into.inherited_tokens, into.engine = Fork(source.index, at), into.sampled_tokens, source.engine


def truncate_sample(sample: Sample, at: int) -> None:
    """Drop the response tokens from `at` on; count those that engines generated for this sample in `discarded`."""
    received_before = sample.received_tokens
    del sample.response_ids[at:], sample.mu[at:], sample.behaviour[at:]
    sample.spans, sample.observed = truncate_spans(sample.spans, at), truncate_spans(sample.observed, at)
    if sample.support:
        del sample.support[_rows_end(sample.support, at) :]
    sample.routes = _routes_before(sample.routes, len(sample.prompt_ids) + at - 1) if at else []
    sample.teacher_logprobs, sample.taught = b"", False
    sample.mu_sum = sum(sample.mu)
    sample.inherited_tokens = min(sample.inherited_tokens, sample.sampled_tokens)
    sample.discarded += received_before - sample.received_tokens
    if sample.fork is not None and at <= sample.fork.at:
        sample.fork = sample.fork._replace(at=at) if at else None


def _rows_end(support: bytearray, rows: int) -> int:
    """Return the offset behind the first `rows` rows (rlsys/segments/support.py)."""
    end = 0
    for _ in range(rows):
        end = support.index(0, end) + 1
    return end


def _routes_before(routes: list[RouteSpan], position: int) -> list[RouteSpan]:
    """Return the routes up to a position. A span in a file cannot be cut, and is dropped whole."""
    spans = []
    for span in routes:
        if span.end <= position:
            spans.append(span)
        elif span.start < position and span.location is None:
            width = len(span.experts) // (span.end - span.start)
            spans.append(RouteSpan(span.start, position, span.experts[: width * (position - span.start)]))
    return spans
