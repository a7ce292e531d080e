"""Backend `local`: processes of this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from launch import cgroup
from launch.backends import keeper_command
from launch.plan import Node, Role
from launch.ports import PortReservation
from rlsys.config import Config


class PipedKeeper:
    """A keeper that reads orders from its standard input: a local process, or one behind srun."""

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, lock_fd: int, group: str = ""
    ) -> None:
        """Start the process.

        Args:
            command: command line of the keeper.
            env: environment of the keeper.
            log: file to which the output is appended.
            lock_fd: file descriptor of the run's lock, which the keeper inherits.
            group: name of the role's control group on this machine; empty for none. It is killed when the process
                has ended, because guard and keeper may have been killed together.
        """
        self._group = group
        with log.open("ab") as output:
            # When this process ends in any way, the keeper reads the end of the pipe and ends its role.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env,
                start_new_session=True, pass_fds=(lock_fd,),
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._group:
            cgroup.end(self._group)
            self._group = ""
        return code if code is None or code >= 0 else 128 - code

    def order(self, order: bytes) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:  # the keeper was released
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def release(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process itself, without the grace time of a keeper. Only for processes without descendants."""
        self._process.kill()
        self._process.wait()
        self.release()


class LocalBackend:
    """Starts all roles on this machine."""

    def __init__(self, config: Config, lock_fd: int) -> None:
        self.nodes = [Node("localhost")]
        self._ports = PortReservation(config.engine.host)
        if config.engine.port:
            self._ports.reserve(config.engine.port, config.engine.count)
        self._config = config
        self._lock_fd = lock_fd

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        return {node: self._ports.choose(n) for node, n in need.items()}

    def start(self, role: Role, env: dict[str, str], log: Path) -> PipedKeeper:
        command = keeper_command(role, self._config, shielded=False)
        return PipedKeeper(
            command, env, log, self._lock_fd, cgroup.group_name(self._config.run.dir, role.name)
        )

    def preempted(self) -> bool:
        return False

    def lost_nodes(self) -> list[int]:
        return []

    def replace_nodes(self, is_stopped: Callable[[], bool]) -> bool:
        return True

    def requeue(self) -> None: ...

    def close(self) -> None:
        self._ports.release()
