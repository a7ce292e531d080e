"""Processes of this machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from launch import cgroup
from launch.backends import keeper_command
from launch.plan import Node, Role
from launch.ports import HeldPorts
from rlsys.config import Config


class PipedKeeper:
    """A keeper at the other end of a process's standard input: the process itself, or what srun leads to.

    `group`: name of a control group on this machine that is killed when that process has ended, also where guard and
    keeper were killed together; empty: there is none here.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, lock_fd: int, group: str = ""
    ) -> None:
        self._group = group
        with log.open("ab") as out:
            # The pipe is the lifeline: when this process ends, however, the keeper reads its end.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=env,
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
        if self._process.stdin.closed:  # released: it has ended
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def release(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """For a process that holds nothing."""
        self._process.kill()
        self._process.wait()
        self.release()


class LocalBackend:
    def __init__(self, config: Config, lock_fd: int) -> None:
        self.nodes = [Node("localhost")]
        self._ports = HeldPorts(config.engine.host)
        if config.engine.port:
            self._ports.hold(config.engine.port, config.engine.count)
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

    def replace_nodes(self, stopped: Callable[[], bool]) -> bool:
        return True

    def requeue(self) -> None: ...

    def close(self) -> None:
        self._ports.release()
