"""Backend `slurm`: steps of the Slurm job whose batch script is this process. Needs neither Ray nor a daemon.

Each keeper is a separate step (srun), shielded from the job's signals. A scheduler that reclaims nodes with a grace
time sends SIGTERM to all steps first, and to the batch script only at the end. So one more step, the sentinel, waits
for this signal: if SIGTERM ends the sentinel, the job is preempted or cancelled. If the sentinel ends for another
reason (a limit of steps, no memory), the supervisor starts it again. Near the time limit, `--signal=B:USR1@SECONDS`
sends a signal to the batch script.

Without `--no-kill`, Slurm ends a job that loses a node, and requeues it. With `--no-kill`, the job keeps its other
nodes permanently; the nodes beyond launch.nodes are spare nodes.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.backends import keeper_command
from launch.backends.local import PipedKeeper
from launch.plan import Node, Role
from launch.ports import PortReservation
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.imports import module_command

TERMINATED = 128 + signal.SIGTERM
"""Exit code of srun if SIGTERM ended its task."""
NODE_LOST = 255
"""Exit code of a role whose node is lost."""
MAX_SENTINEL_WAIT = 60.0
"""Maximum time between two starts of a sentinel that ends repeatedly."""
CLIENT_SECONDS = 60.0
"""Time limit of Slurm's commands, which hang for minutes if Slurm's controller is unreachable."""


@dataclass(frozen=True)
class JobNode:
    """A node of the job.

    Attributes:
        name: name in Slurm.
        het_group: index of its component of a heterogeneous job; None in other jobs.
    """

    name: str
    het_group: int | None


class TrainerKeeper(PipedKeeper):
    """A trainer's keeper on `node`.

    It verifies exit code 0, which means that the run is complete, because srun also exits with 0 if the node is lost.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path, lock_fd: int, node: str) -> None:
        super().__init__(command, env, log, lock_fd)
        self._node = node
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code: 0 only if Slurm confirms that the node is in the job, None while Slurm does not respond."""
        if self._code is None and (code := super().exit_code) is not None:
            try:
                self._code = NODE_LOST if code == 0 and self._node not in job_nodes_present() else code
            except RunError:  # retried at the next poll
                return None
        return self._code


class SlurmBackend:
    """Starts roles as steps of a Slurm job."""

    def __init__(self, config: Config, lock_fd: int) -> None:
        self._job = job_nodes(os.environ)
        count = config.launch.nodes
        if len(self._job) < count:
            raise UserError(
                f"launch.nodes = {count}: the Slurm job has {len(self._job)} nodes; expected at least {count} "
                f"(sbatch --nodes={count})"
            )
        node_name = os.environ.get("SLURMD_NODENAME")
        if node_name != self._job[0].name:
            raise UserError(
                f"launch.backend = slurm: this process is on {node_name or 'no node of the job'}; expected the job's "
                f"first node, {self._job[0].name}; start with `rlsys submit` or in an sbatch script"
            )
        self._job, self._spare = self._job[:count], self._job[count:]
        self.nodes = self._node_list()
        self._config = config
        self._srun_args = config.launch.srun_args
        self._lock_fd = lock_fd
        self._sentinel: PipedKeeper | None = None
        self._start_sentinel: Callable[[], PipedKeeper]
        self._next_sentinel, self._sentinel_wait = 0.0, 1.0
        """Earliest time of the sentinel's next start, and the minimum time in seconds from that start to the next."""
        self._ports = PortReservation("")
        self._port_steps: list[subprocess.Popen[str]] = []
        """Steps that reserve ports on other nodes."""

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        steps = {node: self._start_port_step(node, n) for node, n in need.items() if node != 0}
        ports = {0: self._ports.choose(need[0])} if 0 in need else {}
        deadline = time.monotonic() + CLIENT_SECONDS
        for node, step in steps.items():
            assert step.stdout is not None
            readable, _, _ = select.select([step.stdout], [], [], max(deadline - time.monotonic(), 0))
            ports[node] = [int(port) for port in step.stdout.readline().split()] if readable else []
            if len(ports[node]) != need[node]:
                step.kill()
                _, message = step.communicate()
                raise RunError(
                    f"node {self.nodes[node].name}: cannot reserve {need[node]} ports: "
                    f"{message.strip()[-300:] or f'no response within {CLIENT_SECONDS:g} s'}"
                )
        return ports

    def _start_port_step(self, node: int, n: int) -> subprocess.Popen[str]:
        """Start a step that prints `n` free ports of a node, and reserves them while it runs."""
        command = [*self._srun(node), *module_command("launch.ports", str(n))]
        step = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._port_steps.append(step)
        return step

    def start(self, role: Role, env: dict[str, str], log: Path) -> PipedKeeper:
        if self._sentinel is None:
            self._start_sentinel = lambda: PipedKeeper(
                [*self._srun(0), "sleep", "infinity"], env, log.with_name("scheduler.log"), self._lock_fd
            )
            self._sentinel = self._start_sentinel()
        keeper = keeper_command(role, self._config, shielded=True)
        command = [*self._srun(role.node), *self._srun_args, *keeper]
        if role.kind == "trainer":
            return TrainerKeeper(command, env, log, self._lock_fd, self._job[role.node].name)
        return PipedKeeper(command, env, log, self._lock_fd)

    def preempted(self) -> bool:
        if self._sentinel is None or (code := self._sentinel.exit_code) is None:
            return False
        if code == TERMINATED:
            return True
        if time.monotonic() >= self._next_sentinel:
            self._sentinel.release()
            self._sentinel = self._start_sentinel()
            self._next_sentinel = time.monotonic() + self._sentinel_wait
            self._sentinel_wait = min(2 * self._sentinel_wait, MAX_SENTINEL_WAIT)
        return False

    def lost_nodes(self) -> list[int]:
        present = set(job_nodes_present())
        return [i for i, node in enumerate(self._job) if node.name not in present]

    def replace_nodes(self, is_stopped: Callable[[], bool]) -> bool:
        """Replace lost nodes by spare nodes of the same component of a heterogeneous job."""
        present = set(job_nodes_present())
        for i in self.lost_nodes():
            candidates = [
                s for s in self._spare if s.name in present and s.het_group == self._job[i].het_group
            ]
            if not candidates:
                return False
            self._spare.remove(candidates[0])
            self._job[i] = candidates[0]
        self.nodes = self._node_list()
        return True

    def requeue(self) -> None:
        """Requeue the job if it is still running.

        Slurm itself requeues a preempted job only if the job is still running at the end of its grace time. A job
        that is cancelled or has lost a node is not running any more.
        """
        job = os.environ["SLURM_JOB_ID"]
        if "JobState=RUNNING" in client(["scontrol", "--oneliner", "show", "job", job]):
            client(["scontrol", "requeue", job])

    def close(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
        self._ports.release()
        for step in self._port_steps:
            step.kill()
            step.communicate()

    def _node_list(self) -> list[Node]:
        """Return the nodes of the run, with their addresses."""
        names = [node.name for node in self._job]
        return [Node(n, a) for n, a in zip(names, node_addresses(names), strict=True)]

    def _srun(self, node: int) -> list[str]:
        """Return the srun command of a step with one task that shares its node with other steps."""
        job = self._job[node]
        args = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={job.name}"]
        args += ["--cpu-bind=none", "--unbuffered", "--kill-on-bad-exit=0", "--export=ALL"]
        return args if job.het_group is None else [*args, f"--het-group={job.het_group}"]


def job_nodes(env: Mapping[str, str]) -> list[JobNode]:
    """Return the nodes of the job in the environment `env`; the first is the node of the batch script.

    Raises:
        UserError: this process is not in a Slurm job.
    """
    if "SLURM_JOB_ID" not in env:
        raise UserError(
            "launch.backend = slurm: this process is not in a Slurm job; use `rlsys submit` or an sbatch script"
        )
    groups = int(env.get("SLURM_HET_SIZE", "0"))
    if not groups:
        return [JobNode(name, None) for name in expand(env["SLURM_JOB_NODELIST"])]
    lists = [env[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"] for g in range(groups)]
    return [JobNode(name, g) for g, names in enumerate(lists) for name in expand(names)]


def job_nodes_present() -> list[str]:
    """Return the names of the nodes that this process's job has now, in all its components.

    Raises:
        RunError: Slurm does not respond.
    """
    description = client(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]])
    lists = re.findall(r" NodeList=([^ (]+)", description)
    return expand(",".join(lists)) if lists else []


def expand(node_list: str) -> list[str]:
    """Expand a node list: `node[1-3]` -> node1, node2, node3."""
    return client(["scontrol", "show", "hostnames", node_list]).split()


def node_addresses(names: list[str]) -> list[str]:
    """Return the IP addresses at which the nodes reach each other, in the order of `names`."""
    descriptions = [client(["scontrol", "--oneliner", "show", "node", name]) for name in names]
    matches = [re.search(r"NodeAddr=(\S+)", line) for line in descriptions]
    hosts = [m[1] if m else name for m, name in zip(matches, names, strict=True)]
    ips = [socket.gethostbyname(host) for host in hosts]
    # Some systems map a machine's own name to loopback, which other machines cannot reach.
    if len(ips) > 1 and ips[0].startswith("127.") and not ips[1].startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((ips[1], 9))  # sends nothing: only selects a route
            ips[0] = s.getsockname()[0]
    return ips


def client(command: list[str]) -> str:
    """Run one of Slurm's commands, and return its standard output.

    Raises:
        RunError: the command failed; the message contains its standard error.
        UserError: the command is not on PATH.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=CLIENT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise UserError(f"launch.backend = slurm: PATH has no {command[0]}, a command of Slurm") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]}: no answer within {CLIENT_SECONDS:g} s") from None
    if result.returncode:
        raise RunError(
            f"{' '.join(command[:2])}: {result.stderr.strip() or f'exit code {result.returncode}'}"
        )
    return result.stdout
