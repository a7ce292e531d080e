"""How one bucket of weights reaches the engines of a push. Who takes part, and how, rlsys.weights.plan says.

memory     handles of memory (CUDA IPC on a GPU, shared memory without one), SGLang's `update_weights_from_tensor`:
           each engine rank opens memory of the trainer rank that the plan names
group      a process group of one trainer rank and every rank of these engines (NCCL, gloo), SGLang's
           `update_weights_from_distributed`: engines anywhere
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

from rlsys.engine.weight_calls import Call, join_group, leave_group, load_from_group, load_from_memory
from rlsys.errors import RunError
from rlsys.rendezvous import bound_store
from rlsys.sockets import FOLDER_VARIABLE
from rlsys.tickets import EngineAddress
from rlsys.weights.buckets import Flat
from rlsys.weights.peers import Peers
from rlsys.weights.plan import PushPlan
from rlsys.weights.receivers import Answers, Gone, Receivers

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.002
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class MemoryTransport:
    """The trainer ranks that serve an engine make a handle for each of its ranks, of their own copy of the bucket.
    The one that serves the engine's first rank posts them all, and tells the others how it went. Until then each
    keeps its copy. One handle for each engine rank: opening uses it up.
    """

    def __init__(self, plan: PushPlan, rank: int, seconds: float) -> None:
        """Collective, where several ranks serve one engine. `seconds`: what an engine's answer may take."""
        self._plan = plan
        self._rank = rank
        self._peers = Peers(seconds) if plan.shared else None
        self._served: list[tuple[EngineAddress, tuple[int, ...]]] = []

    def begin(self, engines: Sequence[EngineAddress]) -> list[EngineAddress]:
        """Of these, the engines that this rank posts to."""
        owners = [(engine, self._plan.owners(engine.index, engine.tp)) for engine in engines]
        self._served = [(engine, ranks) for engine, ranks in owners if ranks and self._rank in ranks]
        return [engine for engine, ranks in self._served if ranks[0] == self._rank]

    @property
    def idle(self) -> bool:
        """Whether nobody is left that this rank serves."""
        return not self._served

    def send(self, flat: Flat, receivers: Receivers) -> None:
        serialize, tensors = serializer(), as_handed_over(flat)
        made = {
            (engine.url, part): serialize(tensors)
            for engine, ranks in self._served
            for part, owner in enumerate(ranks)
            if owner == self._rank
        }
        self._hand_in(made)
        handles = [[made[engine.url, part] for part in range(engine.tp)] for engine in receivers.present]
        receivers.settle(receivers.ask([load_from_memory(of_ranks) for of_ranks in handles]))
        self._hear({engine.url for engine in receivers.present})

    def _hand_in(self, made: dict[tuple[str, int], bytes]) -> None:
        """Send my handles to who posts them; `made` gets those that I post."""
        for engine, ranks in self._served:
            for part, owner in enumerate(ranks):
                if owner != ranks[0] and owner == self._rank:
                    self._others.send(made[engine.url, part], ranks[0], _tag(engine))
        for engine, ranks in self._served:
            for part, owner in enumerate(ranks):
                if ranks[0] == self._rank != owner:
                    made[engine.url, part] = self._others.receive(owner, _tag(engine))
        if self._peers is not None:
            self._peers.settle()

    def _hear(self, present: set[str]) -> None:
        """Whether each engine still takes part: said by who posted, to all who serve it."""
        left = []
        for engine, ranks in self._served:
            if ranks[0] == self._rank:
                here = engine.url in present
                for owner in dict.fromkeys(ranks[1:]):
                    if owner != self._rank:
                        self._others.send(bytes([here]), owner, _tag(engine))
            else:
                here = bool(self._others.receive(ranks[0], _tag(engine))[0])
            if here:
                left.append((engine, ranks))
        if self._peers is not None:
            self._peers.settle()
        self._served = left

    @property
    def _others(self) -> Peers:
        assert self._peers is not None, "the plan has one rank for each engine"
        return self._peers


def _tag(engine: EngineAddress) -> int:
    return engine.index or 0


class GroupTransport:
    """Owns the process group, which lasts as long as the same engines take part. Its rank 0 is this process."""

    def __init__(self, seconds: float, joining: float) -> None:
        """What an engine may take for a bucket, and to join. Who dies while it joins holds the others up so long."""
        self._seconds = seconds
        self._joining = joining
        self._group: dist.ProcessGroup | None = None
        self._members: list[EngineAddress] = []
        self._name = ""
        self._communicating = False
        """Whether the group has done a collective: NCCL makes its communicator in the first one."""

    @property
    def urls(self) -> set[str]:
        """Of the engines that are in the group."""
        return {engine.url for engine in self._members}

    def begin(self, receivers: Receivers) -> None:
        """An engine that was started anew does not know the group of its predecessor; it holds no weights."""
        if self._changed(receivers) or any(e.holds < 0 for e in receivers.present):
            self._open(receivers)

    def send(self, flat: Flat, receivers: Receivers) -> None:
        """Again, with a group of those who are left, when an engine goes in the middle: loading twice is harmless."""
        described = [(n, str(dtype).removeprefix("torch."), list(shape)) for n, dtype, shape in flat.parts]
        while receivers.present:
            if self._changed(receivers):
                self._open(receivers)
                continue
            answers = receivers.ask([load_from_group(self._name, described)] * len(self._members))
            if self._broadcast(flat.memory, answers):
                receivers.settle(answers)
                return
            self._give_up(receivers, answers)

    def _changed(self, receivers: Receivers) -> bool:
        return [(e.url, e.tp) for e in receivers.present] != [(e.url, e.tp) for e in self._members]

    def close(self) -> None:
        """Leave the group, here and at the engines that still answer."""
        if self._group is None:
            return
        with Receivers(self._members, self._seconds) as members:
            # Both sides at once: NCCL's end waits for the other's.
            answers = members.ask([leave_group(self._name)] * len(self._members))
            dist.destroy_process_group(self._group)
            for answer in answers.values():
                with contextlib.suppress(Gone, RunError):  # it has gone, or has never joined
                    answer.result()
        self._group, self._members = None, []

    def _give_up(self, receivers: Receivers, answers: Answers) -> None:
        """Who waits in the broken broadcast is freed by our leaving, and may refuse only because of that: it is left
        out only where nobody else is to blame."""
        assert self._group is not None
        first = {url: a for url, a in answers.items() if a.done()}
        abort(self._group)
        self._group, self._members = None, []
        receivers.blame(answers, first, RunError("the broadcast of weights failed"))

    def _open(self, receivers: Receivers) -> None:
        """A group with all who are there; who goes while it joins is left out, and the others join another one."""
        self.close()
        while receivers.present and not self._joined(receivers):
            pass
        self._members = list(receivers.present)

    def _joined(self, receivers: Receivers) -> bool:
        """Whether every engine is in the new group; when not, there is none, and who is to blame is left out."""
        meeting = Meeting.towards(receivers.present, 1)
        self._name = meeting.name
        answers = receivers.ask(meeting.calls(receivers.present))
        failure = RunError(f"no process group with {len(answers)} engines at {meeting}")
        try:
            self._group = meeting.join(0, self._joining)
        except (RuntimeError, TimeoutError) as e:
            failure = RunError(f"{failure}: {e}")
        else:
            self._communicating = False
            wait(answers.values())
            if not any(answer.exception() for answer in answers.values()):
                return True
            abort(self._group)
            self._group = None
        receivers.blame(answers, {}, failure)  # the others waited in vain, and refuse, too
        return False

    def _broadcast(self, flat: Tensor, answers: Answers) -> bool:
        """Whether it went through. A refusal or a death leaves the others waiting: then the group is given up."""
        group = self._group
        assert group is not None

        def refused() -> bool:
            return any(a.done() and a.exception() for a in answers.values())

        def begin() -> dist.Work | None:
            return dist.broadcast(flat, group=group, group_src=0, async_op=True)

        work = begin() if self._communicating else begin_first(begin, flat, refused, self._seconds)
        if work is None:
            return False
        self._communicating = True
        while not work.is_completed():
            if refused():
                return False
            time.sleep(_LOOK_SECONDS)
        if work.exception() is not None:  # a peer closed the connection; waiting on NCCL would not raise it
            return False
        work.wait()
        return True


def begin_first(
    collective: Callable[[], dist.Work | None], tensor: Tensor, refused: Callable[[], bool], seconds: float
) -> dist.Work | None:
    """Begin the first collective of a group. NCCL makes its communicator in that call, which blocks in C++ until all
    ranks have come, or fails; so a thread makes it, and this one can give up.

    Args:
        collective: Begins it on `tensor`, without waiting for its end.
        refused: Whether a member will not come.
        seconds: Limit of the call.

    Returns:
        None where the call failed, a member refused, or the time is over: the group is then to be aborted. The thread
        stays with a call that even that does not end, as in ncclCommInitRank.
    """
    begun: Future[dist.Work | None] = Future()
    # Both the device and the stream are the thread's own.
    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def call() -> None:
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                begun.set_result(collective())
        except (RuntimeError, ValueError) as e:
            begun.set_exception(e)
        finally:  # of another error, which the thread reports, nobody waits for the end
            if not begun.done():
                begun.set_exception(RunError("the first collective failed"))

    threading.Thread(target=call, name="first-collective", daemon=True).start()
    end = time.monotonic() + seconds
    while not begun.done():
        if refused() or time.monotonic() > end:
            return None
        time.sleep(_LOOK_SECONDS)
    if (error := begun.exception()) is not None:
        log.warning("a group with engines is given up at its first collective: %s", error)
        return None
    return begun.result()


def address_towards(url: str) -> str:
    """This host's address as the one in `url` sees it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: it only chooses a route
        return str(s.getsockname()[0])


@dataclass(frozen=True)
class Meeting:
    """Where trainer ranks and engines make a process group. Trainer ranks have the first numbers in it, engines the
    next ones, each as many as it has ranks."""

    name: str
    host: str
    port: int
    trainers: int
    world: int

    @classmethod
    def towards(cls, engines: Sequence[EngineAddress], trainers: int) -> Meeting:
        """A new one on this host."""
        host = address_towards(engines[0].url)
        with socket.socket() as s:
            s.bind((host, 0))
            port = s.getsockname()[1]
        # A name of its own: an engine keeps that of a trainer that was killed.
        return cls(
            f"rlsys-{secrets.token_hex(8)}", host, port, trainers, trainers + sum(e.tp for e in engines)
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def calls(self, engines: Sequence[EngineAddress]) -> list[Call]:
        """What each engine is asked."""
        first = offsets(engines, self.trainers)
        return [join_group(self.name, self.host, self.port, rank, self.world, backend()) for rank in first]

    def join(self, rank: int, seconds: float) -> dist.ProcessGroup:
        """A trainer rank's side; rank 0's must be on this host. Raises RuntimeError (also torch's errors) or
        TimeoutError when somebody is missing.

        The store's server listens at the address that engines are told, and at no other.
        """
        prepare_sglang()
        from sglang.srt.utils import init_custom_process_group

        timeout = datetime.timedelta(seconds=seconds)
        store = bound_store(self.host, self.port, self.world, rank, timeout)
        with _outlived_by_this_process():
            group: dist.ProcessGroup = init_custom_process_group(
                backend=backend(), store=dist.PrefixStore(self.name, store), world_size=self.world, rank=rank,
                group_name=self.name, timeout=timeout,
            )  # fmt: skip
        return group


def offsets(engines: Sequence[EngineAddress], trainers: int) -> list[int]:
    """The number of each engine's first rank in a group with so many trainer ranks."""
    return list(itertools.accumulate((e.tp for e in engines), initial=trainers))[:-1]


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


@contextlib.contextmanager
def _outlived_by_this_process() -> Iterator[None]:
    """Groups of NCCL that are made meanwhile leave it to us what an engine's death means. Else NCCL's watchdog ends
    the process that shares a group with one that has died or hangs. Torch reads the variable as it makes a group:
    the trainer's own groups keep what theirs was.
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def abort(group: dist.ProcessGroup) -> None:
    """Leave a group in which a broadcast hangs. NCCL's is not destroyed but aborted: its end would first wait for the
    hung kernel, until the watchdog ends this process.
    """
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def as_handed_over(flat: Flat) -> dict[str, Any]:
    """What an engine expects of a flattened bucket in a handle."""
    prepare_sglang()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, start = [], 0
    for name, dtype, shape in flat.parts:
        size = shape.numel() * dtype.itemsize
        metadata.append(FlattenedTensorMetadata(name, shape, dtype, start, start + size, size))
        start += size
    return {"flattened_tensor": flat.memory, "metadata": metadata}


def serializer() -> Callable[[Any], bytes]:
    prepare_sglang()
    from sglang.srt.utils import MultiprocessingSerializer

    serialize: Callable[[Any], bytes] = MultiprocessingSerializer.serialize
    return serialize


def _start_memory_manager() -> None:
    """Have torch start the process that owns shared memory now, with its Unix socket in the folder of this role: by
    itself it makes that under TMPDIR, whose path may be too long for one."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:  # no role, but a process started by hand
        return
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        torch.empty(1).share_memory_()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@functools.cache
def prepare_sglang() -> None:
    """Import what a push needs of SGLang, which takes seconds: by those ranks alone that send."""
    if not torch.cuda.is_available():
        from rlsys.engine.cpu_platform import declare_torchvision_ops

        declare_torchvision_ops()
        # The default strategy passes file descriptors over a socket with a secret that another server lacks.
        torch.multiprocessing.set_sharing_strategy("file_system")
        _start_memory_manager()
    else:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # A handle names its GPU by UUID: processes that see other lists of GPUs number them otherwise.
        monkey_patch_torch_reductions()
    importlib.import_module("sglang.srt.weight_sync.tensor_bucket")
