"""What the coordinator and a rollout worker say to each other: batches of msgpack messages over a socket pair.

    to a worker         run this sample; forget these; carry out a call
    to the coordinator  rows of samples, with where new tokens lie; verdicts; failures; answers of calls; figures

Arguments and results of calls are pickles: the two trust each other, one started the other. What streams, rows and
verdicts, is typed.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlsys.core.spans import Fork, Piece, RouteSpan, TokenSpan, TurnReward, VersionSpan
from rlsys.core.types import CensorCause, Sample, Status
from rlsys.ledger.sample_rows import New, ToldSequence
from rlsys.worker.scoring import Verdict

_LENGTH = struct.Struct("<I")
MOST_TOGETHER = 512
"""Messages: the other end begins with them while there are more."""


class Run(msgspec.Struct, tag=True, array_like=True):
    """To the reward of this sample, which has its tokens where its row says. `sample`, `prompt`: pickles. `together`:
    so many samples of its group come for a tree; 0: none is to grow."""

    sample_id: int
    sample: bytes
    prompt: bytes
    together: int


class Forget(msgspec.Struct, tag=True, array_like=True):
    """Samples that the coordinator does not wait for any more. After an interrupt only."""

    sample_ids: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    number: int
    name: str
    arguments: bytes
    """A pickled dict."""


class OfSequence(msgspec.Struct, array_like=True):
    """What has become of a sequence, and what came of it since it was told last: `pieces`, written out already, and
    the routes that an engine wrote. `anew`: it has lost tokens, and these are all that it has. `prompt_ids`: where
    they are not its group's."""

    status: Status
    spans: list[tuple[int, int, int]]
    observed: list[tuple[int, int]]
    mu_sum: float
    resumes: int
    deaths: int
    faults: int
    cached_tokens: int
    prefilled_tokens: int
    engine: str | None
    prompt_ids: list[int] | None
    last_turn: int
    pieces: list[Piece]
    placed: list[RouteSpan]
    anew: bool

    def tell(self, sequence: Sample) -> None:
        """Bring the coordinator's one up to date, but for its pieces."""
        sequence.spans = [VersionSpan(*s) for s in self.spans]
        sequence.observed = [TokenSpan(*s) for s in self.observed]
        sequence.mu_sum, sequence.status, sequence.last_turn = self.mu_sum, self.status, self.last_turn
        sequence.resumes, sequence.deaths, sequence.faults = self.resumes, self.deaths, self.faults
        sequence.cached_tokens, sequence.prefilled_tokens = self.cached_tokens, self.prefilled_tokens
        sequence.engine = self.engine
        if self.prompt_ids is not None:
            sequence.prompt_ids, sequence.own_prompt = self.prompt_ids, True


class Further(OfSequence, array_like=True):
    """Of a sequence after the first."""

    number: int
    parent: int | None
    aside: bool


class Row(OfSequence, tag=True, array_like=True):
    """Of a sample: what its first sequence is, what all of it is, and its further sequences that have changed."""

    sample_id: int
    done: bool
    """Nothing more will be generated."""
    censor_reason: str | None
    censor_cause: CensorCause | None
    marks: list[TurnReward] | None
    fork: Fork | None
    given: int
    discarded: int
    further: list[Further]

    def tell_sample(self, sample: Sample) -> list[ToldSequence]:
        """Bring the coordinator's sample up to date. What came of each sequence."""
        self.tell(sample)
        sample.censor_reason, sample.censor_cause = self.censor_reason, self.censor_cause
        sample.turn_rewards = self.marks
        sample.fork, sample.inherited_tokens, sample.discarded = self.fork, self.given, self.discarded
        for told in self.further:
            if told.number > len(sample.extra_sequences):
                sample.begin(told.prompt_ids or (), told.parent, aside=told.aside)
            told.tell(sample.sequences[told.number])
        further = [(q.number, q.pieces, q.placed, q.anew) for q in self.further]
        return [(0, self.pieces, self.placed, self.anew), *further]


def row_of(sample: Sample, done: bool, own: New, further: Mapping[int, New]) -> Row:
    """`own`, `further`: pieces and placed routes of the first sequence, and of later ones by number."""
    return Row(
        **_of_sequence(sample, own), sample_id=sample.sample_id, done=done, censor_reason=sample.censor_reason,
        censor_cause=sample.censor_cause, marks=sample.turn_rewards, fork=sample.fork, given=sample.inherited_tokens,
        discarded=sample.discarded,
        further=[
            Further(**_of_sequence(q := sample.sequences[n], new), number=n, parent=q.parent, aside=q.aside)
            for n, new in further.items()
        ],
    )  # fmt: skip


def _of_sequence(q: Sample, new: New) -> dict[str, Any]:
    """The fields of OfSequence."""
    pieces, placed, anew = new
    return {
        "status": q.status, "spans": [(s.version, s.start, s.end) for s in q.spans],
        "observed": [(s.start, s.end) for s in q.observed], "mu_sum": q.mu_sum, "resumes": q.resumes,
        "deaths": q.deaths, "faults": q.faults, "cached_tokens": q.cached_tokens,
        "prefilled_tokens": q.prefilled_tokens, "engine": q.engine,
        "prompt_ids": list(q.prompt_ids) if q.own_prompt else None, "last_turn": q.last_turn, "pieces": pieces,
        "placed": placed, "anew": anew,
    }  # fmt: skip


class Judged(msgspec.Struct, tag=True, array_like=True):
    """The reward of a sample, or why it has none."""

    sample_id: int
    verdict: Verdict


class Failed(msgspec.Struct, tag=True, array_like=True):
    """What broke a sample that nobody foresaw, or the whole worker (-1): a pickled exception."""

    sample_id: int
    error: bytes


class Answer(msgspec.Struct, tag=True, array_like=True):
    """Of a call. Either `result` or `error`, pickled."""

    number: int
    result: bytes
    error: bytes


class Figures(msgspec.Struct, tag=True, array_like=True):
    """How a worker's engines are: Router.tally, engine_states, engine_figures, stale_engines, next_members, rolls,
    hopeless, Streams.full, and what its generator counts."""

    counts: dict[str, float] = {}
    prefills: dict[str, tuple[int, int]] = {}
    states: dict[str, str] = {}
    engines: dict[str, dict[str, Any]] = {}
    stale: list[str] = []
    before_roll: list[str] = []
    rolls: bool = False
    hopeless: bool = False
    full: list[str] = []
    generated: dict[str, int] = {}


ToWorker = Run | Forget | Call
Joined = tuple[str, int, str | None]
"""An engine that joined the run: URL, ranks, and its pool, if it is in one."""
OfSamples = Row | Judged | Failed
ToCoordinator = OfSamples | Answer | Figures


class Link(asyncio.Protocol):
    """One end. Messages of one turn of the loop go together, at most MOST_TOGETHER, in their order. `lost` is called
    once, when the other end is gone; whatever it said before has been heard then."""

    def __init__(self, kind: Any, hear: Callable[[list[Any]], None], lost: Callable[[], None]) -> None:
        """`kind`: the union of what comes. `hear`: takes those that came together; what it raises ends the link."""
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._encoder = msgspec.msgpack.Encoder()
        self._hear = hear
        self._lost = lost
        self._out: list[Any] = []
        self._in = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Any) -> None:
        """Nothing, when the other end is gone: `lost` has told it."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(message)
        if len(self._out) >= MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """What was sent leaves now."""
        if self._out and self._transport is not None:
            data = self._encoder.encode(self._out)
            self._transport.write(_LENGTH.pack(len(data)) + data)
        self._out.clear()

    def close(self) -> None:
        self.flush()
        if self._transport is not None:
            self._transport.close()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._in += data
        at = 0
        while len(self._in) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, at)
            end = at + _LENGTH.size + length
            if len(self._in) < end:
                break
            self._hear(self._decoder.decode(bytes(memoryview(self._in)[at + _LENGTH.size : end])))
            at = end
        del self._in[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()


def pack(thing: object) -> bytes:
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    return pickle.loads(data)
