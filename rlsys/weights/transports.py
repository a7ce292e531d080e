"""How one bucket of weights reaches the engines of a push. Rank 0 of the trainer only.

tensor     shared memory (CUDA IPC on a GPU), SGLang's `update_weights_from_tensor`: engines on the trainer's host
broadcast  a process group of trainer rank 0 and every rank of every engine (NCCL, gloo), SGLang's
           `update_weights_from_distributed`: engines anywhere
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import itertools
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.errors import RunError
from rlsys.types import EngineAddress
from rlsys.weights.receivers import Gone, Receivers, post

Bucket = list[tuple[str, Tensor]]

_GROUP_TIMEOUT = 120.0
_LOOK_SECONDS = 0.002


class Transport(Protocol):
    """Sends the buckets of a push, one after the other, to the engines that are still present."""

    def begin(self, receivers: Receivers) -> None: ...

    def send(self, bucket: Bucket, receivers: Receivers) -> None: ...


class TensorTransport:
    """One handle of the shared memory for each of an engine's ranks: opening uses it up."""

    def begin(self, receivers: Receivers) -> None:
        pass

    def send(self, bucket: Bucket, receivers: Receivers) -> None:
        serialize, flat = _serializer(), _flatten(bucket)
        tensors = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        bodies = [
            {
                "serialized_named_tensors": [
                    base64.b64encode(serialize(tensors)).decode() for _ in range(engine.tp)
                ],
                "load_format": "flattened_bucket",
                "flush_cache": False,  # once, after the last bucket, by the router
            }
            for engine in receivers.present
        ]
        receivers.settle(receivers.ask("/update_weights_from_tensor", bodies))


class BroadcastTransport:
    """Owns the process group, which lasts as long as the same engines take part. Rank 0 is this process."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._members: list[EngineAddress] = []
        self._name = ""

    def begin(self, receivers: Receivers) -> None:
        """An engine that was started anew does not know the group of its predecessor; it holds no weights."""
        if self._changed(receivers) or any(e.holds < 0 for e in receivers.present):
            self._open(receivers)

    def send(self, bucket: Bucket, receivers: Receivers) -> None:
        """Again, with a group of those who are left, when an engine goes in the middle: loading twice is harmless."""
        flat = _flatten(bucket).get_flattened_tensor()
        while receivers.present:
            if self._changed(receivers):
                self._open(receivers)
                continue
            bodies = [self._body(bucket)] * len(self._members)
            answers = receivers.ask("/update_weights_from_distributed", bodies)
            if self._broadcast(flat, answers):
                receivers.settle(answers)
                return
            self._give_up(receivers, answers)

    def _changed(self, receivers: Receivers) -> bool:
        return [(e.url, e.tp) for e in receivers.present] != [(e.url, e.tp) for e in self._members]

    def close(self) -> None:
        """Leave the group, here and at the engines that still answer."""
        if self._group is None:
            return
        dist.destroy_process_group(self._group)
        self._group = None
        for engine in self._members:
            with contextlib.suppress(Gone, RunError):  # it has gone, or has never joined
                post(engine, "/destroy_weights_update_group", {"group_name": self._name})
        self._members = []

    def _give_up(self, receivers: Receivers, answers: dict[str, Future[None]]) -> None:
        """Who waits in the broken broadcast is freed by our leaving. Raises RunError when nobody has gone: then an
        engine refused the tensors.
        """
        assert self._group is not None
        dist.destroy_process_group(self._group)
        self._group, refusal, before = None, None, len(receivers.present)
        for engine in list(receivers.present):
            try:
                answers[engine.url].result()
            except Gone as e:
                receivers.leave_out(engine, e)
            except RunError as e:
                refusal = e
        self._members = []
        if len(receivers.present) == before:
            raise refusal or RunError("the broadcast of weights failed, and every engine is there")

    def _open(self, receivers: Receivers) -> None:
        self.close()
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        host = address_towards(receivers.present[0].url)
        with socket.socket() as s:
            s.bind((host, 0))
            port = s.getsockname()[1]
        world = 1 + sum(e.tp for e in receivers.present)
        self._name = f"rlsys-{next(self._numbers)}"
        offsets = itertools.accumulate((e.tp for e in receivers.present), initial=1)
        bodies = [
            {"master_address": host, "master_port": port, "rank_offset": offset, "world_size": world,
             "group_name": self._name, "backend": backend}
            for _, offset in zip(receivers.present, offsets, strict=False)
        ]  # fmt: skip
        answers = receivers.ask("/init_weights_update_group", bodies)
        try:
            self._group = _join(backend, host, port, world, self._name)
        except (RuntimeError, TimeoutError) as e:
            receivers.settle(answers)
            raise RunError(f"no process group with {len(answers)} engines at {host}:{port}: {e}") from None
        receivers.settle(answers)
        self._members = list(receivers.present)

    def _body(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "names": [name for name, _ in bucket],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
            "shapes": [list(t.shape) for _, t in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

    def _broadcast(self, flat: Tensor, answers: dict[str, Future[None]]) -> bool:
        """Whether it went through. A refusal or a death leaves the others waiting: then the group is given up."""
        assert self._group is not None
        work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
        assert work is not None
        while not work.is_completed():
            if any(a.done() and a.exception() for a in answers.values()):
                return False
            time.sleep(_LOOK_SECONDS)
        try:
            work.wait()
        except RuntimeError:  # gloo: a peer closed the connection
            return False
        return True


def address_towards(url: str) -> str:
    """This host's address as the one in `url` sees it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: it only chooses a route
        return str(s.getsockname()[0])


def _join(backend: str, host: str, port: int, world: int, name: str) -> dist.ProcessGroup:
    """Rank 0's side. Raises RuntimeError (also torch's errors) or TimeoutError when somebody is missing.

    The store is ours: torch's rendezvous would look for one of torchrun's (TORCHELASTIC_USE_AGENT_STORE) and wait for
    a server that nobody starts.
    """
    _prepare_sglang()
    from sglang.srt.utils import init_custom_process_group

    timeout = datetime.timedelta(seconds=_GROUP_TIMEOUT)
    store = dist.TCPStore(host, port, world, is_master=True, timeout=timeout, wait_for_workers=False)
    group: dist.ProcessGroup = init_custom_process_group(
        backend=backend, store=dist.PrefixStore(name, store), world_size=world, rank=0, group_name=name,
        timeout=timeout,
    )  # fmt: skip
    return group


def _flatten(bucket: Bucket) -> Any:
    _prepare_sglang()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=bucket)


def _serializer() -> Callable[[Any], bytes]:
    _prepare_sglang()
    from sglang.srt.utils import MultiprocessingSerializer

    serialize: Callable[[Any], bytes] = MultiprocessingSerializer.serialize
    return serialize


@functools.cache
def _prepare_sglang() -> None:
    """SGLang is imported here, at the first push, because that takes seconds."""
    if not torch.cuda.is_available():
        from rlsys.engine.cpu_platform import declare_torchvision_ops

        declare_torchvision_ops()
        # The default strategy passes file descriptors over a socket with a secret that another server lacks.
        torch.multiprocessing.set_sharing_strategy("file_system")
