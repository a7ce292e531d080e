"""One network thread for all gloo groups of a process, instead of one thread for each group.

Symptom: A layout has twenty to sixty groups. torch gives each gloo group a separate device, whose thread wakes up a
hundred times per second while the group is referenced. With several layouts in one process, or four ranks on two
cores, these threads take more CPU time than training.
Upstream: 0.16.1 - 0.19.2, with torch 2.7 - 2.14.
Why numbers stay equal: A gloo device is a listening address with an event loop, which groups may share. Every group
has its own connections and reduces in the same order. torch still chooses the network interface.
Delete when: torch shares the device, or new_group accepts options for gloo.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any

from torch.distributed import distributed_c10d as c10d

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    target("gloo_device", module, "create_group", "torch.distributed.new_group")
    renamed = hasattr(c10d, "_create_gloo_process_group")  # torch 2.14
    maker = "_create_gloo_process_group" if renamed else "_new_process_group_helper"
    target("gloo_device", c10d, maker, "ProcessGroupGloo(", "timeout=")
    plain: Any = c10d.ProcessGroupGloo
    devices: list[Any] = []

    class SharedDevice(plain):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
        ) -> None:
            if enable_reconfigure:  # torch 2.14, for groups whose members change, which rlsys does not create
                super().__init__(store, rank, size, timeout, enable_reconfigure)
                return
            if not devices:
                names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
                devices.extend(plain.create_device(interface=name) for name in names if name)
            if not devices:
                devices.append(plain.create_default_device())
            options = plain._Options()
            options._devices = devices
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = SharedDevice  # type: ignore[misc]


PATCH = Patch(
    "gloo_device", "megatron.core.parallel_state", "no-cuda",
    "0.16.1 - 0.19.2", "every gloo group has a network thread that polls", _edit,
)  # fmt: skip
