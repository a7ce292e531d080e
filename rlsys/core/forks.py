"""Forks of responses: a sample that starts with another sample's tokens, and truncation of a sample.

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
    source: Sample, length: int, target: Sample, forced: Forced | None = None, inserted: Sequence[int] = ()
) -> None:
    """Start `target` with the first `length` response tokens of `source`.

    Routes that an engine wrote to a file of its own are not copied: these tokens are trained without routing
    replay.

    Args:
        source: the sample to fork from.
        length: the number of tokens to copy.
        target: a sample of the same group without tokens.
        forced: a token to append, in place of the sampled one.
        inserted: ids to append that are never trained, with the weight version of the token in their
            position.

    Raises:
        ValueError: the samples have different prompts or groups, or `length` is out of range.
    """
    if target.tokens or target.sample_id == source.sample_id or target.group_id != source.group_id:
        raise ValueError(
            f"sample {target.sample_id} cannot fork from sample {source.sample_id}: expected an empty sample of the "
            "same group"
        )
    if target.prompt_ids != source.prompt_ids or target.trained_prompt != source.trained_prompt:
        raise ValueError(
            f"samples {target.sample_id} and {source.sample_id} have different prompts; a fork needs the same prompt"
        )
    if not 0 <= length <= len(source.response_ids) - (forced is not None):
        raise ValueError(
            f"sample {source.sample_id} has {len(source.response_ids)} response tokens: cannot fork after {length}"
        )
    if forced is not None and source.support:
        raise ValueError(
            f"sample {source.sample_id} has a sampling mask; a forced token needs sampling from the whole vocabulary"
        )
    target.response_ids.extend(source.response_ids[:length])
    target.mu.extend(source.mu[:length])
    target.spans = truncate_spans(source.spans, length)
    target.observed = truncate_spans(source.observed, length)
    target.behaviour = source.behaviour[:length]
    target.support = source.support[: _rows_end(source.support, length)] if source.support else bytearray()
    if length or forced is not None:
        positions = len(source.prompt_ids) + length - (forced is None)
        target.routes = [r for r in _routes_before(source.routes, positions) if r.location is None]
    if forced is not None:
        target.response_ids.append(forced.token)
        target.mu.append(forced.mu)
        version = next(s.version for s in source.spans if s.end > length)
        if target.spans and target.spans[-1].version == version:
            target.spans[-1].end = length + 1
        else:
            target.spans.append(VersionSpan(version, length, length + 1))
    if inserted:
        version = next(s.version for s in source.spans if s.end >= max(length, 1))
        target.spans = target.spans or [VersionSpan(version, 0, 0)]
        target.observe(inserted)
    target.mu_sum = sum(target.mu)
    target.fork = Fork(source.index, length)
    target.inherited_tokens, target.engine = target.sampled_tokens, source.engine


def truncate_sample(sample: Sample, length: int) -> None:
    """Truncate a response to its first `length` tokens.

    `sample.discarded` counts the dropped tokens that engines generated for this sample.
    """
    received_before = sample.received_tokens
    del sample.response_ids[length:], sample.mu[length:], sample.behaviour[length:]
    sample.spans = truncate_spans(sample.spans, length)
    sample.observed = truncate_spans(sample.observed, length)
    if sample.support:
        del sample.support[_rows_end(sample.support, length) :]
    sample.routes = _routes_before(sample.routes, len(sample.prompt_ids) + length - 1) if length else []
    sample.teacher_logprobs, sample.taught = b"", False
    sample.mu_sum = sum(sample.mu)
    sample.inherited_tokens = min(sample.inherited_tokens, sample.sampled_tokens)
    sample.discarded += received_before - sample.received_tokens
    if sample.fork is not None and length <= sample.fork.at:
        sample.fork = sample.fork._replace(at=length) if length else None


def _rows_end(support: bytearray, rows: int) -> int:
    """Return the byte offset at which the first `rows` rows end (rlsys/segments/support.py)."""
    end = 0
    for _ in range(rows):
        end = support.index(0, end) + 1
    return end


def _routes_before(routes: list[RouteSpan], position: int) -> list[RouteSpan]:
    """Return the routes before a position. A span in a file that reaches further is dropped: it cannot be cut."""
    spans = []
    for span in routes:
        if span.end <= position:
            spans.append(span)
        elif span.start < position and span.location is None:
            width = len(span.experts) // (span.end - span.start)
            spans.append(RouteSpan(span.start, position, span.experts[: width * (position - span.start)]))
    return spans
