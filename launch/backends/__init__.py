"""Launch backends. A backend starts one keeper (launch/keeper.py) per role, and forwards orders to it.

The plan, the supervisor and the logs in the run folder, which every node can read, are the same for all backends.
Only the supervisor restarts processes; no backend does.
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
        """Exit code of the keeper: 128 + n after signal n, NODE_LOST for a lost node, None while it runs."""

    def order(self, order: bytes) -> None:
        """Send an order to the keeper. An order to a keeper that has ended has no effect."""

    def release(self) -> None:
        """Close the pipe to the keeper. A keeper that still runs then ends its role."""


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
        """Start the role's keeper on the role's node.

        Args:
            role: the role.
            env: environment of the keeper.
            log: file to which the output is appended.
        """

    def preempted(self) -> bool:
        """Return whether the scheduler reclaims the nodes, if it does not send a signal to this process."""

    def lost_nodes(self) -> list[int]:
        """Return the indices in `nodes` of lost nodes.

        Raises:
            RunError: the scheduler does not respond.
        """

    def replace_nodes(self, is_stopped: Callable[[], bool]) -> bool:
        """Replace the lost nodes by others. Before the call, all roles must have ended.

        Args:
            is_stopped: returns True to end the wait for nodes.

        Returns:
            False if this job cannot get enough nodes, so that only `requeue` can help.

        Raises:
            UserError: no nodes become available, or the wait was stopped.
        """

    def requeue(self) -> None:
        """Make the scheduler start the same command again later, if it can. Called after a stop that it requested."""

    def close(self) -> None:
        """Release all resources of this backend. Before the call, all roles must have ended."""


def keeper_command(role: Role, config: Config, *, shielded: bool) -> list[str]:
    """Return the command line of a role's keeper. `shielded`: see launch/keeper.py."""
    command = module_command("launch.keeper", "--grace", str(config.launch.grace_seconds))
    command += ["--cgroup", cgroup.group_name(config.run.dir, role.name)]
    if shielded:
        command.append("--shielded")
    if role.gpus:
        command += ["--gpus", ",".join(map(str, role.gpus))]
    return [*command, "--", *role.argv]
