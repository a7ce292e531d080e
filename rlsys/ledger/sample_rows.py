"""SampleRows: writes live samples to the ledger: their rows, and their tokens as pieces of segments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import RunError
from rlsys.core.spans import Piece, RouteSpan
from rlsys.core.types import LogProbResult, Sample, TokenSequence
from rlsys.ledger.segments import SegmentFile
from rlsys.ledger.store import ids_to_blob, insert, row_of_sample, row_of_sequence
from rlsys.ledger.writer import StoreWriter
from rlsys.segments.records import Kind, SequenceKey, encode

NewTokens = tuple[list[Piece], list[RouteSpan], bool]
"""Pieces with new tokens of a sequence, its new routes, and whether they replace all earlier tokens."""
SequenceUpdate = tuple[int, Sequence[Piece], Sequence[RouteSpan], bool]
"""The number of the sequence, followed by the elements of NewTokens."""
WorkerUpdate = tuple[Sample, Sequence[SequenceUpdate]]
"""A sample as reported by a worker, and the new tokens of its sequences."""


class StoredLengths(NamedTuple):
    """Lengths of the stored part of a sequence's arrays."""

    tokens: int = 0
    routes: int = 0
    received: int = 0
    """Tokens that engines generated for it, including those that were removed again."""
    support: int = 0
    """Bytes of the sampling masks."""
    scores: int = 0

    @classmethod
    def of(cls, sample: TokenSequence) -> StoredLengths:
        return cls(
            sample.tokens,
            len(sample.routes),
            sample.received_tokens,
            len(sample.support),
            len(sample.behaviour),
        )


class SampleRows:
    """Writes samples. Owns their rows and the references to their tokens.

    Call the methods inside a `writing` block.
    """

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        self._stored_lengths: dict[int, list[StoredLengths]] = {}  # by sample id, then sequence
        self._rows: dict[tuple[int, int], tuple[object, list[int]]] = {}
        """(sample id, sequence) of sequences after the first -> the stored mutable fields, and the prompt."""
        self.added_tokens = 0
        """Number of sampled tokens that were written since the file was opened."""

    def register(self, sample: Sample) -> None:
        """Register a sample that is completely stored."""
        self._stored_lengths[sample.sample_id] = [StoredLengths.of(q) for q in sample.sequences]
        self._rows |= {
            (q.sample_id, q.sequence): (mutable_fields(q), q.prompt_ids) for q in sample.extra_sequences
        }

    def unsaved(self, sample: Sample) -> bool:
        """Return whether the sample has tokens that are not written."""
        return sample.all_tokens > sum(lengths.tokens for lengths in self._stored_lengths[sample.sample_id])

    def write_for_workers(self, samples: Sequence[Sample]) -> None:
        """Write new samples that workers will continue, and replace their tokens by references to segments."""
        locations = self.write(samples)
        self._file.tokens.write_out()
        for sample, (_, _, pieces) in zip(samples, locations, strict=True):
            sample.pieces = pieces
            sample.response_ids, sample.mu = token_ids(), log_probs()
            sample.routes, sample.support = [], bytearray()
            self.register(sample)

    def write(self, samples: Iterable[Sample]) -> list[tuple[int, int, list[Piece]]]:
        """Write the rows of samples and the unsaved parts of their arrays.

        A sample that lost tokens must be written before it gets new ones. It is then rewritten completely.

        Returns:
            (sample id, sequence, new pieces) for each sequence.
        """
        rows, locations = [], []
        for sample in samples:
            rows.append(row_of_sample(sample))
            lengths = self._stored_lengths.setdefault(sample.sample_id, [])
            lengths += [StoredLengths()] * (1 + len(sample.extra_sequences) - len(lengths))
            locations += [
                (q.sample_id, q.sequence, self._append(q, lengths[q.sequence])) for q in sample.sequences
            ]
            for q in sample.sequences:
                previous, current = lengths[q.sequence], StoredLengths.of(q)
                lengths[q.sequence] = current
                self.added_tokens += current.received - previous.received
        insert(self._file.db, "samples", rows)
        self._file.segments.add_pieces(locations)
        return locations

    def _append(self, q: TokenSequence, lengths: StoredLengths) -> list[Piece]:
        """Append the unsaved part of a sequence's arrays to a segment, and write its row unless it is the first."""
        new = q.routes[lengths.routes :]
        q.routes[lengths.routes :] = self._file.routes.claim(q.sample_id, new)
        if q.sequence:
            self._write_sequence(q)
        if q.tokens < lengths.tokens:
            lengths = self._forget_tokens(q)
        pieces = append_tokens(self._file.tokens, q, lengths, q.routes[lengths.routes :])
        return pieces + append_scores(self._file.tokens, q, lengths.scores)

    def write_from_workers(self, updates: Iterable[WorkerUpdate]) -> None:
        """Write samples of workers, which have already written the new tokens to segments.

        A sample may occur several times, in the order of its updates.
        """
        rows: list[dict[str, object]] = []
        locations: list[tuple[int, int, Sequence[Piece]]] = []
        for sample, sequences in updates:
            rows.append(row_of_sample(sample))
            lengths = self._stored_lengths.setdefault(sample.sample_id, [])
            for number, pieces, routes, rewritten in sequences:
                q = sample.sequences[number]
                if number == len(lengths):
                    lengths.append(StoredLengths())
                received, previous = lengths[number].received, lengths[number]
                if rewritten:
                    previous = self._forget_tokens(q)
                    locations = [
                        location for location in locations if location[:2] != (sample.sample_id, number)
                    ]
                if claimed := self._file.routes.claim(sample.sample_id, routes, resent=rewritten):
                    encoded = encode_routes(claimed)
                    record = encode(Kind.TOKENS, SequenceKey.of(q), previous.tokens, 0, encoded, len(encoded))
                    pieces = [*pieces, self._file.tokens.append(record)]
                if number:
                    self._write_sequence(q)
                pieces = [*pieces, *append_scores(self._file.tokens, q, previous.scores)]
                locations.append((sample.sample_id, number, pieces))
                q.pieces += pieces
                current = lengths[number] = StoredLengths.of(q)
                self.added_tokens += current.received - received
        insert(self._file.db, "samples", rows)
        self._file.segments.add_pieces(locations)

    def _forget_tokens(self, q: TokenSequence) -> StoredLengths:
        """Delete the references to the tokens of a sequence that lost some. Returns its new lengths, which are 0."""
        key = q.sample_id, q.sequence
        self._file.db.execute("DELETE FROM pieces WHERE sample_id = ? AND sequence = ?", key)
        q.pieces = []
        del q.behaviour[q.tokens :]
        return StoredLengths()

    def _write_sequence(self, sequence: TokenSequence) -> None:
        """Write the row of a sequence if it changed. Most sequences of a sample do not change."""
        key, current = (sequence.sample_id, sequence.sequence), mutable_fields(sequence)
        previous, prompt_ids = self._rows.get(key, (None, None))
        if previous != current or prompt_ids is not sequence.prompt_ids:
            insert(self._file.db, "sequences", [row_of_sequence(sequence)])
            self._rows[key] = current, sequence.prompt_ids

    def write_scores(self, sample: TokenSequence, scored: LogProbResult) -> None:
        """Store the trainer's log-probs of tokens of a sequence.

        Raises:
            RunError: the tokens do not exist, or have log-probs already.
        """
        if not len(sample.behaviour) <= scored.start <= sample.tokens - len(scored.logp):
            raise RunError(
                f"sample {scored.sample_id}: the trainer sent log-probs of {len(scored.logp)} tokens from token "
                f"{scored.start} on; expected tokens {len(sample.behaviour)} to {sample.tokens - 1}"
            )
        extend_scores(sample.behaviour, scored.start, scored.logp)
        pieces = append_scores(self._file.tokens, sample, scored.start)
        self._file.segments.add_pieces([(scored.sample_id, scored.sequence, pieces)])
        lengths = self._stored_lengths[scored.sample_id]
        lengths[scored.sequence] = lengths[scored.sequence]._replace(scores=len(sample.behaviour))

    def forget(self, samples: Iterable[Sample]) -> None:
        """Stop tracking samples that are no longer live."""
        for sample in samples:
            self._stored_lengths.pop(sample.sample_id, None)
            for q in sample.extra_sequences:
                self._rows.pop((q.sample_id, q.sequence), None)

    def drop_tokens(self, samples: Iterable[Sample]) -> None:
        """Delete the references to tokens that will never be trained."""
        ids = [(s.sample_id,) for s in samples]
        for table in ("pieces", "route_places"):
            self._file.db.executemany(f"DELETE FROM {table} WHERE sample_id = ?", ids)
        self._file.db.executemany("UPDATE sequences SET prompt_ids = x'' WHERE sample_id = ?", ids)

    def prune(self, after: int, upto: int) -> None:
        """Delete the references to tokens that train steps in (after, upto] took. These steps are never repeated."""
        condition = (
            "sample_id IN (SELECT sample_id FROM samples JOIN groups USING (group_id) "
            "WHERE state = 'trained' AND train_step > ? AND train_step <= ?)"
        )
        for table in ("pieces", "route_places"):
            self._file.db.execute(f"DELETE FROM {table} WHERE {condition}", (after, upto))
        self._file.db.execute(f"UPDATE sequences SET prompt_ids = x'' WHERE {condition}", (after, upto))
        self._file.forget_unused()


def mutable_fields(q: TokenSequence) -> tuple[object, ...]:
    """Return the fields of a sequence that change while it runs, for a cheap comparison.

    An agent has hundreds of sequences with long prompts, and continues one or two of them.
    """
    last = q.spans[-1].version if q.spans else None
    return (
        q.status, q.tokens, len(q.spans), last, len(q.observed), q.last_turn, q.parent, q.aside, q.resumes, q.engine,
        q.deaths, q.faults, q.cached_tokens, q.prefilled_tokens,
    )  # fmt: skip


def append_tokens(
    file: SegmentFile, sample: TokenSequence, lengths: StoredLengths, new_routes: Sequence[RouteSpan]
) -> list[Piece]:
    """Append the unsaved part of a sequence's arrays to a segment.

    Args:
        file: the segment's writer.
        sample: the sequence.
        lengths: lengths of the stored part.
        new_routes: new routes, in memory or on disk.

    Returns:
        the locations of the new records.
    """
    pieces, new = [], sample.tokens - lengths.tokens
    if new or new_routes:
        ids = ids_to_blob(sample.response_ids[lengths.tokens :])
        mu = np.asarray(sample.mu[lengths.tokens :], "<f8").tobytes()
        routes = encode_routes(new_routes)
        record = encode(
            Kind.TOKENS, SequenceKey.of(sample), lengths.tokens, new, ids + mu + routes, len(routes)
        )
        pieces.append(file.append(record))
    if len(sample.support) != lengths.support:
        mask = bytes(sample.support[lengths.support :])
        pieces.append(file.append(encode(Kind.SUPPORT, SequenceKey.of(sample), lengths.tokens, new, mask)))
    if sample.teacher_logprobs:  # set once, for the whole response
        record = encode(
            Kind.TEACHER_LOGPROBS, SequenceKey.of(sample), 0, sample.tokens, sample.teacher_logprobs
        )
        pieces.append(file.append(record))
        sample.teacher_logprobs = b""
    return pieces


def append_scores(file: SegmentFile, sample: TokenSequence, start: int) -> list[Piece]:
    """Append the trainer's log-probs from token `start` on to `file`.

    Returns:
        the location of the record; empty if there are no log-probs.
    """
    if len(sample.behaviour) <= start:
        return []
    logp = np.array(sample.behaviour[start:], dtype="<f4").tobytes()
    record = encode(Kind.SCORES, SequenceKey.of(sample), start, len(sample.behaviour) - start, logp)
    return [file.append(record)]


def encode_routes(spans: Sequence[RouteSpan]) -> bytes:
    """Encode routes for a record of tokens."""
    return msgspec.msgpack.encode(spans)


def extend_scores(behaviour: list[float], start: int, logp: Sequence[float]) -> None:
    """Append `logp` for tokens from `start` on. Tokens in between without log-probs get NaN."""
    behaviour += [math.nan] * (start - len(behaviour))
    behaviour += logp
