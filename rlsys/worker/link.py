"""Protocol between coordinator and rollout worker: batches of msgpack messages over a socket pair.

    to a worker         run a sample; cancel samples; execute a call
    to the coordinator  rows of samples with the location of new tokens; verdicts; failures; results of calls; status

Arguments and results of calls are pickles: the two processes trust each other, because one started the other. Rows
and verdicts are typed msgpack.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlsys.core.spans import Fork, Piece, RouteSpan, TurnReward
from rlsys.core.types import CensorCause, Sample, TokenSequence
from rlsys.ledger.sample_fields import SequenceState, apply_state, sequence_state
from rlsys.ledger.sample_rows import NewTokens, SequenceUpdate
from rlsys.router.router import Router
from rlsys.worker.scoring import Verdict
from rlsys.worker.streams import Streams

_LENGTH = struct.Struct("<I")
MAX_BATCH_MESSAGES = 512
"""Largest number of messages in a batch. A receiver handles one batch while the sender produces the next."""


class RunSample(msgspec.Struct, tag=True, array_like=True):
    """Request to run a sample until it has a reward.

    Args:
        sample: a pickle; its pieces locate the tokens.
        prompt: a pickle.
        tree_samples: number of samples of its group that form a tree; 0: no tree.
    """

    sample_id: int
    sample: bytes
    prompt: bytes
    tree_samples: int


class CancelSamples(msgspec.Struct, tag=True, array_like=True):
    """Request to cancel samples for which the coordinator no longer waits. It is sent only after an interrupt."""

    sample_ids: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    """Call of a method: do_NAME of the worker if it exists, otherwise NAME of its router."""

    number: int
    name: str
    arguments: bytes
    """A pickled dict."""


class SequenceRow(msgspec.Struct, array_like=True):
    """State of a sequence, and its new tokens since the last report.

    Args:
        prompt_ids: prompt of the sequence; None: the group's prompt.
        pieces: locations of the new tokens in segments.
        routes: new routes that an engine wrote to files.
        rewritten: whether `pieces` replace all earlier tokens, because the sequence lost some.
    """

    state: SequenceState  # type: ignore[valid-type]
    prompt_ids: list[int] | None
    pieces: list[Piece]
    routes: list[RouteSpan]
    rewritten: bool

    def apply(self, sequence: TokenSequence) -> None:
        """Update the coordinator's copy of the sequence, except for its pieces."""
        apply_state(self.state, sequence)
        if self.prompt_ids is not None:
            sequence.prompt_ids = self.prompt_ids


class LaterSequenceRow(SequenceRow, array_like=True):
    """State of one of the later sequences of a sample, whose number is above 0."""

    number: int
    parent: int | None
    aside: bool


_REPORTED_FIELDS = ("censor_reason", "censor_cause", "turn_rewards", "fork", "inherited_tokens", "discarded")
"""Fields of Sample that a SampleRow contains."""


class SampleRow(SequenceRow, tag=True, array_like=True):
    """State of a sample: its first sequence, the sample itself, and its other sequences that changed."""

    sample_id: int
    done: bool
    """Generation has finished."""
    censor_reason: str | None
    censor_cause: CensorCause | None
    turn_rewards: list[TurnReward] | None
    fork: Fork | None
    inherited_tokens: int
    discarded: int
    extra_sequences: list[LaterSequenceRow]

    def apply_to(self, sample: Sample) -> list[SequenceUpdate]:
        """Update the coordinator's sample.

        Returns:
            the new tokens of each reported sequence.
        """
        self.apply(sample)
        sample.own_prompt |= self.prompt_ids is not None
        for name in _REPORTED_FIELDS:
            setattr(sample, name, getattr(self, name))
        for row in self.extra_sequences:
            if row.number > len(sample.extra_sequences):
                sample.begin(row.prompt_ids or (), row.parent, aside=row.aside)
            row.apply(sample.sequences[row.number])
        updates = [(q.number, q.pieces, q.routes, q.rewritten) for q in self.extra_sequences]
        return [(0, self.pieces, self.routes, self.rewritten), *updates]


def sample_row(sample: Sample, done: bool, first: NewTokens, later: Mapping[int, NewTokens]) -> SampleRow:
    """Create the row of a sample.

    Args:
        done: whether generation has finished.
        first: new tokens of the first sequence.
        later: number of a later sequence that changed -> its new tokens.
    """
    return SampleRow(
        **_sequence_fields(sample, first, has_prompt=sample.own_prompt), sample_id=sample.sample_id, done=done,
        **{name: getattr(sample, name) for name in _REPORTED_FIELDS},
        extra_sequences=[
            LaterSequenceRow(
                **_sequence_fields(q := sample.sequences[n], new, has_prompt=True), number=n, parent=q.parent,
                aside=q.aside,
            )
            for n, new in later.items()
        ],
    )  # fmt: skip


def _sequence_fields(q: TokenSequence, new: NewTokens, *, has_prompt: bool) -> dict[str, Any]:
    """Return the fields of a SequenceRow.

    Args:
        has_prompt: whether the row contains the prompt, because it differs from the group's.
    """
    pieces, routes, rewritten = new
    prompt_ids = list(q.prompt_ids) if has_prompt else None
    return {
        "state": sequence_state(q), "prompt_ids": prompt_ids, "pieces": pieces, "routes": routes,
        "rewritten": rewritten,
    }  # fmt: skip


class SampleVerdict(msgspec.Struct, tag=True, array_like=True):
    """Reward of a sample, or the reason why it has none."""

    sample_id: int
    verdict: Verdict


class Failure(msgspec.Struct, tag=True, array_like=True):
    """Unexpected error of a sample, or of the worker (`sample_id` -1): a pickled exception."""

    sample_id: int
    error: bytes


class CallResult(msgspec.Struct, tag=True, array_like=True):
    """Result of a call: either `result` or `error`, pickled."""

    number: int
    result: bytes
    error: bytes


class WorkerStatus(msgspec.Struct, tag=True, array_like=True):
    """Report of a worker process.

    Attributes:
        counts, prefills: see Router.tally.
        states: see Router.engine_states.
        engines: see Router.engine_metrics.
        stale: see Router.stale_engines.
        next_members: see Router.next_members.
        is_rolling: see Router.is_rolling.
        all_quarantined: see Router.all_quarantined.
        at_max_resumes: see Streams.at_max_resumes.
        generated: see Streams.counts.
    """

    counts: dict[str, float] = {}
    prefills: dict[str, tuple[int, int]] = {}
    states: dict[str, str] = {}
    engines: dict[str, dict[str, Any]] = {}
    stale: list[str] = []
    next_members: list[str] = []
    is_rolling: bool = False
    all_quarantined: bool = False
    at_max_resumes: list[str] = []
    generated: dict[str, int] = {}

    def tally(self) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        """See Router.tally."""
        return self.counts, self.prefills


class LiveStatus:
    """State of a worker in this process: the fields of WorkerStatus, read from its router and its streams."""

    def __init__(self, router: Router, streams: Streams) -> None:
        self.tally = router.tally
        self._readers: dict[str, Callable[[], Any]] = {
            "states": router.engine_states,
            "engines": router.engine_metrics,
            "stale": lambda: router.stale_engines,
            "next_members": router.next_members,
            "is_rolling": lambda: router.is_rolling,
            "all_quarantined": lambda: router.all_quarantined,
            "at_max_resumes": streams.at_max_resumes,
            "generated": lambda: dict(streams.counts),
        }

    def __getattr__(self, name: str) -> Any:
        """Read a field other than `counts` and `prefills`, which `tally` returns."""
        return self._readers[name]()

    def report(self, counts: Mapping[str, float]) -> WorkerStatus:
        """Return a report of the current state.

        Args:
            counts: added to the counts of the router.
        """
        router_counts, prefills = self.tally()
        fields = {name: read() for name, read in self._readers.items()}
        return WorkerStatus(router_counts | dict(counts), prefills, **fields)


ToWorker = RunSample | CancelSamples | Call
JoinedEngine = tuple[str, int, str | None]
"""An engine that joined the run: URL, number of ranks, and pool; None: the default pool."""
SampleMessage = SampleRow | SampleVerdict | Failure
ToCoordinator = SampleMessage | CallResult | WorkerStatus


class Link(asyncio.Protocol):
    """One end of the connection.

    Messages that are sent in one iteration of the event loop form batches of at most MAX_BATCH_MESSAGES, in order.
    """

    def __init__(
        self, kind: Any, on_messages: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> None:
        """Create an unconnected end.

        Args:
            kind: union of the incoming message types.
            on_messages: called with each batch; an exception closes the link.
            on_lost: called once when the other end has closed, after all its messages were handled.
        """
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._out: list[Any] = []
        self._in = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Connect this end through a connected socket, which it then owns."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Any) -> None:
        """Queue a message. It is dropped if the other end has closed, which `on_lost` reports."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(message)
        if len(self._out) >= MAX_BATCH_MESSAGES:
            self.flush()

    def flush(self) -> None:
        """Send all queued messages now."""
        if self._out and self._transport is not None:
            data = self._encoder.encode(self._out)
            self._transport.write(_LENGTH.pack(len(data)) + data)
        self._out.clear()

    def close(self) -> None:
        """Send all queued messages and close the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    # Callbacks of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._in += data
        start = 0
        while len(self._in) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, start)
            end = start + _LENGTH.size + length
            if len(self._in) < end:
                break
            self._on_messages(self._decoder.decode(bytes(memoryview(self._in)[start + _LENGTH.size : end])))
            start = end
        del self._in[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()


async def call_method(target: object, name: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method by name, and await its result if it is awaitable."""
    result = getattr(target, name)(**arguments)
    return await result if inspect.isawaitable(result) else result


def pack(value: object) -> bytes:
    """Return the pickle of a value."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Return the value of a pickle. It must come from the other end of a link."""
    return pickle.loads(data)
