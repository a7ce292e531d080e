"""Tasks of the Slurm job that this process is the batch script of. No Ray, no daemon of ours.

Each keeper is a step of its own (srun), shielded from the job's signals. A scheduler that takes the nodes back with a
grace time sends SIGTERM to all steps at once and to the batch script only at the end, so one more step does nothing
but wait for it: the sentinel. That a SIGTERM ends it is how the supervisor hears of a preemption or an scancel; when
it ends otherwise (a step limit, no memory) it is started again. Near the time limit `--signal=B:USR1@SECONDS` reaches
the batch script itself.

Without `--no-kill`, Slurm ends a job that loses a node, and requeues it. With it the job keeps its other nodes, for
good: those beyond launch.nodes are spare ones.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.backends import keeper_command
from launch.backends.local import PipedKeeper
from launch.plan import Node, Role
from launch.ports import HeldPorts
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError

TAKEN = 128 + signal.SIGTERM
"""Exit code of an srun whose task the scheduler ended."""
LOST = 255
"""Exit code of a role whose node is gone."""
LONGEST_WAIT = 60.0
"""Between two starts of a sentinel that does not stay."""
CLIENT_SECONDS = 60.0
"""Slurm's commands hang for minutes when its controller is gone."""


@dataclass(frozen=True)
class JobNode:
    name: str
    het_group: int | None
    """Component of a heterogeneous job that it belongs to; None in a plain one."""


class TrainerKeeper(PipedKeeper):
    """A trainer's keeper on `node`. Its 0 says that the run is done; srun ends with 0 also when a node is gone."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path, lock_fd: int, node: str) -> None:
        super().__init__(command, env, log, lock_fd)
        self._node = node
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """A 0 is told when Slurm says that the node is still there."""
        if self._code is None and (code := super().exit_code) is not None:
            try:
                self._code = LOST if code == 0 and self._node not in nodes_left() else code
            except RunError:  # asked again at the next look
                return None
        return self._code


class SlurmBackend:
    def __init__(self, config: Config, lock_fd: int) -> None:
        self._job = job_nodes(os.environ)
        wanted = config.launch.nodes
        if len(self._job) < wanted:
            raise UserError(
                f"launch.nodes = {wanted}, but the Slurm job has {len(self._job)} (sbatch --nodes={wanted})"
            )
        here = os.environ.get("SLURMD_NODENAME")
        if here != self._job[0].name:
            raise UserError(
                f"launch.backend = slurm: this is {here or 'no node of the job'}, but the first node is "
                f"{self._job[0].name}; start with `rlsys submit` or inside an sbatch script"
            )
        self._job, self._spare = self._job[:wanted], self._job[wanted:]
        self.nodes = self._addressed()
        self._config = config
        self._srun_args = config.launch.srun_args
        self._lock_fd = lock_fd
        self._sentinel: PipedKeeper | None = None
        self._post_sentinel: Callable[[], PipedKeeper]
        self._next_sentinel, self._sentinel_wait = 0.0, 1.0
        self._ports = HeldPorts("")
        self._holders: list[subprocess.Popen[str]] = []
        """Steps on other nodes that hold ports there."""

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        steps = {node: self._hold_ports(node, n) for node, n in need.items() if node != 0}
        found = {0: self._ports.choose(need[0])} if 0 in need else {}
        deadline = time.monotonic() + CLIENT_SECONDS
        for node, step in steps.items():
            assert step.stdout is not None
            answered, _, _ = select.select([step.stdout], [], [], max(deadline - time.monotonic(), 0))
            found[node] = [int(port) for port in step.stdout.readline().split()] if answered else []
            if len(found[node]) != need[node]:
                step.kill()
                _, said = step.communicate()
                raise RunError(
                    f"{self.nodes[node].name}: no ports there: {said.strip()[-300:] or 'no answer'}"
                )
        return found

    def _hold_ports(self, node: int, n: int) -> subprocess.Popen[str]:
        """A step there that prints them, and holds them as long as it runs."""
        command = [*self._srun(node), sys.executable, "-m", "launch.ports", str(n)]
        step = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._holders.append(step)
        return step

    def start(self, role: Role, env: dict[str, str], log: Path) -> PipedKeeper:
        if self._sentinel is None:
            self._post_sentinel = lambda: PipedKeeper(
                [*self._srun(0), "sleep", "infinity"], env, log.with_name("scheduler.log"), self._lock_fd
            )
            self._sentinel = self._post_sentinel()
        keeper = keeper_command(role, self._config, shielded=True)
        command = [*self._srun(role.node), *self._srun_args, *keeper]
        if role.kind == "trainer":
            return TrainerKeeper(command, env, log, self._lock_fd, self._job[role.node].name)
        return PipedKeeper(command, env, log, self._lock_fd)

    def preempted(self) -> bool:
        if self._sentinel is None or (code := self._sentinel.exit_code) is None:
            return False
        if code == TAKEN:
            return True
        if time.monotonic() >= self._next_sentinel:
            self._sentinel.release()
            self._sentinel = self._post_sentinel()
            self._next_sentinel = time.monotonic() + self._sentinel_wait
            self._sentinel_wait = min(2 * self._sentinel_wait, LONGEST_WAIT)
        return False

    def lost_nodes(self) -> list[int]:
        here = set(nodes_left())
        return [i for i, node in enumerate(self._job) if node.name not in here]

    def replace_nodes(self, stopped: Callable[[], bool]) -> bool:
        """By spare ones of the same component."""
        here = set(nodes_left())
        for i in self.lost_nodes():
            fit = [s for s in self._spare if s.name in here and s.het_group == self._job[i].het_group]
            if not fit:
                return False
            self._spare.remove(fit[0])
            self._job[i] = fit[0]
        self.nodes = self._addressed()
        return True

    def requeue(self) -> None:
        """Slurm requeues a preempted job only if it still runs when its grace time is over. A cancelled one, or one
        that lost a node, is not running any more: its fate is decided."""
        job = os.environ["SLURM_JOB_ID"]
        if "JobState=RUNNING" in client(["scontrol", "--oneliner", "show", "job", job]):
            client(["scontrol", "requeue", job])

    def close(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
        self._ports.release()
        for step in self._holders:
            step.kill()
            step.communicate()

    def _addressed(self) -> list[Node]:
        names = [node.name for node in self._job]
        return [Node(n, a) for n, a in zip(names, node_addresses(names), strict=True)]

    def _srun(self, node: int) -> list[str]:
        """A step of one task that shares its node with the others."""
        job = self._job[node]
        args = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={job.name}"]
        args += ["--cpu-bind=none", "--unbuffered", "--kill-on-bad-exit=0", "--export=ALL"]
        return args if job.het_group is None else [*args, f"--het-group={job.het_group}"]


def job_nodes(env: Mapping[str, str]) -> list[JobNode]:
    """The nodes of the job that `env` tells of, the batch script's own first."""
    if "SLURM_JOB_ID" not in env:
        raise UserError(
            "launch.backend = slurm: not inside a Slurm job; use `rlsys submit` or an sbatch script"
        )
    groups = int(env.get("SLURM_HET_SIZE", "0"))
    if not groups:
        return [JobNode(name, None) for name in expand(env["SLURM_JOB_NODELIST"])]
    lists = [env[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"] for g in range(groups)]
    return [JobNode(name, g) for g, names in enumerate(lists) for name in expand(names)]


def nodes_left() -> list[str]:
    """The nodes that this process's job still has, in all its components. Raises RunError when Slurm does not say."""
    told = client(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]])
    lists = re.findall(r" NodeList=([^ (]+)", told)
    return expand(",".join(lists)) if lists else []


def expand(node_list: str) -> list[str]:
    """`node[1-3]` -> node1, node2, node3."""
    return client(["scontrol", "show", "hostnames", node_list]).split()


def node_addresses(names: list[str]) -> list[str]:
    """IP addresses at which the nodes reach each other."""
    told = [client(["scontrol", "--oneliner", "show", "node", name]) for name in names]
    found = [re.search(r"NodeAddr=(\S+)", line) for line in told]
    hosts = [m[1] if m else name for m, name in zip(found, names, strict=True)]
    ips = [socket.gethostbyname(host) for host in hosts]
    # Some systems map a machine's own name to loopback, where no other machine finds it.
    if len(ips) > 1 and ips[0].startswith("127.") and not ips[1].startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((ips[1], 9))  # sends nothing: only asks which way it would go
            ips[0] = s.getsockname()[0]
    return ips


def client(command: list[str]) -> str:
    """Standard output of one of Slurm's commands. Raises RunError with its words."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CLIENT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise UserError(f"launch.backend = slurm: no {command[0]} on PATH") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]}: no answer within {CLIENT_SECONDS:g} s") from None
    if done.returncode:
        raise RunError(f"{' '.join(command[:2])}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
