"""SampleRows: writes the rows of live samples to the ledger, and their tokens to segments."""

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
"""New tokens of a sequence: their pieces, their routes, and whether they replace all earlier tokens."""
SequenceUpdate = tuple[int, Sequence[Piece], Sequence[RouteSpan], bool]
"""The number of a sequence, followed by the elements of NewTokens."""
WorkerUpdate = tuple[Sample, Sequence[SequenceUpdate]]
"""A sample, as a worker reported it, and the new tokens of its sequences."""


class StoredLengths(NamedTuple):
    """Lengths of the stored parts of a sequence's arrays.

    Attributes:
        tokens: number of response tokens.
        routes: number of route spans.
        received: number of tokens that engines generated for the sequence, including those that it lost again.
        support: size of the sampling masks in bytes.
        scores: number of tokens for which there are log-probs of the trainer.
    """

    tokens: int = 0
    routes: int = 0
    received: int = 0
    support: int = 0
    scores: int = 0

    @classmethod
    def of(cls, q: TokenSequence) -> StoredLengths:
        return cls(q.tokens, len(q.routes), q.received_tokens, len(q.support), len(q.behaviour))


class SampleRows:
    """Owner of the tables samples and sequences, and of the references from samples to their tokens.

    Call methods that write inside a `writing` block.
    """

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        self._stored_lengths: dict[int, list[StoredLengths]] = {}
        """Sample id -> stored lengths of each sequence, for live samples."""
        self._rows: dict[tuple[int, int], tuple[object, list[int]]] = {}
        """(sample id, sequence) -> stored mutable fields and prompt, for sequences after the first."""
        self.added_tokens = 0
        """Number of sampled tokens that were written since the file was opened."""

    def register(self, sample: Sample) -> None:
        """Record that all arrays and fields of a live sample are stored."""
        self._stored_lengths[sample.sample_id] = [StoredLengths.of(q) for q in sample.sequences]
        self._rows |= {
            (q.sample_id, q.sequence): (mutable_fields(q), q.prompt_ids) for q in sample.extra_sequences
        }

    def unsaved(self, sample: Sample) -> bool:
        """Return whether a live sample has tokens that are not written."""
        return sample.all_tokens > sum(lengths.tokens for lengths in self._stored_lengths[sample.sample_id])

    def write_for_workers(self, samples: Sequence[Sample]) -> None:
        """Write new samples that workers will continue, and remove the tokens from them.

        The samples get references to the segments with their tokens.
        """
        locations = self.write(samples)
        self._file.tokens.write_out()
        for sample, (_, _, pieces) in zip(samples, locations, strict=True):
            sample.pieces = pieces
            sample.response_ids, sample.mu = token_ids(), log_probs()
            sample.routes, sample.support = [], bytearray()
            self.register(sample)

    def write(self, samples: Iterable[Sample]) -> list[tuple[int, int, list[Piece]]]:
        """Write the rows of samples, and the parts of their arrays that are not written yet.

        A sequence that lost tokens is rewritten completely. It must be written before it gets new tokens.

        Returns:
            (sample id, sequence, new pieces) of each sequence.
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
        """Append the new part of a sequence's arrays to a segment, and write the row of a sequence after the first.

        Args:
            lengths: lengths of the stored part.

        Returns:
            the pieces with the new part.
        """
        new_routes = q.routes[lengths.routes :]
        q.routes[lengths.routes :] = self._file.routes.claim(q.sample_id, new_routes)
        if q.sequence:
            self._write_sequence(q)
        if q.tokens < lengths.tokens:
            lengths = self._forget_tokens(q)
        pieces = append_tokens(self._file.tokens, q, lengths, q.routes[lengths.routes :])
        return pieces + append_scores(self._file.tokens, q, lengths.scores)

    def write_from_workers(self, updates: Iterable[WorkerUpdate]) -> None:
        """Write the rows of samples that workers report, and references to the tokens that workers wrote to segments.

        A sample may occur several times, in the order of its updates.
        """
        rows: list[dict[str, object]] = []
        locations: list[tuple[int, int, Sequence[Piece]]] = []
        for sample, sequences in updates:
            rows.append(row_of_sample(sample))
            self._stored_lengths.setdefault(sample.sample_id, [])
            for update in sequences:
                number, _, _, is_rewritten = update
                key = sample.sample_id, number
                if is_rewritten:
                    locations = [location for location in locations if location[:2] != key]
                locations.append((*key, self._append_update(sample, update)))
        insert(self._file.db, "samples", rows)
        self._file.segments.add_pieces(locations)

    def _append_update(self, sample: Sample, update: SequenceUpdate) -> list[Piece]:
        """Append a worker's new routes and the trainer's new log-probs of a sequence to a segment.

        Also write the row of a sequence after the first.

        Returns:
            the pieces that the worker wrote, and those with the routes and log-probs.
        """
        number, worker_pieces, routes, is_rewritten = update
        q = sample.sequences[number]
        lengths = self._stored_lengths[sample.sample_id]
        if number == len(lengths):
            lengths.append(StoredLengths())
        previous = lengths[number]
        stored_lengths = self._forget_tokens(q) if is_rewritten else previous
        pieces = list(worker_pieces)
        if claimed := self._file.routes.claim(sample.sample_id, routes, resent=is_rewritten):
            encoded = encode_routes(claimed)
            record = encode(Kind.TOKENS, SequenceKey.of(q), stored_lengths.tokens, 0, encoded, len(encoded))
            pieces.append(self._file.tokens.append(record))
        if number:
            self._write_sequence(q)
        pieces += append_scores(self._file.tokens, q, stored_lengths.scores)
        q.pieces += pieces
        lengths[number] = StoredLengths.of(q)
        self.added_tokens += lengths[number].received - previous.received
        return pieces

    def _forget_tokens(self, q: TokenSequence) -> StoredLengths:
        """Delete the references to the tokens of a sequence that will be rewritten.

        Returns:
            the lengths of its stored part: 0.
        """
        key = q.sample_id, q.sequence
        self._file.db.execute("DELETE FROM pieces WHERE sample_id = ? AND sequence = ?", key)
        q.pieces = []
        del q.behaviour[q.tokens :]
        return StoredLengths()

    def _write_sequence(self, sequence: TokenSequence) -> None:
        """Write the row of a sequence, unless the stored row is the same."""
        key = sequence.sample_id, sequence.sequence
        current = mutable_fields(sequence)
        previous, prompt_ids = self._rows.get(key, (None, None))
        if previous != current or prompt_ids is not sequence.prompt_ids:
            insert(self._file.db, "sequences", [row_of_sequence(sequence)])
            self._rows[key] = current, sequence.prompt_ids

    def write_scores(self, q: TokenSequence, scored: LogProbResult) -> None:
        """Store the trainer's log-probs of tokens of a sequence.

        Raises:
            RunError: the tokens do not exist, or have log-probs already.
        """
        if not len(q.behaviour) <= scored.start <= q.tokens - len(scored.logp):
            raise RunError(
                f"sample {scored.sample_id}: the trainer sent log-probs of {len(scored.logp)} tokens from token "
                f"{scored.start} on; expected tokens {len(q.behaviour)} to {q.tokens - 1}"
            )
        extend_scores(q.behaviour, scored.start, scored.logp)
        pieces = append_scores(self._file.tokens, q, scored.start)
        self._file.segments.add_pieces([(scored.sample_id, scored.sequence, pieces)])
        lengths = self._stored_lengths[scored.sample_id]
        lengths[scored.sequence] = lengths[scored.sequence]._replace(scores=len(q.behaviour))

    def forget(self, samples: Iterable[Sample]) -> None:
        """Remove the stored lengths of samples that are no longer live from memory."""
        for sample in samples:
            self._stored_lengths.pop(sample.sample_id, None)
            for q in sample.extra_sequences:
                self._rows.pop((q.sample_id, q.sequence), None)

    def drop_tokens(self, samples: Iterable[Sample]) -> None:
        """Delete the references to the tokens of samples that will never be trained."""
        ids = [(s.sample_id,) for s in samples]
        for table in ("pieces", "route_places"):
            self._file.db.executemany(f"DELETE FROM {table} WHERE sample_id = ?", ids)
        self._file.db.executemany("UPDATE sequences SET prompt_ids = x'' WHERE sample_id = ?", ids)

    def prune(self, after: int, upto: int) -> None:
        """Delete the references to the tokens of the groups that the train steps after + 1 to upto took.

        These steps must never be repeated.
        """
        condition = (
            "sample_id IN (SELECT sample_id FROM samples JOIN groups USING (group_id) "
            "WHERE state = 'trained' AND train_step > ? AND train_step <= ?)"
        )
        for table in ("pieces", "route_places"):
            self._file.db.execute(f"DELETE FROM {table} WHERE {condition}", (after, upto))
        self._file.db.execute(f"UPDATE sequences SET prompt_ids = x'' WHERE {condition}", (after, upto))
        self._file.forget_unused()


def mutable_fields(q: TokenSequence) -> tuple[object, ...]:
    """Return values that differ if the row of a sequence after the first has changed.

    The comparison of lengths is cheap: an agent has hundreds of sequences, and continues one or two of them.
    """
    last_version = q.spans[-1].version if q.spans else None
    return (
        q.status, q.tokens, len(q.spans), last_version, len(q.observed), q.last_turn, q.parent, q.aside, q.resumes,
        q.engine, q.deaths, q.faults, q.cached_tokens, q.prefilled_tokens,
    )  # fmt: skip


def append_tokens(
    file: SegmentFile, q: TokenSequence, lengths: StoredLengths, new_routes: Sequence[RouteSpan]
) -> list[Piece]:
    """Append the new part of a sequence's arrays to a segment.

    The teacher's log-probs of the response are appended once, and then removed from the sequence.

    Args:
        file: the segment's writer.
        lengths: lengths of the stored part.
        new_routes: new routes, in memory or as locations on disk.

    Returns:
        the locations of the new records.
    """
    key = SequenceKey.of(q)
    new_tokens = q.tokens - lengths.tokens
    records = []
    if new_tokens or new_routes:
        ids = ids_to_blob(q.response_ids[lengths.tokens :])
        mu = np.asarray(q.mu[lengths.tokens :], "<f8").tobytes()
        routes = encode_routes(new_routes)
        payload = ids + mu + routes
        records.append(encode(Kind.TOKENS, key, lengths.tokens, new_tokens, payload, len(routes)))
    if len(q.support) != lengths.support:
        masks = bytes(q.support[lengths.support :])
        records.append(encode(Kind.SUPPORT, key, lengths.tokens, new_tokens, masks))
    if q.teacher_logprobs:
        records.append(encode(Kind.TEACHER_LOGPROBS, key, 0, q.tokens, q.teacher_logprobs))
        q.teacher_logprobs = b""
    return [file.append(record) for record in records]


def append_scores(file: SegmentFile, q: TokenSequence, start: int) -> list[Piece]:
    """Append the trainer's log-probs of the tokens from `start` on to a segment.

    Returns:
        the location of the record; empty if there are no log-probs.
    """
    if len(q.behaviour) <= start:
        return []
    logp = np.array(q.behaviour[start:], dtype="<f4").tobytes()
    record = encode(Kind.SCORES, SequenceKey.of(q), start, len(q.behaviour) - start, logp)
    return [file.append(record)]


def encode_routes(spans: Sequence[RouteSpan]) -> bytes:
    """Encode route spans as msgpack, for a record of tokens."""
    return msgspec.msgpack.encode(spans)


def extend_scores(behaviour: list[float], start: int, logp: Sequence[float]) -> None:
    """Append log-probs of the tokens from `start` on to `behaviour`, in place.

    Tokens before `start` that have none get NaN.
    """
    behaviour += [math.nan] * (start - len(behaviour))
    behaviour += logp
