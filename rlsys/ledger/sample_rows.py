"""What the file has of live samples: their rows, and the pieces of their tokens in segments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import RunError
from rlsys.core.spans import Piece, RouteSpan
from rlsys.core.types import LogProbResult, Sample, Status
from rlsys.ledger.segments import SegmentFile
from rlsys.ledger.store import ids_to_blob, row_of_sequence
from rlsys.ledger.writer import StoreWriter
from rlsys.segments.records import Kind, Whose, encode

New = tuple[list[Piece], list[RouteSpan], bool]
"""Where new tokens of a sequence lie, and where engines have put new routes. True: it has lost tokens, and these are
all that it has."""
ToldSequence = tuple[int, Sequence[Piece], Sequence[RouteSpan], bool]
"""The same with the sequence's number."""
Told = tuple[Sample, Sequence[ToldSequence]]
"""What a worker says of a sample, and what came of its sequences."""


class Stored(NamedTuple):
    """How much of a sample's arrays the file has."""

    tokens: int = 0
    routes: int = 0
    received: int = 0
    """Tokens that engines made for it, those that were cut off again included."""
    support: int = 0
    """Bytes."""
    scores: int = 0

    @classmethod
    def of(cls, sample: Sample) -> Stored:
        return cls(
            sample.tokens,
            len(sample.routes),
            sample.received_tokens,
            len(sample.support),
            len(sample.behaviour),
        )


class SavedSamples:
    """Owns the rows of samples and what points at their tokens. Every method that writes does so inside a `writing`
    block of the caller."""

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        self._stored: dict[int, list[Stored]] = {}  # by sample id, of live groups; of each of its sequences
        self._rows: dict[tuple[int, int], tuple[object, list[int]]] = {}
        """Of further sequences, what the file has: all that changes while one goes on, and its prompt."""
        self.added_tokens = 0
        """Tokens that a model sampled, written since the file was opened."""

    def know(self, sample: Sample) -> None:
        """All of it is in the file."""
        self._stored[sample.sample_id] = [Stored.of(q) for q in sample.sequences]
        self._rows |= {(q.sample_id, q.sequence): (changing(q), q.prompt_ids) for q in sample.extra_sequences}

    def unsaved(self, sample: Sample) -> bool:
        """Whether it has tokens that `write` has not seen."""
        return sample.all_tokens > sum(stored.tokens for stored in self._stored[sample.sample_id])

    def write_for_workers(self, samples: Sequence[Sample]) -> None:
        """As `write`, of new samples that other processes go on with: their tokens lie where these can read them."""
        placed = self.write(samples)
        self._file.tokens.write_out()
        for sample, (_, _, pieces) in zip(samples, placed, strict=True):
            sample.pieces = pieces
            sample.response_ids, sample.mu = token_ids(), log_probs()
            sample.routes, sample.support = [], bytearray()
            self.know(sample)

    def write(self, samples: Iterable[Sample]) -> list[tuple[int, int, list[Piece]]]:
        """Their rows, and what their arrays and those of their sequences have beyond what was written of them. One
        that has lost tokens is to be written before it gets others: all of it is written anew. Returns where it lies,
        by sample and sequence."""
        rows, placed = [], []
        for sample in samples:
            rows.append(_row(sample))
            stored = self._stored.setdefault(sample.sample_id, [])
            stored += [Stored()] * (1 + len(sample.extra_sequences) - len(stored))
            placed += [
                (q.sample_id, q.sequence, self._append(q, stored[q.sequence])) for q in sample.sequences
            ]
            for q in sample.sequences:
                before, now = stored[q.sequence], Stored.of(q)
                stored[q.sequence] = now
                self.added_tokens += now.received - before.received
        self._put(rows)
        self._file.segments.point(placed)
        return placed

    def _append(self, q: Sample, before: Stored) -> list[Piece]:
        """What a sequence has in hand beyond `before`, in a segment; and the row of a further one."""
        new = q.routes[before.routes :]
        q.routes[before.routes :] = self._file.routes.claim(q.sample_id, new)
        if q.sequence:
            self._write_further(q)
        if q.tokens < before.tokens:
            before = self._forget_tokens(q)
        pieces = append_tokens(self._file.tokens, q, before, q.routes[before.routes :])
        return pieces + append_scores(self._file.tokens, q, before.scores)

    def write_told(self, told: Iterable[Told]) -> None:
        """As `write`, of samples whose tokens another process has: new ones lie in pieces, which it has written out,
        and new routes where an engine has put them. A sample may be there twice, as it was then and as it is now."""
        rows: list[tuple[object, ...]] = []
        placed: list[tuple[int, int, Sequence[Piece]]] = []
        for sample, sequences in told:
            rows.append(_row(sample))
            stored = self._stored.setdefault(sample.sample_id, [])
            for number, pieces, routes, anew in sequences:
                q = sample.sequences[number]
                if number == len(stored):
                    stored.append(Stored())
                received, before = stored[number].received, stored[number]
                if anew:
                    before = self._forget_tokens(q)
                    placed = [one for one in placed if one[:2] != (sample.sample_id, number)]
                if claimed := self._file.routes.claim(sample.sample_id, routes, again=anew):
                    encoded = encode_routes(claimed)
                    record = encode(Kind.TOKENS, Whose.of(q), before.tokens, 0, encoded, len(encoded))
                    pieces = [*pieces, self._file.tokens.append(record)]
                if number:
                    self._write_further(q)
                pieces = [*pieces, *append_scores(self._file.tokens, q, before.scores)]
                placed.append((sample.sample_id, number, pieces))
                q.pieces += pieces
                now = stored[number] = Stored.of(q)
                self.added_tokens += now.received - received
        self._put(rows)
        self._file.segments.point(placed)

    def _put(self, rows: Sequence[tuple[object, ...]]) -> None:
        """Of the table samples."""
        if rows:
            self._file.db.executemany(
                f"INSERT OR REPLACE INTO samples VALUES ({', '.join('?' * len(rows[0]))})", rows
            )

    def _forget_tokens(self, q: Sample) -> Stored:
        """It has lost tokens, and will be written anew. What the file has of it then."""
        place = q.sample_id, q.sequence
        self._file.db.execute("DELETE FROM pieces WHERE sample_id = ? AND sequence = ?", place)
        q.pieces = []
        del q.behaviour[q.tokens :]
        return Stored()

    def _write_further(self, sequence: Sample) -> None:
        """Its row, where that is another one than the file has: most of a sample's sequences stay as they are."""
        key, now = (sequence.sample_id, sequence.sequence), changing(sequence)
        before, prompt_ids = self._rows.get(key, (None, None))
        if before != now or prompt_ids is not sequence.prompt_ids:
            row = row_of_sequence(sequence)
            self._file.db.execute(
                f"INSERT OR REPLACE INTO sequences VALUES ({', '.join('?' * len(row))})", row
            )
            self._rows[key] = now, sequence.prompt_ids

    def write_scores(self, sample: Sample, found: LogProbResult) -> None:
        """What the trainer says about tokens of this sequence. Raises RunError for tokens that it has not, or that
        have scores."""
        if not len(sample.behaviour) <= found.start <= sample.tokens - len(found.logp):
            raise RunError(
                f"sample {found.sample_id}: scores from token {found.start} on, but "
                f"{len(sample.behaviour)} of {sample.tokens} have one"
            )
        extend_scores(sample.behaviour, found.start, found.logp)
        pieces = append_scores(self._file.tokens, sample, found.start)
        self._file.segments.point([(found.sample_id, found.sequence, pieces)])
        stored = self._stored[found.sample_id]
        stored[found.sequence] = stored[found.sequence]._replace(scores=len(sample.behaviour))

    def forget(self, samples: Iterable[Sample]) -> None:
        """They are not live any more."""
        for sample in samples:
            self._stored.pop(sample.sample_id, None)
            for q in sample.extra_sequences:
                self._rows.pop((q.sample_id, q.sequence), None)

    def drop_tokens(self, samples: Iterable[Sample]) -> None:
        """Nobody will train them."""
        ids = [(s.sample_id,) for s in samples]
        for table in ("pieces", "route_places"):
            self._file.db.executemany(f"DELETE FROM {table} WHERE sample_id = ?", ids)
        self._file.db.executemany("UPDATE sequences SET prompt_ids = x'' WHERE sample_id = ?", ids)

    def prune(self, after: int, upto: int) -> None:
        """Nobody will train again what these steps took."""
        taken = (
            "sample_id IN (SELECT sample_id FROM samples JOIN groups USING (group_id) "
            "WHERE state = 'trained' AND train_step > ? AND train_step <= ?)"
        )
        for table in ("pieces", "route_places"):
            self._file.db.execute(f"DELETE FROM {table} WHERE {taken}", (after, upto))
        self._file.db.execute(f"UPDATE sequences SET prompt_ids = x'' WHERE {taken}", (after, upto))
        self._file.forget_unused()


def changing(q: Sample) -> tuple[object, ...]:
    """Cheap to compare: an agent has hundreds of conversations with long prompts, of which one or two go on."""
    last = q.spans[-1].version if q.spans else None
    return (
        q.status, q.tokens, len(q.spans), last, len(q.observed), q.last_turn, q.parent, q.aside, q.resumes, q.engine,
        q.deaths, q.faults, q.cached_tokens, q.prefilled_tokens,
    )  # fmt: skip


def _row(sample: Sample) -> tuple[object, ...]:
    """Of the table samples. In flight is stored as parked: what would be resumed."""
    status = Status.PARKED if sample.status is Status.IN_FLIGHT else sample.status
    return (
        sample.sample_id, sample.group_id, sample.index, sample.seed, status.value,
        sample.all_tokens, sample.mu_sum, _json([(s.version, s.start, s.end) for s in sample.spans]),
        sample.reward, sample.censor_reason, sample.resumes,
        sample.cached_tokens, sample.prefilled_tokens, sample.engine,
        None if sample.named_rewards is None else _json(sample.named_rewards),
        sample.plain_reward, sample.answer, _json([(s.start, s.end) for s in sample.observed]),
        None if sample.trained_prompt is None and not sample.own_prompt else ids_to_blob(sample.prompt_ids),
        sample.deaths, sample.faults, int(sample.own_prompt), sample.last_turn, *(sample.fork or (None, None)),
        sample.inherited_tokens, sample.discarded,
        None if sample.turn_rewards is None else _json(sample.turn_rewards),
    )  # fmt: skip


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def append_tokens(
    file: SegmentFile, sample: Sample, before: Stored, new_routes: Sequence[RouteSpan]
) -> list[Piece]:
    """What the sample's arrays have beyond `before`, as records of `file`. `new_routes`: those to keep."""
    pieces, new = [], sample.tokens - before.tokens
    if new or new_routes:
        ids = ids_to_blob(sample.response_ids[before.tokens :])
        mu = np.asarray(sample.mu[before.tokens :], "<f8").tobytes()
        routes = encode_routes(new_routes)
        record = encode(Kind.TOKENS, Whose.of(sample), before.tokens, new, ids + mu + routes, len(routes))
        pieces.append(file.append(record))
    if len(sample.support) != before.support:
        kept = bytes(sample.support[before.support :])
        pieces.append(file.append(encode(Kind.SUPPORT, Whose.of(sample), before.tokens, new, kept)))
    if sample.teacher_logprobs:  # they come once, of the whole response
        record = encode(Kind.OPINIONS, Whose.of(sample), 0, sample.tokens, sample.teacher_logprobs)
        pieces.append(file.append(record))
        sample.teacher_logprobs = b""
    return pieces


def append_scores(file: SegmentFile, sample: Sample, start: int) -> list[Piece]:
    """The trainer's log-probs from token `start` on, as a record of `file`; none for none."""
    if len(sample.behaviour) <= start:
        return []
    logp = np.array(sample.behaviour[start:], dtype="<f4").tobytes()
    record = encode(Kind.SCORES, Whose.of(sample), start, len(sample.behaviour) - start, logp)
    return [file.append(record)]


def encode_routes(spans: Sequence[RouteSpan]) -> bytes:
    """As a record of tokens holds them."""
    return msgspec.msgpack.encode(spans)


def extend_scores(behaviour: list[float], start: int, logp: Sequence[float]) -> None:
    """Put `logp` at `start`; what nobody scored before it is NaN."""
    behaviour += [math.nan] * (start - len(behaviour))
    behaviour += logp
