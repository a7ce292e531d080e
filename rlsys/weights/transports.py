"""Transports of one bucket of weights to engines. rlsys.weights.gathered_push chooses by the push plan.

memory     Each engine rank opens memory of the trainer rank that the plan names (CUDA IPC on a GPU, shared memory
           without one; SGLang's `update_weights_from_tensor`).
group      One trainer rank broadcasts to every rank of the engines, on any host, through a process group (NCCL, gloo;
           SGLang's `update_weights_from_distributed`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.core.errors import RunError
from rlsys.core.rendezvous import bound_store
from rlsys.core.sockets import FOLDER_VARIABLE
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.weight_calls import Call, join_group, leave_group, load_from_group, load_from_memory
from rlsys.weights.buckets import FlatBucket
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.rank_channel import RankChannel
from rlsys.weights.receivers import Answers, EngineUnreachable, Receivers

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class MemoryTransport:
    """Transport through memory of this machine.

    A trainer rank creates a separate handle of its copy of the bucket for each engine rank that it serves, because a
    handle can be opened only once. The trainer rank that serves an engine's first rank posts the handles of all
    trainer ranks to the engine, and sends them the result. Each trainer rank keeps its copy until then.
    """

    def __init__(self, plan: PushPlan, rank: int, seconds: float) -> None:
        """Create the transport. Collective if several trainer ranks serve one engine.

        Args:
            plan: the senders of each engine.
            rank: this trainer rank.
            seconds: time limit of an engine's response.
        """
        self._plan = plan
        self._rank = rank
        self._channel = RankChannel(seconds) if plan.shared else None
        self._targets: list[tuple[EngineAddress, tuple[int, ...]]] = []
        """Engines that this rank serves, and for each of the engine's ranks the trainer rank that serves it."""

    def begin(self, engines: Sequence[EngineAddress]) -> list[EngineAddress]:
        """Start a push to `engines`. Return the engines to which this rank posts the handles."""
        owners = [(engine, self._plan.owners(engine.index, engine.tp)) for engine in engines]
        self._targets = [(engine, ranks) for engine, ranks in owners if ranks and self._rank in ranks]
        return [engine for engine, ranks in self._targets if ranks[0] == self._rank]

    @property
    def idle(self) -> bool:
        """Return whether this rank serves no engine."""
        return not self._targets

    def send(self, flat: FlatBucket, receivers: Receivers) -> None:
        """Send a bucket to the engines that this rank serves."""
        serialize, tensors = serializer(), flattened_payload(flat)
        handles_by_rank = {
            (engine.url, part): serialize(tensors)
            for engine, ranks in self._targets
            for part, owner in enumerate(ranks)
            if owner == self._rank
        }
        self._exchange_handles(handles_by_rank)
        handles = [
            [handles_by_rank[engine.url, part] for part in range(engine.tp)] for engine in receivers.present
        ]
        receivers.wait_all(receivers.post_all([load_from_memory(rank_handles) for rank_handles in handles]))
        self._exchange_results({engine.url for engine in receivers.present})

    def _exchange_handles(self, handles_by_rank: dict[tuple[str, int], bytes]) -> None:
        """Send this rank's handles to the trainer ranks that post them, and receive the handles that it posts.

        Args:
            handles_by_rank: (URL, rank of the engine) -> handle. The received handles are added.
        """
        for engine, ranks in self._targets:
            for part, owner in enumerate(ranks):
                if owner != ranks[0] and owner == self._rank:
                    self._required_channel.send(handles_by_rank[engine.url, part], ranks[0], _tag(engine))
        for engine, ranks in self._targets:
            for part, owner in enumerate(ranks):
                if ranks[0] == self._rank != owner:
                    handles_by_rank[engine.url, part] = self._required_channel.receive(owner, _tag(engine))
        if self._channel is not None:
            self._channel.flush()

    def _exchange_results(self, present: set[str]) -> None:
        """Remove the engines that no longer take part from the targets of all trainer ranks that serve them.

        The trainer rank that posts to an engine sends the others its state.

        Args:
            present: URLs of the engines that still take part, of those to which this rank posts.
        """
        remaining = []
        for engine, ranks in self._targets:
            if ranks[0] == self._rank:
                is_present = engine.url in present
                for owner in dict.fromkeys(ranks[1:]):
                    if owner != self._rank:
                        self._required_channel.send(bytes([is_present]), owner, _tag(engine))
            else:
                is_present = bool(self._required_channel.receive(ranks[0], _tag(engine))[0])
            if is_present:
                remaining.append((engine, ranks))
        if self._channel is not None:
            self._channel.flush()
        self._targets = remaining

    @property
    def _required_channel(self) -> RankChannel:
        assert self._channel is not None, "the plan has one rank for each engine"
        return self._channel


def _tag(engine: EngineAddress) -> int:
    return engine.index or 0


class GroupTransport:
    """Transport through a process group of engines and this process, its rank 0.

    The group lasts as long as the same engines take part.
    """

    def __init__(self, seconds: float, join_seconds: float) -> None:
        """Create the transport without a group.

        Args:
            seconds: time in which an engine must receive a bucket.
            join_seconds: time limit for joining the group. An engine that dies while it joins delays the others
                by this time.
        """
        self._seconds = seconds
        self._join_seconds = join_seconds
        self._group: dist.ProcessGroup | None = None
        self._members: list[EngineAddress] = []
        self._name = ""
        self._communicating = False
        """Whether the group has run a collective. The first one creates NCCL's communicator."""

    @property
    def urls(self) -> set[str]:
        """URLs of the engines in the group."""
        return {engine.url for engine in self._members}

    def begin(self, receivers: Receivers) -> None:
        """Start a push: create the group, unless a group of these engines exists.

        It does not exist for a restarted engine, which holds no weights: only its earlier process was a member.
        """
        if self._is_stale(receivers) or any(e.holds < 0 for e in receivers.present):
            self._open(receivers)

    def send(self, flat: FlatBucket, receivers: Receivers) -> None:
        """Broadcast a bucket. If an engine fails, broadcast it again in a group of the remaining engines.

        An engine may load a bucket twice, which is harmless.
        """
        descriptions = [(n, str(dtype).removeprefix("torch."), list(shape)) for n, dtype, shape in flat.parts]
        while receivers.present:
            if self._is_stale(receivers):
                self._open(receivers)
                continue
            answers = receivers.post_all([load_from_group(self._name, descriptions)] * len(self._members))
            if self._broadcast(flat.memory, answers):
                receivers.wait_all(answers)
                return
            self._abandon(receivers, answers)

    def _is_stale(self, receivers: Receivers) -> bool:
        """Return whether the present engines differ from the members of the group."""
        return [(e.url, e.tp) for e in receivers.present] != [(e.url, e.tp) for e in self._members]

    def close(self) -> None:
        """Leave the group in this process and on the engines that still respond."""
        if self._group is None:
            return
        with Receivers(self._members, self._seconds) as members:
            # Both sides at the same time: in NCCL each waits for the other.
            answers = members.post_all([leave_group(self._name)] * len(self._members))
            dist.destroy_process_group(self._group)
            for answer in answers.values():
                with contextlib.suppress(EngineUnreachable, RunError):  # unreachable, or has never joined
                    answer.result()
        self._group, self._members = None, []

    def _abandon(self, receivers: Receivers, answers: Answers) -> None:
        """Leave a group whose broadcast failed, and exclude the engines that caused the failure.

        Leaving ends the broadcast on the engines that wait in it, and they refuse only for that reason. So they are
        excluded only if no other engine caused the failure.
        """
        assert self._group is not None
        first = {url: a for url, a in answers.items() if a.done()}
        abort(self._group)
        self._group, self._members = None, []
        receivers.exclude_failed(
            answers, first, RunError(f"the broadcast of a bucket to {len(answers)} engines failed")
        )

    def _open(self, receivers: Receivers) -> None:
        """Create a group with all present engines; exclude those that fail to join, and try again without them."""
        self.close()
        while receivers.present and not self._join(receivers):
            pass
        self._members = list(receivers.present)

    def _join(self, receivers: Receivers) -> bool:
        """Create a group, and return whether every engine has joined it.

        Otherwise close the group, and exclude the engines that did not join.
        """
        rendezvous = GroupRendezvous.create(receivers.present, 1)
        self._name = rendezvous.name
        answers = receivers.post_all(rendezvous.calls(receivers.present))
        failure = RunError(
            f"cannot create a process group with {len(answers)} engines; its store is {rendezvous}"
        )
        try:
            self._group = rendezvous.join(0, self._join_seconds)
        except (RuntimeError, TimeoutError) as e:
            failure = RunError(f"{failure}: {e}")
        else:
            self._communicating = False
            wait(answers.values())
            if not any(answer.exception() for answer in answers.values()):
                return True
            abort(self._group)
            self._group = None
        receivers.exclude_failed(answers, {}, failure)  # engines that waited for the missing one refuse, too
        return False

    def _broadcast(self, flat: Tensor, answers: Answers) -> bool:
        """Broadcast a bucket, and return whether that succeeded.

        If an engine refuses or dies, the others still wait in the broadcast, and the caller must abandon the group.

        Args:
            flat: the bucket.
            answers: responses of the engines to the load request.
        """
        group = self._group
        assert group is not None

        def has_refusal() -> bool:
            return any(a.done() and a.exception() for a in answers.values())

        def begin() -> dist.Work | None:
            return dist.broadcast(flat, group=group, group_src=0, async_op=True)

        work = begin() if self._communicating else begin_first(begin, flat, has_refusal, self._seconds)
        if work is None:
            return False
        self._communicating = True
        while not work.is_completed():
            if has_refusal():
                return False
            time.sleep(_POLL_SECONDS)
        if work.exception() is not None:  # a peer closed the connection; waiting would not raise with NCCL
            return False
        work.wait()
        return True


def begin_first(
    collective: Callable[[], dist.Work | None],
    tensor: Tensor,
    has_refusal: Callable[[], bool],
    seconds: float,
) -> dist.Work | None:
    """Start the first collective of a group in a thread, so that the caller can give up.

    NCCL creates its communicator in the first collective, which blocks in C++ until all ranks have joined.

    Args:
        collective: starts the collective on `tensor`, without waiting for its end.
        tensor: tensor of the collective.
        has_refusal: returns whether a member has refused.
        seconds: time limit for starting the collective.

    Returns:
        The work; None if the collective cannot start, a member has refused, or the time limit has passed. If None,
            the caller must abort the group. The thread remains if that does not end the call, as in ncclCommInitRank.
    """
    result: Future[dist.Work | None] = Future()
    # Device and stream are thread-local.
    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def call() -> None:
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                result.set_result(collective())
        except (RuntimeError, ValueError) as e:
            result.set_exception(e)
        finally:  # the thread prints any other error; the caller must not wait for a result
            if not result.done():
                result.set_exception(RunError("unexpected error, see the traceback above"))

    threading.Thread(target=call, name="first-collective", daemon=True).start()
    end = time.monotonic() + seconds
    while not result.done():
        if has_refusal() or time.monotonic() > end:
            return None
        time.sleep(_POLL_SECONDS)
    if (error := result.exception()) is not None:
        log.warning("the first collective of a process group with engines failed: %s", error)
        return None
    return result.result()


def local_address_for(url: str) -> str:
    """Return this host's address on the route to the host of `url`."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: it only chooses a route
        return str(s.getsockname()[0])


@dataclass(frozen=True)
class GroupRendezvous:
    """Rendezvous of a process group of trainer ranks and engines.

    The trainer ranks are the first ranks of the group; the ranks of each engine follow.

    Attributes:
        name: unique name of the group.
        host: address of the group's store, on this host.
        port: port of the store.
        trainers: number of trainer ranks.
        world: number of ranks of the group.
    """

    name: str
    host: str
    port: int
    trainers: int
    world: int

    @classmethod
    def create(cls, engines: Sequence[EngineAddress], trainers: int) -> GroupRendezvous:
        """Create a rendezvous with a free port of this host and a unique name."""
        host = local_address_for(engines[0].url)
        with socket.socket() as s:
            s.bind((host, 0))
            port = s.getsockname()[1]
        # The name is unique because an engine keeps the group of a killed trainer.
        return cls(
            f"rlsys-{secrets.token_hex(8)}", host, port, trainers, trainers + sum(e.tp for e in engines)
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def calls(self, engines: Sequence[EngineAddress]) -> list[Call]:
        """Return the join request for each of `engines`."""
        first = offsets(engines, self.trainers)
        return [join_group(self.name, self.host, self.port, rank, self.world, backend()) for rank in first]

    def join(self, rank: int, seconds: float) -> dist.ProcessGroup:
        """Join the group as trainer rank `rank`. Rank 0, on whose host the store listens, must be on `host`.

        Raises:
            RuntimeError: torch fails.
            TimeoutError: a rank has not joined within `seconds`.
        """
        prepare_sglang()
        from sglang.srt.utils import init_custom_process_group

        timeout = datetime.timedelta(seconds=seconds)
        store = bound_store(self.host, self.port, self.world, rank, timeout)
        with _without_nccl_watchdog():
            group: dist.ProcessGroup = init_custom_process_group(
                backend=backend(), store=dist.PrefixStore(self.name, store), world_size=self.world, rank=rank,
                group_name=self.name, timeout=timeout,
            )  # fmt: skip
        return group


def offsets(engines: Sequence[EngineAddress], trainers: int) -> list[int]:
    """Return the group rank of each engine's first rank."""
    return list(itertools.accumulate((e.tp for e in engines), initial=trainers))[:-1]


def backend() -> str:
    """Return the torch backend: nccl with CUDA, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@contextlib.contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """Create NCCL groups whose errors do not end this process.

    By default, NCCL's watchdog ends a process whose group contains a dead or hanging member. Torch reads the variable
    when it creates a group, so the trainer's other groups keep their setting.
    """
    previous = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = previous


def abort(group: dist.ProcessGroup) -> None:
    """Leave a group in which a collective hangs.

    An NCCL group is aborted, because destroying it would wait for the hung kernel until the watchdog ends this
    process.
    """
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def flattened_payload(flat: FlatBucket) -> dict[str, Any]:
    """Return the object that an engine expects in a handle of a flattened bucket."""
    prepare_sglang()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, dtype, shape in flat.parts:
        size = shape.numel() * dtype.itemsize
        metadata.append(FlattenedTensorMetadata(name, shape, dtype, start, start + size, size))
        start += size
    return {"flattened_tensor": flat.memory, "metadata": metadata}


def serializer() -> Callable[[Any], bytes]:
    """Return SGLang's function that serialises an object, with its tensors as handles."""
    prepare_sglang()
    from sglang.srt.utils import MultiprocessingSerializer

    serialize: Callable[[Any], bytes] = MultiprocessingSerializer.serialize
    return serialize


def _start_memory_manager() -> None:
    """Start torch's shared memory manager now, with its Unix socket in the folder of this role.

    By default torch creates the socket under TMPDIR, whose path may be too long.
    """
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:  # the process was not started by a launcher
        return
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        torch.empty(1).share_memory_()
    finally:
        if previous is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = previous


@functools.cache
def prepare_sglang() -> None:
    """Import the modules of SGLang that a push uses. This takes seconds, so only sending ranks should call it."""
    if not torch.cuda.is_available():
        from rlsys.engine.cpu.platform import declare_torchvision_ops

        declare_torchvision_ops()
        # The default strategy passes file descriptors over a socket with a secret that engines do not have.
        torch.multiprocessing.set_sharing_strategy("file_system")
        _start_memory_manager()
    else:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # A handle names its GPU by UUID, because processes with different visible devices number them differently.
        monkey_patch_torch_reductions()
    importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
