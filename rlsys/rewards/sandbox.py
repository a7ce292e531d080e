"""Sandbox for untrusted programs, and for tests that call their definitions.

If bubblewrap (`bwrap`) is installed and works, each process has its own file system, with a read-only Python and /usr
and a small /tmp. The process has no network and no capabilities, and sees no other processes. If this user is root,
the process has another user id. Without bubblewrap, a program can access the files, the processes and the network of
this user. `Sandbox.missing` lists the protections that the machine lacks.

Limits of time, memory of a process, file size, output and number of processes apply on every machine.

Tests run in a separate sandbox and call the program's process (isolated.py), so that the program cannot change the
verdict except by the values that it returns. A kernel vulnerability breaks these protections: for programs of unknown
users, run a SandboxFusion server in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlsys.core.control_groups import limited, limiting_group
from rlsys.core.sockets import remove_tree, role_folder
from rlsys.rewards import isolated

OUTPUT_BYTES = 2**20
"""Size of the standard output that is read, in bytes."""
FILE_BYTES = 2**24
"""Largest size of a file that a program writes, in bytes."""
FOLDER_BYTES = 2**26
"""Size of a sandbox's /tmp and of its /dev/shm, in bytes."""
PROCESSES = 16
"""Largest number of processes of a program."""
_USER_IDS = range(61184, 65520)
"""User ids without an account, from the range that systemd assigns to running services."""

log = logging.getLogger("rlsys.rewards")


class Undecidable(Exception):
    """Raised for tests that can only run in the program's own process, which can deceive them."""


@dataclass(frozen=True)
class Outcome:
    """Result of a program.

    Attributes:
        ok: whether the program ended with exit code 0 within the time limit.
        output: the first OUTPUT_BYTES of the standard output.
    """

    ok: bool
    output: str


@dataclass(frozen=True)
class Sandbox:
    """A sandbox on this machine.

    Attributes:
        seconds: time limit of a program, or of its tests, in seconds.
        memory_mb: memory limit of one process, in MiB.
    """

    seconds: float
    memory_mb: int

    @staticmethod
    def unlimited() -> list[str]:
        """Return descriptions of missing resource limits, without which a program can slow down other processes."""
        if limiting_group() is None:
            return [
                "the memory and CPU of all processes of a program together (no writable cgroup v2 with both)"
            ]
        return []

    @staticmethod
    def missing() -> list[str]:
        """Return descriptions of what this machine cannot protect from a program."""
        if _wrapper() is None:
            return ["files, processes and the network of this user (no working bubblewrap: bwrap)"]
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            return ["the number of processes, as root without setpriv"]
        return []

    def run(self, program: str, stdin: str) -> Outcome:
        """Run Python source in an empty folder, which is deleted afterwards.

        Args:
            program: source of the program.
            stdin: text of the standard input.
        """
        with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as output_file:
            input_file.write(stdin.encode(errors="replace"))
            input_file.seek(0)
            with self._start("run", program, (), input_file, output_file) as process:
                ok = _wait(process, time.monotonic() + self.seconds) == 0
            return Outcome(ok, os.pread(output_file.fileno(), OUTPUT_BYTES, 0).decode(errors="replace"))

    def passes(self, program: str, tests: str) -> bool:
        """Return whether tests of a program's definitions end without an exception.

        Args:
            program: source of the program.
            tests: source of the tests.

        Raises:
            Undecidable: the tests can only run in the program's process.
        """
        deadline = time.monotonic() + self.seconds
        checker_socket, program_socket = socket.socketpair()
        with checker_socket, program_socket, ExitStack() as stack:
            stack.enter_context(self._start("serve", program, (program_socket.fileno(),)))
            checker = stack.enter_context(self._start("check", tests, (checker_socket.fileno(),)))
            checker_socket.close()
            program_socket.close()  # so that each process detects the end of the other one
            code = _wait(checker, deadline)
        if code == isolated.EXIT_NOT_PLAIN:
            raise Undecidable(
                "the tests pass the program a function or another object that cannot be encoded"
            )
        return code == 0

    def passes_in_its_process(self, program: str, tests: str) -> bool:
        """Return whether tests pass that run in the program's process, where a malicious program can deceive them.

        Args:
            program: source of the program.
            tests: source of the tests.
        """
        token = secrets.token_hex(16).encode()
        with tempfile.TemporaryFile() as tests_file, tempfile.TemporaryFile() as answers_file:
            tests_file.write(token + b"\n" + tests.encode(errors="replace"))
            tests_file.seek(0)
            descriptors = tests_file.fileno(), answers_file.fileno()
            with self._start("both", program, descriptors) as process:
                ok = _wait(process, time.monotonic() + self.seconds) == 0
            return ok and os.pread(answers_file.fileno(), 100, 0).strip() == token

    @contextmanager
    def _start(
        self,
        role: str,
        source: str,
        descriptors: Sequence[int],
        stdin: BinaryIO | int = subprocess.DEVNULL,
        stdout: BinaryIO | int = subprocess.DEVNULL,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run isolated.py while the context is active. On exit, kill it with all its descendants.

        Args:
            role: role of isolated.py.
            source: source of the program, or of the tests.
            descriptors: file descriptors that the process inherits, for its role.
            stdin: file of the standard input.
            stdout: file of the standard output.
        """
        with _program_folder() as folder, limited(self._group_limits()) as grouped:
            program = Path(folder, "program.py")
            program.write_text(source, encoding="utf-8", errors="replace")
            program.chmod(0o644)
            process = subprocess.Popen(
                [*grouped, *self._command(role, program), *map(str, descriptors)],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                start_new_session=True,
                pass_fds=descriptors,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its descendants
                process.kill()
                process.wait()

    def _command(self, role: str, program: Path) -> list[str]:
        """Return the command that runs isolated.py with the file `program`, in bubblewrap if it works."""
        wrapper = _wrapper()
        if wrapper is None:
            return [sys.executable, "-I", "-S", isolated.__file__, role, self._limits(), str(program)]
        sandbox_path = "/tmp/program.py"
        return [
            *wrapper, "--ro-bind", str(program), sandbox_path, "--remount-ro", "/", "--", *_user(),
            _PYTHON, "-I", "-S", _SCRIPT, role, self._limits(), sandbox_path,
        ]  # fmt: skip

    def _group_limits(self) -> dict[str, int | str]:
        """Return the cgroup limits of all processes of a program together. The memory limit includes the folders."""
        return {
            "memory.max": self.memory_mb * 2**20 + 2 * FOLDER_BYTES, "pids.max": PROCESSES + 8,
            "cpu.max": "100000 100000",
        }  # fmt: skip

    def _limits(self) -> str:
        """Return the resource limits of each process, as JSON for isolated.py."""
        limits = {
            "CPU": max(1, round(self.seconds + 0.5)), "AS": self.memory_mb * 2**20, "FSIZE": FILE_BYTES, "NOFILE": 64,
            "NPROC": PROCESSES, "CORE": 0,
        }  # fmt: skip
        return json.dumps(limits)


@contextmanager
def _program_folder() -> Iterator[str]:
    """Create a folder for a program, and delete it when the context ends."""
    folder = tempfile.mkdtemp(dir=role_folder())
    try:
        yield folder
    finally:
        remove_tree(folder)


def _wait(process: subprocess.Popen[Any], deadline: float) -> int | None:
    """Wait for a process, and return its exit code; None if it is still running at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


_PYTHON, _SCRIPT = f"/python/bin/{Path(os.path.realpath(sys.executable)).name}", "/isolated.py"


@functools.cache
def _wrapper() -> tuple[str, ...] | None:
    """Return the start of a bubblewrap command, without the program's file; None if bubblewrap does not work."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return None
    size = ("--size", str(FOLDER_BYTES), "--perms", "1777", "--tmpfs")
    command = [
        bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
        "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin",
        "--ro-bind", "/usr", "/usr", "--ro-bind", sys.base_prefix, "/python", "--ro-bind", isolated.__file__, _SCRIPT,
        "--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev", *size, "/tmp", "--chdir", "/tmp",
    ]  # fmt: skip
    for name in ("/bin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    if os.geteuid() == 0 and shutil.which("setpriv"):
        command[1:2] = [f"--unshare-{namespace}" for namespace in ("pid", "net", "ipc", "uts", "cgroup-try")]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    trial = subprocess.run([*command, "--", *_user(), _PYTHON, "-I", "-S", "-c", ""], capture_output=True)
    if trial.returncode != 0:
        log.warning(
            "bubblewrap does not work on this machine: %s",
            trial.stderr.decode(errors="replace").strip()[:300],
        )
        return None
    return tuple(command)


def _user() -> list[str]:
    """Return the start of a command that switches to a random unused user id; empty if this user is not root."""
    if os.geteuid() != 0 or (setpriv := shutil.which("setpriv")) is None:
        return []
    user = str(secrets.choice(_USER_IDS))
    return [setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
