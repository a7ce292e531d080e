"""Attack the servers of rlsys as another user of the machine. The script uses the standard library only.

It reads a Target as JSON from stdin, changes its user from root to `uid`, and prints one Attack per line as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  (imported before the user changes: the new one may not read Python's files)
import errno
import http.client
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

REQUEST_SECONDS = 10.0
"""Timeout of one HTTP request."""
MAX_READ_BYTES = 64 * 2**10
"""Number of bytes that are read of a response or a file."""
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
FORGED_KEY = "x" * 43
"""Invalid value for every kind of key."""
RUN_ENTRIES = [
    "config.yaml",
    "rollouts.sqlite",
    "metrics.jsonl",
    "owners/engine-0.yaml",
    "owners/1.json",
    "logs/trainer.log",
    "coordinator.json",
    "tenants/alice/key",
    "tenants/alice/ledger.sqlite",
    "checkpoints",
    "weights",
]
"""Files and folders in a run folder."""


@dataclass(frozen=True)
class Server:
    """A TCP server under attack.

    Attributes:
        name: name of the server's process.
        host: IP address on which the server listens.
        port: TCP port.
        open_paths: HTTP paths that are readable without a key.
    """

    name: str
    host: str
    port: int
    open_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """The processes, servers and files under attack.

    Attributes:
        uid: user ID of the attacker.
        processes: IDs of the processes under attack.
        servers: TCP servers.
        sockets: paths of Unix sockets.
        folders: folders that only their owner may access.
        files: files that the processes have open or mapped.
        temporary: folders of temporary files.
        secrets: keys that no other user may see.
    """

    uid: int
    processes: tuple[int, ...]
    servers: tuple[Server, ...]
    sockets: tuple[str, ...]
    folders: tuple[str, ...]
    files: tuple[str, ...]
    temporary: tuple[str, ...]
    secrets: tuple[str, ...]

    @classmethod
    def decode(cls, text: str) -> Target:
        values = json.loads(text)
        servers = tuple(
            Server(s["name"], s["host"], s["port"], tuple(s["open_paths"])) for s in values.pop("servers")
        )
        return cls(servers=servers, uid=values.pop("uid"), **{k: tuple(v) for k, v in values.items()})


@dataclass(frozen=True)
class Attack:
    """The result of one attack.

    Attributes:
        name: description of the attack.
        expected: outcome that a protected target has.
        outcomes: number of attempts by outcome.
        faults: descriptions of the attempts with another outcome.
    """

    name: str
    expected: str
    outcomes: dict[str, int]
    faults: list[str]


def outcome(call: Callable[[], Any]) -> str:
    """Return the name of the errno that `call` raises, or `done` if it raises none."""
    try:
        call()
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, type(e).__name__)
    return "done"


def attack(name: str, expected: Iterable[str], call: Callable[..., Any], subjects: Iterable[Any]) -> Attack:
    """Run `call` on each subject; an outcome that is not in `expected` is a fault.

    A subject that is a tuple holds several arguments.
    """
    allowed, outcome_counts, faults = set(expected), dict[str, int](), []
    for subject in subjects:
        arguments = subject if type(subject) is tuple else (subject,)
        result = outcome(partial(call, *arguments))
        outcome_counts[result] = outcome_counts.get(result, 0) + 1
        if result not in allowed:
            faults.append(f"{subject}: {result}")
    return Attack(name, " or ".join(sorted(allowed)), outcome_counts, faults)


# Files


def read(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_READ_BYTES)


def write(path: str | Path) -> None:
    os.close(os.open(path, os.O_WRONLY))


def attack_folders(target: Target) -> Iterator[Attack]:
    folders = [Path(folder) for folder in target.folders]
    files = [folder / name for folder in folders for name in RUN_ENTRIES]
    yield attack("list a run folder", ["EACCES"], os.listdir, folders)
    yield attack("read a file of a run", ["EACCES"], read, files)
    yield attack("write to a file of a run", ["EACCES"], write, files)
    yield attack("delete a file of a run", ["EACCES"], os.unlink, files)
    yield attack(
        "create a file in a run folder", ["EACCES"], Path.touch, [folder / "intruder" for folder in folders]
    )
    yield attack("rename a run folder", ["EACCES", "EPERM"], os.rename, [(f, f"{f}.old") for f in folders])


def attack_files(target: Target) -> Iterator[Attack]:
    """Attack the open files of the processes and the files in shared temporary folders."""
    refusal_errnos = ["EACCES", "EPERM", "ENOENT", "ENXIO"]
    tops = [entry for top in target.temporary for entry in os.walk(top)]
    temporary_files = [str(Path(folder) / name) for folder, _, names in tops for name in names]
    yield attack("read an open file", refusal_errnos, read, target.files)
    yield attack("read a temporary file", refusal_errnos, read, temporary_files)
    yield attack(
        "write to an open or temporary file", refusal_errnos, write, [*target.files, *temporary_files]
    )


# Processes


def attack_processes(target: Target) -> Iterator[Attack]:
    pids, missing_errnos = target.processes, ["ESRCH", "ENOENT"]
    denied = ["EACCES", "EPERM", *missing_errnos]
    libc = ctypes.CDLL(None, use_errno=True)

    def system(call: Any, *arguments: Any) -> int:
        result = int(call(*arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), "")
        return result

    def copy_descriptor(pid: int) -> None:
        descriptor = system(libc.syscall, SYS_PIDFD_OPEN, pid, 0)
        try:
            system(libc.syscall, SYS_PIDFD_GETFD, descriptor, 3, 0)
        finally:
            os.close(descriptor)

    for number in (0, signal.SIGCONT, signal.SIGHUP, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        yield attack(
            f"signal {int(number)}", ["EPERM", *missing_errnos], os.kill, [(pid, number) for pid in pids]
        )
    for name, request in (("PTRACE_ATTACH", PTRACE_ATTACH), ("PTRACE_SEIZE", PTRACE_SEIZE)):
        calls = [(libc.ptrace, request, pid, None, None) for pid in pids]
        yield attack(name, ["EPERM", *missing_errnos], system, calls)
    for file in ("environ", "mem", "maps", "io", "stack", "syscall", "auxv"):
        yield attack(f"read /proc/PID/{file}", denied, read, [f"/proc/{pid}/{file}" for pid in pids])
    for folder in ("fd", "map_files", "cwd/", "root/"):
        yield attack(
            f"list /proc/PID/{folder}", denied, os.listdir, [f"/proc/{pid}/{folder}" for pid in pids]
        )
    descriptors = [f"/proc/{pid}/fd/{n}" for pid in pids for n in (0, 3, 5, 9, 20)]
    yield attack("open /proc/PID/fd/N", denied, read, descriptors)
    yield attack("pidfd_getfd", ["EPERM", *missing_errnos], copy_descriptor, pids)
    limits = [(pid, resource.RLIMIT_NOFILE, (0, 0)) for pid in pids]
    yield attack("prlimit", ["EPERM", *missing_errnos], resource.prlimit, limits)
    yield attack("renice", denied, os.setpriority, [(os.PRIO_PROCESS, pid, 19) for pid in pids])
    yield attack("move to other cores", denied, os.sched_setaffinity, [(pid, {0}) for pid in pids])
    yield attack("oom_score_adj", denied, write, [f"/proc/{pid}/oom_score_adj" for pid in pids])
    secrets = [secret.encode() for secret in target.secrets]
    lines = dict.fromkeys(pids, b"")
    for pid in pids:
        with contextlib.suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    faults = [str(pid) for pid, line in lines.items() if any(secret in line for secret in secrets)]
    yield Attack("keys on command lines", "none", {"lines": len(lines)}, faults)


# Sockets


def attack_unix_sockets(target: Target) -> Iterator[Attack]:
    def connect(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)

    def replace(path: str) -> None:
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)

    refusal_errnos = ["EACCES", "ENOENT"]
    yield attack("connect to a Unix socket", refusal_errnos, connect, target.sockets)
    yield attack("replace a Unix socket", refusal_errnos, replace, target.sockets)


def bind_server_port(server: Server) -> None:
    """Try to listen at the port of a server, with every socket option that lets sockets share a port."""
    reuse_address, reuse_port = socket.SO_REUSEADDR, socket.SO_REUSEPORT
    for address in {server.host, "0.0.0.0"}:
        for options in ((), (reuse_address,), (reuse_port,), (reuse_address, reuse_port)):
            with socket.socket() as s:
                for option in options:
                    s.setsockopt(socket.SOL_SOCKET, option, 1)
                try:
                    s.bind((address, server.port))
                    s.listen()
                except OSError as e:
                    if e.errno != errno.EADDRINUSE:
                        raise
                else:
                    return
    raise OSError(errno.EADDRINUSE, "")


PATHS = [
    "/",
    "/status",
    "/health",
    "/metrics",
    "/model_info",
    "/get_server_info",
    "/server_info",
    "/v1/models",
    "/docs",
    "/openapi.json",
    "/engines",
    "/api/runs",
    "/api/samples",
    "/api/status?run=0",
    "/static/%2e%2e/server.py",
    "/static/../server.py",
    "/../../etc/passwd",
    "//status",
    "/health/../model_info",
    "/HEALTH",
    "/api/v1/healthz",
    "/api/v1/get_server_capabilities",
]
POSTS = [
    "/take",
    "/commit",
    "/begin_push",
    "/end_push",
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/abort_request",
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/relay/open",
    "/relay/declare",
    "/relay/renew",
    "/relay/state",
    "/relay/feed",
    "/relay/offer",
    "/relay/piece",
    "/load_lora_adapter",
    "/begin_weight_update",
    "/end_weight_update",
    "/engines",
    "/api/v1/create_session",
    "/api/v1/asample",
    "/api/v1/forward_backward",
    "/api/v1/retrieve_future",
    "/seat/x/v1/chat/completions",
    "/episode/x/rewards",
    "/x/reward",
    "/x/v1/chat/completions",
    "/open",
    "/step",
    "/close",
    "/start_profile",
    "/set_internal_state",
    "/configure_logging",
]
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {
        "Authorization": f"Bearer {FORGED_KEY}", "X-API-Key": FORGED_KEY, "X-Rlsys-Key": FORGED_KEY,
        "Cookie": f"rlsys-dash={FORGED_KEY}", "rlsys-relay-token": FORGED_KEY, "rlsys-piece": "[0, 0]",
        "rlsys-push": "9",
    },
    {
        "Authorization": "Bearer ", "X-API-Key": "", "X-Rlsys-Key": "", "Host": "127.0.0.1/health?",
        "X-Forwarded-For": "127.0.0.1",
    },
)  # fmt: skip


def speaks_http(server: Server) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((server.host, server.port), 3) as s:
        s.settimeout(3)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return s.recv(5) == b"HTTP/"
    return False


def request(
    server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None
) -> tuple[str, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=REQUEST_SECONDS)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return str(answer.status), answer.read(MAX_READ_BYTES)
    except (OSError, http.client.HTTPException) as e:
        return type(e).__name__, b""
    finally:
        connection.close()


def attack_http(server: Server, secrets: Iterable[str]) -> Iterator[Attack]:
    """Send requests without a key and with wrong keys. The server must refuse all except those to open paths."""
    status_counts, faults = dict[str, int](), []
    body = json.dumps(
        {"token": FORGED_KEY, "line": [], "seconds": 9, "files": 0, "prompt": "x", "text": "x"}
    ).encode()
    requests: list[tuple[str, str, bytes | None]] = [("GET", path, None) for path in PATHS]
    requests += [("POST", path, body) for path in POSTS]
    requests += [
        (method, path, None) for method in ("PUT", "DELETE", "OPTIONS") for path in ("/", "/engines")
    ]
    for headers in HEADERS:
        for method, path, data in requests:
            request_headers = {**headers, **({"Content-Type": "application/json"} if data else {})}
            status, answer = request(server, method, path, request_headers, data)
            status_counts[status] = status_counts.get(status, 0) + 1
            allowed = method in ("GET", "OPTIONS") and path in server.open_paths
            if not (status.startswith("4") or (allowed and status == "200")):
                faults.append(f"{method} {path} {sorted(headers)}: {status} {answer[:80]!r}")
            if any(secret.encode() in answer for secret in secrets):
                faults.append(f"{method} {path}: the response contains a key")
    yield Attack(f"{server.name}: requests", "4xx, or 200 for an open path", status_counts, faults)


def malformed_messages(rng: random.Random) -> Iterator[bytes]:
    """Yield malformed messages of HTTP, TLS, torch's store, Gloo and ZMQ, and random bytes."""
    yield b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"
    yield b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n"
    yield b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    yield b"\xff" + bytes(8) + b"\x01\x7f" + b"\x03\x00NULL" + bytes(48)
    for value in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield struct.pack("<Q", value) * 64
    yield from (bytes([code]) + struct.pack("<Q", 2**40) + b"key" for code in range(16))
    yield from (rng.randbytes(size) for size in (1, 7, 8, 64, 4096, MAX_READ_BYTES))


def attack_protocol(server: Server) -> Iterator[Attack]:
    """Send malformed messages. The server need not answer them, but it must survive."""
    result_counts = dict[str, int]()
    for message in malformed_messages(random.Random(server.port)):
        result = "closed"
        try:
            with socket.create_connection((server.host, server.port), 3) as s:
                s.settimeout(0.3)
                s.sendall(message)
                while s.recv(MAX_READ_BYTES):
                    result = "answered"
        except TimeoutError:
            result = "silent"
        except OSError as e:
            result = errno.errorcode.get(e.errno or 0, "OSError")
        result_counts[result] = result_counts.get(result, 0) + 1
    yield Attack(f"{server.name}: malformed messages", "the server survives", result_counts, [])


def flood(servers: Iterable[Server], connection_count: int, seconds: float) -> Iterator[Attack]:
    """Hold idle and slow connections (Slowloris) to all servers at once, and reopen those that a server closes.

    Args:
        servers: servers under attack.
        connection_count: number of connections per server.
        seconds: duration of the attack.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    starts = (b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
    open_connections: dict[Server, list[socket.socket]] = {server: [] for server in servers}
    opened, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        for server, connections in open_connections.items():
            alive = []
            for s in connections:
                with contextlib.suppress(OSError):
                    s.send(b"x")
                    alive.append(s)
                    continue
                s.close()
            open_connections[server] = alive
            for i in range(min(connection_count - len(alive), 100)):
                s = socket.socket()
                s.setblocking(False)
                with contextlib.suppress(OSError):
                    s.connect((server.host, server.port))
                with contextlib.suppress(OSError):
                    s.send(starts[i % 3])
                alive.append(s)
                opened += 1
        time.sleep(0.2)
    final_counts = {server.name: len(connections) for server, connections in open_connections.items()}
    for s in (s for connections in open_connections.values() for s in connections):
        s.close()
    yield Attack(
        f"{connection_count} idle and slow connections to each server",
        "served",
        {"opened": opened, **final_counts},
        [],
    )


def attacks(target: Target) -> Iterator[Attack]:
    yield from attack_folders(target)
    yield from attack_files(target)
    yield from attack_processes(target)
    yield from attack_unix_sockets(target)
    yield attack("listen at a server's port", ["EADDRINUSE"], bind_server_port, target.servers)
    http_servers = [server for server in target.servers if speaks_http(server)]

    def attack_server(server: Server) -> list[Attack]:
        requests = attack_http(server, target.secrets) if server in http_servers else ()
        return [*requests, *attack_protocol(server)]

    with ThreadPoolExecutor(len(target.servers)) as threads:
        for server_attacks in threads.map(attack_server, target.servers):
            yield from server_attacks
    yield from flood(http_servers, 400, 12.0)


def drop_root(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    target = Target.decode(sys.stdin.read())
    drop_root(target.uid)
    for attack_result in attacks(target):
        print(json.dumps(asdict(attack_result)), flush=True)


if __name__ == "__main__":
    main()
