"""Forks of samples, and truncation of a sample. Standard library only.

A fork is a sample that starts with the first tokens of another sample of its group, with their log-probs, weight
versions and sampling masks. These tokens are trained in both samples. A token that the sampler did not draw
(`Forced`) may follow them, then the tokens that engines generate for the fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlsys.core.spans import Fork, RouteSpan, VersionSpan, truncate_spans
from rlsys.core.types import Sample


class Forced(NamedTuple):
    """A token that replaces the sampled one, and its log-prob under the same weights."""

    token: int
    mu: float


def fork(
    source: Sample, length: int, target: Sample, forced: Forced | None = None, inserted: Sequence[int] = ()
) -> None:
    """Copy the first response tokens of `source` to `target`.

    Routes in a file of an engine are not copied; the tokens are trained without routing replay in `target`.

    Args:
        source: the sample with the tokens.
        length: number of tokens to copy.
        target: another sample of the same group, without tokens.
        forced: token to append to them.
        inserted: ids to append that are not trained; they get the weight version of the token in their position.

    Raises:
        ValueError: the samples have different prompts or groups, `target` has tokens, `length` is out of range, or
            `source` has a sampling mask and `forced` is given.
    """
    _check_fork(source, length, target, forced)
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


def _check_fork(source: Sample, length: int, target: Sample, forced: Forced | None) -> None:
    """Check the arguments of `fork`.

    Raises:
        ValueError: see `fork`.
    """
    if target.tokens or target.sample_id == source.sample_id or target.group_id != source.group_id:
        raise ValueError(
            f"sample {target.sample_id} cannot fork from sample {source.sample_id}: expected an empty sample of the "
            "same group"
        )
    if target.prompt_ids != source.prompt_ids or target.trained_prompt != source.trained_prompt:
        raise ValueError(
            f"samples {target.sample_id} and {source.sample_id} have different prompts; expected the same prompt"
        )
    longest = len(source.response_ids) - (forced is not None)
    if not 0 <= length <= longest:
        raise ValueError(
            f"cannot fork sample {source.sample_id} after {length} response tokens; expected 0 to {longest}"
        )
    if forced is not None and source.support:
        raise ValueError(
            f"sample {source.sample_id} has a sampling mask; expected none, because a forced token needs a log-prob "
            "of the whole vocabulary"
        )


def truncate_sample(sample: Sample, length: int) -> None:
    """Truncate a response to its first `length` tokens, in place.

    The removed tokens that engines generated for the sample are added to `sample.discarded`.
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
    """Return the size in bytes of the first `rows` rows of a sampling mask (rlsys/segments/support.py)."""
    end = 0
    for _ in range(rows):
        end = support.index(0, end) + 1
    return end


def _routes_before(routes: list[RouteSpan], position: int) -> list[RouteSpan]:
    """Return the routes before a position.

    A span in a file that extends beyond the position is omitted, because it cannot be truncated.
    """
    spans = []
    for span in routes:
        if span.end <= position:
            spans.append(span)
        elif span.start < position and span.location is None:
            width = len(span.experts) // (span.end - span.start)
            spans.append(RouteSpan(span.start, position, span.experts[: width * (position - span.start)]))
    return spans
