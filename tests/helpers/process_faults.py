"""Fault injection for a server process behind a proxy: SIGKILL, SIGSTOP, full disk, second owner, and link faults."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import signal
import subprocess
from abc import ABC, abstractmethod

from tests.helpers.proxy import Proxy
from tests.helpers.servers import ROOT


def inject_link_fault(proxy: Proxy, fault: str, rng: random.Random) -> None:
    """Start a fault of a link."""
    if fault == "cut":
        proxy.cut()
    elif fault == "delayed":
        proxy.slow(rng.uniform(0.05, 0.5))
    elif fault == "flipped":

        def flip(data: bytes) -> bytes:
            if rng.random() > 0.02:
                return data
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(changed)

        proxy.change(flip)
    else:
        assert fault == "doubled"
        proxy.change(lambda data: data * 2 if rng.random() < 0.02 else data)


def limit_files(pid: int, size: int) -> None:
    """Limit the files of a process to `size` bytes, to simulate a full disk."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def double_request(data: bytes) -> bytes:
    """Duplicate a block if it is a whole HTTP request, because a duplicated part is no valid request."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return data * 2 if end and len(body) == int(length[1] if length else 0) else data


def inject_http_link_fault(link: Proxy, fault: str, rng: random.Random) -> None:
    """Start a fault of a link that carries plain HTTP."""
    if fault == "flipped":  # in the first byte of a block: plain HTTP does not detect other flips
        link.change(lambda data: bytes([data[0] ^ 1]) + data[1:])
    elif fault == "doubled":
        link.change(double_request)
    else:
        inject_link_fault(link, fault, rng)


class ServerProcess(ABC):
    """A server process and the link to it. Subclasses set `link` and call `start`, which sets `process`."""

    process: subprocess.Popen[str] | subprocess.Popen[bytes]
    link: Proxy

    @abstractmethod
    def start(self) -> None:
        """Start the process again, at the same address."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line, which a second owner also uses."""

    def second_owner(self) -> None:
        """Start a second process on the same folder and check that it exits with an error message."""
        process = subprocess.run(self.command(), cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 2 and "in use" in process.stderr, process.stderr

    def inject_fault(self, fault: str, rng: random.Random) -> None:
        """Start a fault. `heal` ends it."""
        if fault == "killed":
            self.process.kill()
            self.process.wait()
            self.start()
        elif fault == "stopped":
            self.process.send_signal(signal.SIGSTOP)
        elif fault == "disk full":
            limit_files(self.process.pid, 0)
        elif fault == "second owner":
            self.second_owner()
        elif fault != "none":
            inject_http_link_fault(self.link, fault, rng)

    def heal(self) -> None:
        """End all active faults."""
        self.process.send_signal(signal.SIGCONT)
        limit_files(self.process.pid, resource.RLIM_INFINITY)
        self.link.heal()
