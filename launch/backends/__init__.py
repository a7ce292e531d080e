"""Launch backends. A backend starts one keeper (launch/keeper.py) per role, and forwards orders to it.

All backends share the plan, the supervisor, restarts (no backend restarts anything), and logs in the run
folder, which every node can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from launch import cgroup
from launch.plan import Node, Role
from rlsys.config import Config
from rlsys.core.imports import module_command

END, END_NOW, STACKS = b"E", b"Q", b"S"
"""Orders to a keeper."""


class Handle(Protocol):
    """One start of one role."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the keeper, or the backend's code for a lost node; 128 + n after signal n; None if running."""

    def order(self, order: bytes) -> None:
        """Send an order to the keeper; no effect if it has ended."""

    def release(self) -> None:
        """Close the lifeline: a keeper that still runs ends its role."""


class Backend(Protocol):
    """Interface of a backend. Not thread-safe. `nodes[0]` is the machine of this process."""

    nodes: list[Node]

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        """Reserve free ports until `close` (launch/ports.py), on all nodes concurrently.

        Args:
            need: index of a node in `nodes` -> number of ports.

        Returns:
            Index of the node -> ports.
        """

    def start(self, role: Role, env: dict[str, str], log: Path) -> Handle:
        """Start the role's keeper on its node with the environment `env`; output is appended to `log`."""

    def preempted(self) -> bool:
        """Return whether the scheduler reclaims the nodes without having sent a signal to this process."""

    def lost_nodes(self) -> list[int]:
        """Return the indices in `nodes` of nodes that are gone.

        Raises:
            RunError: the scheduler does not respond.
        """

    def replace_nodes(self, is_stopped: Callable[[], bool]) -> bool:
        """Replace the lost nodes by others; all roles have ended.

        Args:
            is_stopped: ends the wait.

        Returns:
            False if only another session (`requeue`) could have enough nodes.

        Raises:
            UserError: no nodes become available, or the wait was stopped.
        """

    def requeue(self) -> None:
        """Have the scheduler start the same command again later, if it can, after a stop that it requested."""

    def close(self) -> None:
        """Release what this backend started or reserved; all roles have ended."""


def keeper_command(role: Role, config: Config, *, shielded: bool) -> list[str]:
    """Return the command line of a role's keeper."""
    command = module_command("launch.keeper", "--grace", str(config.launch.grace_seconds))
    command += ["--cgroup", cgroup.group_name(config.run.dir, role.name)]
    if shielded:
        command.append("--shielded")
    if role.gpus:
        command += ["--gpus", ",".join(map(str, role.gpus))]
    return [*command, "--", *role.argv]
