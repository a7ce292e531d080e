"""Where processes run. A backend starts one keeper (launch/keeper.py) for each role, and leads orders to it.

Everything else is the same for all of them: the plan, the supervisor, restarts (no backend restarts anything),
logs in the run folder, which every node sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from launch import cgroup
from launch.plan import Node, Role
from rlsys.config import Config

END, END_NOW, STACKS = b"E", b"Q", b"S"
"""Orders that a keeper obeys."""


class Handle(Protocol):
    """One start of one role."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n after signal n. The keeper's, or what the backend makes of a lost node."""

    def order(self, order: bytes) -> None:
        """Send an order to the keeper; without effect when that is gone."""

    def release(self) -> None:
        """Close the lifeline: a keeper that still runs ends its role."""


class Backend(Protocol):
    """Not for use from several threads. `nodes[0]` is the machine that this process is on."""

    nodes: list[Node]

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        """On each node, given by its place in `nodes`, so many different ports that nobody had. They are held there
        until `close` (launch/ports.py). All nodes are asked at once."""

    def start(self, role: Role, env: dict[str, str], log: Path) -> Handle:
        """Start the role's keeper on its node with the environment `env`; output is appended to `log`."""

    def preempted(self) -> bool:
        """Whether the scheduler wants the nodes back and did not tell this process by a signal."""

    def lost_nodes(self) -> list[int]:
        """Nodes of the run that are gone, by their places in `nodes`. RunError when the scheduler does not say."""

    def replace_nodes(self, stopped: Callable[[], bool]) -> bool:
        """With no role left: others take the places of `lost_nodes`. False when only another session could have as
        many as before (`requeue`). UserError when none come, or the wait is `stopped`."""

    def requeue(self) -> None:
        """After a stop that the scheduler wanted: have the same command started again later, if it can."""

    def close(self) -> None:
        """Give up what this backend itself started or holds; roles have ended."""


def keeper_command(role: Role, config: Config, *, shielded: bool) -> list[str]:
    command = [sys.executable, "-m", "launch.keeper", "--grace", str(config.launch.grace_seconds)]
    command += ["--cgroup", cgroup.group_name(config.run.dir, role.name)]
    if shielded:
        command.append("--shielded")
    if role.gpus:
        command += ["--gpus", ",".join(map(str, role.gpus))]
    return [*command, "--", *role.argv]
