"""Real Slurm cluster of several nodes on one machine: munged, slurmctld and one slurmd per node, without systemd.

Nodes differ only in name, spool folder and port. All files are in one folder; `stop` ends all processes. Signals
reach only the tasks of a step, not their children (proctrack/pgid), as with cgroups on a production cluster.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PREEMPTION_GRACE = 20
GPUS = 8
"""GPUs per node that the scheduler allocates; no GPU exists. Memory likewise."""
TIMEOUT_S = 800.0
DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"

CONF = """\
ClusterName=rlsys{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=5
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-{nodes}] NodeAddr=127.0.0.1 NodeHostname={host} Port=[{first}-{last}] CPUs=8 Sockets=1 \
CoresPerSocket=8 ThreadsPerCore=1 RealMemory=65536 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return which Slurm programs are not installed, or None if a cluster can start."""
    absent = [d for d in (*DAEMONS, "sbatch", "srun") if shutil.which(d, path=_PATH) is None]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else None


class SlurmCluster:
    """A running cluster. Its commands need `env`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        port = self._free_port_range(nodes + 1)
        (folder / "state").mkdir(parents=True)
        conf = CONF.format(
            folder=folder, nodes=nodes, port=port, first=port + 1, last=port + nodes, grace=PREEMPTION_GRACE,
            host=socket.gethostname().split(".")[0], user=getpass.getuser(), gpus=GPUS,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(conf)
        for i in range(GPUS):
            (folder / f"gpu{i}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self.env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._start()

    @staticmethod
    def _free_port_range(n: int) -> int:
        """Return the first of `n` consecutive free ports below the range of ephemeral ports."""
        for first in range(17000, 30000, 20):
            with contextlib.ExitStack() as stack:
                try:
                    for i in range(n):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", first + i))
                except OSError:
                    continue
                return first
        raise AssertionError("no free ports")

    def _start(self) -> None:
        d = self.folder
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self._daemon("munged", "--force", *(f"--{option}={d / name}" for option, name in files.items()))
        self._daemon("slurmctld", "-c", "-f", str(d / "slurm.conf"))
        for n in range(1, self.nodes + 1):
            self.start_node(f"node{n}")
        idle = ("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D")
        self.wait(lambda: self.run(*idle).strip() == str(self.nodes))

    def _daemon(self, *command: str) -> None:
        quiet = subprocess.DEVNULL
        subprocess.run(command, env=self.env, check=True, stdin=quiet, stdout=quiet, stderr=quiet)

    def run(self, *command: str) -> str:
        """Run a Slurm command and return its standard output. The timeout covers a dead controller."""
        process = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=200)
        assert process.returncode == 0, f"{command}: {process.stderr}"
        return process.stdout

    def wait(self, condition: Callable[[], bool], description: str = "") -> None:
        """Wait until a condition is true, and fail with the cluster's state after TIMEOUT_S."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{description}\n{self._state()}"
            time.sleep(0.1)

    def _state(self) -> str:
        logs = [path.read_text(errors="replace")[-1500:] for path in self.folder.glob("slurmctld.log")]
        return self.run("squeue", "--long") + "\n".join(logs)

    def job_state(self, job: str) -> str:
        output = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.split("=")[1] for word in output.split() if word.startswith("JobState="))

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node and all processes of its jobs."""
        victims = [p for p in psutil.process_iter() if self._is_on(p, name)]
        pid = int((self.folder / f"{name}.pid").read_text())
        for process in [psutil.Process(pid), *victims]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def _is_on(self, process: psutil.Process, node: str) -> bool:
        try:
            env = process.environ()
            if env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
                return True
            return process.name() == "slurmstepd" and any(self._is_on(c, node) for c in process.children())
        except psutil.Error:
            return False

    def start_node(self, name: str) -> None:
        self._daemon("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name)

    def job_processes(self) -> list[psutil.Process]:
        """Return the processes of all jobs of this cluster."""
        return [p for p in psutil.process_iter() if self._is_of_a_job(p)]

    def _is_of_a_job(self, process: psutil.Process) -> bool:
        try:
            env = process.environ()
        except psutil.Error:
            return False
        return env.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURM_JOB_ID" in env

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until they have ended."""
        self.run("scancel", "--user", getpass.getuser())
        self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
        self.wait(lambda: not self.run("squeue", "--noheader").strip(), "cancelled jobs do not end")

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.run("scancel", "--user", getpass.getuser())
        for process in self.job_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        files = [
            *self.folder.glob("node*.pid"),
            *self.folder.glob("*ctld.pid"),
            *self.folder.glob("munged.pid"),
        ]
        pids = [int(text) for file in files if (text := file.read_text().strip())]
        daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        for daemon in daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                daemon.terminate()
        _, stubborn = psutil.wait_procs(daemons, timeout=10)
        for daemon in stubborn:
            daemon.kill()
