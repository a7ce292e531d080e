"""NCCL without a GPU: a backend of torch.distributed that refuses, as NCCL does, a group of two ranks of one GPU.

One process plays one rank of a planned run at a time. Every group that it makes, of the trainer's or with engines, is
torch's own down to the backend; its members' GPUs are those that the plan gives their processes. NCCL refuses at the
first collective, this backend when the group is made. Nothing is sent; engines are stood in for.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from launch.plan import Node, Ports, Role, build_plan
from rlsys.config import Config
from rlsys.core.weight_updates import EngineAddress
from rlsys.planner.layout import lay_out
from rlsys.trainer import setup
from rlsys.weights import receivers, transports

Gpu = tuple[int, int]
"""Node, index on that node."""
BACKEND = "one_rank_a_gpu"


@dataclass(frozen=True)
class Group:
    """One of NCCL. `watched`: whether NCCL's watchdog would end this process with it; `engines`: whether some of its
    ranks are engines'."""

    members: list[Gpu]
    watched: bool
    engines: bool


_NAMES = {"nccl": BACKEND, "gloo": "fake"}


class _Renamed(distributed_c10d.BackendConfig):
    """Who asks for NCCL gets ours, who asks for gloo gets torch's fake one; each keeps the name that it asked for."""

    def get_device_backend_map(self) -> dict[str, dist.Backend]:
        backends: dict[str, str] = dict(super().get_device_backend_map())
        if set(backends.values()) == {"nccl"}:
            backends = {"cpu": "nccl", "cuda": "nccl"}  # the tensors of these tests are in host memory
        return {device: dist.Backend(_NAMES.get(backend, backend)) for device, backend in backends.items()}


@dataclass
class Machines:
    """The GPUs of a planned run, and what this process does there. `events`: requests to engines, broadcasts, and
    ends of groups."""

    config: Config
    trainer: list[Gpu]
    engines: list[EngineAddress]
    gpus: dict[str, list[Gpu]]
    """Of an engine's ranks, by its URL."""
    groups: list[Group] = field(default_factory=list)
    """That this process is in."""
    events: list[str] = field(default_factory=list)
    bodies: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """URL, path and body of each request to an engine."""
    rank: int = 0
    dies: str = ""
    """URL of an engine that dies when it is asked to receive weights from a group: the broadcast then hangs."""
    fails: bool = False
    """Whether NCCL notices that, which ends the work with an error that waiting for it does not raise."""
    _joining: dict[str, dict[int, Gpu]] = field(default_factory=dict)
    _joined: threading.Condition = field(default_factory=threading.Condition)

    @property
    def mine(self) -> Gpu:
        return self.trainer[self.rank]

    def answer(self, request: Any, timeout: float) -> Any:
        """What an engine does with a POST: the ranks of one that is to join a group name their GPUs."""
        parts = urlsplit(request.full_url)
        url, body = f"{parts.scheme}://{parts.netloc}", json.loads(request.data)
        self.events.append(request.full_url)
        self.bodies.append((url, parts.path, body))
        if url == self.dies and parts.path == "/update_weights_from_distributed":
            raise ConnectionResetError("the engine has died")
        if parts.path == "/init_weights_update_group":
            with self._joined:
                ranks = self._joining.setdefault(body["group_name"], {})
                ranks |= {body["rank_offset"] + i: gpu for i, gpu in enumerate(self.gpus[url])}
                self._joined.notify_all()
        return BytesIO(b'{"success": true}')

    def communicator(self, made: Any, _: Any) -> Any:
        """Raises DistBackendError, with NCCL's words, where two members name one GPU."""
        if with_engines := made.group_id.startswith("rlsys-"):
            members = self._with_engines(made.group_id, made.group_size)
        else:
            members = [self.trainer[rank] for rank in made.global_ranks_in_group or range(made.group_size)]
        gpu_ranks: dict[Gpu, int] = {}
        for rank, (node, device) in enumerate(members):
            if (first_rank := gpu_ranks.setdefault((node, device), rank)) != rank:
                raise dist.DistBackendError(
                    f"Duplicate GPU detected : rank {rank} and rank {first_rank} both on CUDA device {device}, node {node}"
                )
        watched = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"  # 3 is torch's default
        self.groups.append(Group(members, watched, with_engines))
        return FakeProcessGroup._create_internal(made.group_rank, made.group_size)

    def _with_engines(self, name: str, size: int) -> list[Gpu]:
        """Members of a group whose rank 0 is this process, once all have come."""
        with self._joined:
            assert self._joined.wait_for(lambda: len(self._joining.get(name, ())) == size - 1, timeout=60)
            return [self.mine, *(self._joining[name][rank] for rank in range(1, size))]


def gpus_of(config: Config) -> tuple[list[Gpu], list[list[Gpu]]]:
    """Of the trainer's ranks and of each engine's, by the processes that a launch would start."""
    nodes = [Node(f"node-{i}", f"10.0.0.{i + 1}") for i in range(config.launch.nodes)]
    ports = Ports([5000] * config.engine.count, 7000, (8000,) * config.engine.count)
    plan = build_plan(config, lay_out(config), nodes, ports, lambda *_: (["engine"], {}))

    def of(role: Role) -> list[Gpu]:
        return [(role.node, gpu) for gpu in role.gpus]

    trainer = [gpu for role in plan.roles if role.kind == "trainer" for gpu in of(role)]
    engines = [
        [gpu for role in plan.roles if role.unit == f"engine-{i}" for gpu in of(role)]
        for i in range(config.engine.count)
    ]
    return trainer, engines


def machines(config: Config, patch: pytest.MonkeyPatch) -> Machines:
    """The run's machines, with this process on them. Groups must be left before the patch ends."""
    trainer, engines = gpus_of(config)
    addresses = [
        EngineAddress(f"http://127.0.0.1:{5000 + i}", len(g), index=i) for i, g in enumerate(engines)
    ]
    fake_machines = Machines(
        config, trainer, addresses, {a.url: g for a, g in zip(addresses, engines, strict=True)}
    )
    _on_cuda(fake_machines, patch)
    if BACKEND.upper() in dist.Backend._plugins:
        patch.setitem(
            dist.Backend._plugins,
            BACKEND.upper(),
            dist.Backend._BackendPlugin(fake_machines.communicator, True),
        )
    else:
        dist.Backend.register_backend(
            BACKEND, fake_machines.communicator, extended_api=True, devices=["cpu", "cuda"]
        )
    patch.setattr(distributed_c10d, "BackendConfig", _Renamed)
    patch.setattr(receivers.opener, "open", fake_machines.answer)
    _watch_ends(fake_machines, patch)
    patch.setattr(dist, "broadcast", _broadcast(fake_machines))
    return fake_machines


@dataclass
class _Work:
    """A broadcast. One that an engine will never take part in is completed by NCCL's noticing that, or never."""

    alive: bool
    noticed: bool

    def is_completed(self) -> bool:
        return self.alive or self.noticed

    def exception(self) -> Exception | None:
        return None if self.alive else dist.DistBackendError("ncclRemoteError")

    def wait(self) -> None: ...


def _broadcast(made: Machines) -> Callable[..., _Work]:
    def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, **_: Any) -> _Work:
        made.events.append(f"broadcast {dist.get_backend(group)}")
        dead = set(made.gpus.get(made.dies, ()))
        return _Work(dead.isdisjoint(made.groups[-1].members), made.fails)

    return broadcast


def _on_cuda(made: Machines, patch: pytest.MonkeyPatch) -> None:
    def set_device(device: torch.device) -> None:
        assert made.trainer[made.rank][1] == visible()[device.index or 0], (
            "the rank computes where it was planned"
        )

    def visible() -> list[int]:
        node = made.mine[0]
        return [gpu for n, gpu in made.trainer if n == node]

    patch.setattr(shutil, "which", lambda name, *_: name)  # nvidia-smi
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.setattr(torch.cuda, "set_device", set_device)
    patch.setattr(setup, "model_parallel_cuda_manual_seed", lambda seed: None)
    patch.setattr(transports, "prepare_sglang", lambda: None)


def _watch_ends(made: Machines, patch: pytest.MonkeyPatch) -> None:
    def watched(what: str, end: Callable[..., None]) -> Callable[..., None]:
        def ending(group: dist.ProcessGroup | None = None) -> None:
            if group is not None:
                made.events.append(f"{what} {dist.get_backend(group)}")
            end(group)

        return ending

    patch.setattr(dist, "destroy_process_group", watched("destroy", dist.destroy_process_group))
    abort = watched("abort", distributed_c10d._abort_process_group)
    patch.setattr(distributed_c10d, "_abort_process_group", abort)


def as_rank(made: Machines, rank: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is that rank, started by torchrun, in groups of its own; they are left at the end."""
    if dist.is_initialized():  # a trainer of another test has left its layout, and not its group of one rank
        dist.destroy_process_group()
    node = made.trainer[rank][0]
    made.rank = rank
    patch.setenv("LOCAL_RANK", str([r for r, gpu in enumerate(made.trainer) if gpu[0] == node].index(rank)))
    begin = dist.init_process_group
    world: dict[str, Any] = {"store": FakeStore(), "rank": rank, "world_size": len(made.trainer)}
    patch.setattr(dist, "init_process_group", lambda backend, **_: begin(backend, **world))
    try:
        yield
    finally:
        patch.setattr(dist, "init_process_group", begin)
        if dist.is_initialized():
            setup.leave_layout()
            dist.destroy_process_group()
