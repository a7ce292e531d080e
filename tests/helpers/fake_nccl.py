"""A fake of NCCL for hosts without a GPU: a torch.distributed backend that refuses two ranks on one GPU.

One process acts as one rank of a planned run at a time. Its process groups, with or without engines, are torch's own
down to the backend. The launch plan determines the GPUs of the members. NCCL refuses a group at the first collective,
this backend refuses it at its creation. The backend sends nothing, and the engines are fakes.
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
"""Node, index of the GPU on that node."""
BACKEND = "one_rank_per_gpu"


@dataclass(frozen=True)
class Group:
    """An NCCL process group."""

    members: list[Gpu]
    """GPU of each rank."""
    watched: bool
    """Whether NCCL's watchdog would end this process on an error of the group."""
    engines: bool
    """Whether engine ranks are members."""


_NAMES = {"nccl": BACKEND, "gloo": "fake"}


class _FakeBackendConfig(distributed_c10d.BackendConfig):
    """Replaces NCCL by `BACKEND` and Gloo by torch's fake backend. Groups keep the requested backend's name."""

    def get_device_backend_map(self) -> dict[str, dist.Backend]:
        backends: dict[str, str] = dict(super().get_device_backend_map())
        if set(backends.values()) == {"nccl"}:
            backends = {"cpu": "nccl", "cuda": "nccl"}  # the tensors of these tests are in host memory
        return {device: dist.Backend(_NAMES.get(backend, backend)) for device, backend in backends.items()}


@dataclass
class FakeMachines:
    """The GPUs of a planned run, and a record of what this process does as one of its ranks."""

    config: Config
    trainer: list[Gpu]
    """GPU of each trainer rank."""
    engines: list[EngineAddress]
    gpus: dict[str, list[Gpu]]
    """URL of an engine -> GPUs of its ranks."""
    groups: list[Group] = field(default_factory=list)
    """Groups of which this process is a member."""
    events: list[str] = field(default_factory=list)
    """Requests to engines, broadcasts, and destroyed or aborted groups, in order."""
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """URL, path and body of each request to an engine."""
    rank: int = 0
    failing_engine: str = ""
    """URL of an engine that dies at its next request to receive weights from a group; the broadcast then hangs."""
    failure_is_detected: bool = False
    """Whether NCCL detects the death: the broadcast completes with an exception that `wait` does not raise."""
    _member_gpus: dict[str, dict[int, Gpu]] = field(default_factory=dict)
    _members_changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def own_gpu(self) -> Gpu:
        return self.trainer[self.rank]

    def handle_request(self, request: Any, timeout: float) -> Any:
        """Handle a POST request as an engine. An engine that joins a group registers the GPUs of its ranks."""
        parts = urlsplit(request.full_url)
        url, body = f"{parts.scheme}://{parts.netloc}", json.loads(request.data)
        self.events.append(request.full_url)
        self.requests.append((url, parts.path, body))
        if url == self.failing_engine and parts.path == "/update_weights_from_distributed":
            raise ConnectionResetError("the engine has died")
        if parts.path == "/init_weights_update_group":
            with self._members_changed:
                ranks = self._member_gpus.setdefault(body["group_name"], {})
                ranks |= {body["rank_offset"] + i: gpu for i, gpu in enumerate(self.gpus[url])}
                self._members_changed.notify_all()
        return BytesIO(b'{"success": true}')

    def create_backend(self, spec: Any, _: Any) -> Any:
        """Create the backend of a group.

        Raises:
            DistBackendError: two members are on one GPU. The text is NCCL's.
        """
        if with_engines := spec.group_id.startswith("rlsys-"):
            members = self._with_engines(spec.group_id, spec.group_size)
        else:
            members = [self.trainer[rank] for rank in spec.global_ranks_in_group or range(spec.group_size)]
        gpu_ranks: dict[Gpu, int] = {}
        for rank, (node, device) in enumerate(members):
            if (first_rank := gpu_ranks.setdefault((node, device), rank)) != rank:
                raise dist.DistBackendError(
                    f"Duplicate GPU detected : rank {rank} and rank {first_rank} both on CUDA device {device}, "
                    f"node {node}"
                )
        watched = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"  # 3 is torch's default
        self.groups.append(Group(members, watched, with_engines))
        return FakeProcessGroup._create_internal(spec.group_rank, spec.group_size)

    def _with_engines(self, name: str, size: int) -> list[Gpu]:
        """Wait for the engine ranks of a group whose rank 0 is this process. Return the GPUs of all members."""
        with self._members_changed:
            assert self._members_changed.wait_for(
                lambda: len(self._member_gpus.get(name, ())) == size - 1, timeout=60
            )
            return [self.own_gpu, *(self._member_gpus[name][rank] for rank in range(1, size))]


def gpus_of(config: Config) -> tuple[list[Gpu], list[list[Gpu]]]:
    """Return the GPUs of the trainer's ranks and those of each engine's ranks, according to the launch plan."""
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


def machines(config: Config, patch: pytest.MonkeyPatch) -> FakeMachines:
    """Patch torch.distributed and torch.cuda with fakes of the run's machines.

    Destroy all groups before `patch` is undone.
    """
    trainer, engines = gpus_of(config)
    addresses = [
        EngineAddress(f"http://127.0.0.1:{5000 + i}", len(g), index=i) for i, g in enumerate(engines)
    ]
    fake_machines = FakeMachines(
        config, trainer, addresses, {a.url: g for a, g in zip(addresses, engines, strict=True)}
    )
    _on_cuda(fake_machines, patch)
    if BACKEND.upper() in dist.Backend._plugins:
        patch.setitem(
            dist.Backend._plugins,
            BACKEND.upper(),
            dist.Backend._BackendPlugin(fake_machines.create_backend, True),
        )
    else:
        dist.Backend.register_backend(
            BACKEND, fake_machines.create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
    patch.setattr(distributed_c10d, "BackendConfig", _FakeBackendConfig)
    patch.setattr(receivers.opener, "open", fake_machines.handle_request)
    _record_group_ends(fake_machines, patch)
    patch.setattr(dist, "broadcast", _broadcast(fake_machines))
    return fake_machines


@dataclass
class _Work:
    """The work of a broadcast.

    If a member is dead, the broadcast completes only if NCCL detects the failure.
    """

    members_alive: bool
    failure_is_detected: bool

    def is_completed(self) -> bool:
        return self.members_alive or self.failure_is_detected

    def exception(self) -> Exception | None:
        return None if self.members_alive else dist.DistBackendError("ncclRemoteError")

    def wait(self) -> None: ...


def _broadcast(machines: FakeMachines) -> Callable[..., _Work]:
    def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, **_: Any) -> _Work:
        machines.events.append(f"broadcast {dist.get_backend(group)}")
        dead = set(machines.gpus.get(machines.failing_engine, ()))
        return _Work(dead.isdisjoint(machines.groups[-1].members), machines.failure_is_detected)

    return broadcast


def _on_cuda(machines: FakeMachines, patch: pytest.MonkeyPatch) -> None:
    def set_device(device: torch.device) -> None:
        assert machines.trainer[machines.rank][1] == visible()[device.index or 0], (
            "the rank uses another GPU than planned"
        )

    def visible() -> list[int]:
        node = machines.own_gpu[0]
        return [gpu for n, gpu in machines.trainer if n == node]

    patch.setattr(shutil, "which", lambda name, *_: name)  # nvidia-smi
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.setattr(torch.cuda, "set_device", set_device)
    patch.setattr(setup, "model_parallel_cuda_manual_seed", lambda seed: None)
    patch.setattr(transports, "prepare_sglang", lambda: None)


def _record_group_ends(machines: FakeMachines, patch: pytest.MonkeyPatch) -> None:
    def recorded(action: str, end: Callable[..., None]) -> Callable[..., None]:
        def call(group: dist.ProcessGroup | None = None) -> None:
            if group is not None:
                machines.events.append(f"{action} {dist.get_backend(group)}")
            end(group)

        return call

    patch.setattr(dist, "destroy_process_group", recorded("destroy", dist.destroy_process_group))
    abort = recorded("abort", distributed_c10d._abort_process_group)
    patch.setattr(distributed_c10d, "_abort_process_group", abort)


def as_rank(machines: FakeMachines, rank: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act as trainer rank `rank` as if started by torchrun. All groups are destroyed at the end."""
    if dist.is_initialized():  # another test left the layout but not its group of one rank
        dist.destroy_process_group()
    node = machines.trainer[rank][0]
    machines.rank = rank
    patch.setenv(
        "LOCAL_RANK", str([r for r, gpu in enumerate(machines.trainer) if gpu[0] == node].index(rank))
    )
    begin = dist.init_process_group
    world: dict[str, Any] = {"store": FakeStore(), "rank": rank, "world_size": len(machines.trainer)}
    patch.setattr(dist, "init_process_group", lambda backend, **_: begin(backend, **world))
    try:
        yield
    finally:
        patch.setattr(dist, "init_process_group", begin)
        if dist.is_initialized():
            setup.leave_layout()
            dist.destroy_process_group()
