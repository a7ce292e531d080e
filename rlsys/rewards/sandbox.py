"""Runs one program that nobody trusts: limits on time, memory, files and processes, no network, no secrets.

What it keeps away: the network (a network namespace of its own, where the kernel gives one to this user), this
process' environment and files in the working folder, endless loops, memory, output and processes. What it does not:
files that this user may read can be read, and a hole in the kernel is one. For programs of strangers, run a
SandboxFusion server in a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OUTPUT_BYTES = 2**20
FILE_BYTES = 2**24
PROCESSES = 64
_NEWUSER, _NEWNET, _NEWIPC = 0x10000000, 0x40000000, 0x08000000
_NO_NEW_PRIVILEGES = 38
_DIE_WITH_PARENT = 1


@dataclass(frozen=True)
class Outcome:
    """`ok`: it ended by itself with exit code 0. `output`: the beginning of its standard output."""

    ok: bool
    output: str


def run_program(program: str, said: str, *, seconds: float, memory_mb: int) -> Outcome:
    """Python source with standard input `said`, in an empty folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlsys-code-") as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        out = Path(folder, ".stdout")
        with out.open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(path)],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                start_new_session=True,
                preexec_fn=_confine(seconds, memory_mb),
            )
            try:
                process.communicate(said.encode(errors="replace"), timeout=seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, "")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
                process.kill()
                process.wait()
        with out.open("rb") as file:
            said_back = file.read(OUTPUT_BYTES)
        return Outcome(process.returncode == 0, said_back.decode(errors="replace"))


def _confine(seconds: float, memory_mb: int) -> Callable[[], None]:
    """What the child does to itself before it runs the program. What it needs is looked up here, before the fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = _namespaces()
    processor = max(1, round(seconds + 0.5))
    limits = (
        (resource.RLIMIT_CPU, (processor, processor)),
        (resource.RLIMIT_AS, (memory_mb * 2**20,) * 2),
        (resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES)),
        (resource.RLIMIT_NOFILE, (64, 64)),
        (resource.RLIMIT_NPROC, (PROCESSES, PROCESSES)),
        (resource.RLIMIT_CORE, (0, 0)),
    )

    def confine() -> None:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if namespaces:
            libc.unshare(namespaces)
        for which, limit in limits:
            resource.setrlimit(which, limit)

    return confine


@cache
def _namespaces() -> int:
    """Flags of the namespaces that this user may have; 0 where it may have none. Tried once, in a child."""
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = _NEWUSER | _NEWNET | _NEWIPC
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(wanted) == 0 else 1)
    return wanted if os.waitpid(child, 0)[1] == 0 else 0


def has_network_namespace() -> bool:
    """Whether programs run without a network here."""
    return _namespaces() != 0
