"""Requests of other processes to a run's coordinator, which is the rollout process.

    RUN/coordinator.json   {epoch, host} of the coordinator; it writes the file when it listens on the Unix socket
                           that the launch's file in RUN/owners names, and deletes it at an orderly end
    RUN/.ask/NAME          a request from another machine, which cannot connect to the Unix socket
    RUN/.ask/NAME.told     the response to this request

The supervisor forwards the requests in RUN/.ask, the mailbox, to the coordinator, and writes the responses. NAME is
the endpoint (ENDPOINTS). If the request has a query, the file contains it, and NAME also has a random number, because
responses to different queries differ.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from rlsys.core.errors import RunError, disk_errors, error_text
from rlsys.core.folders import replace_file
from rlsys.core.owner import FOLDER, KEY_HEADER, Owner, current_owner
from rlsys.core.sockets import UnixConnection, exchange

FILE_NAME = "coordinator.json"
MAILBOX = ".ask"
ENDPOINTS = ("status", "ledger", "samples")
RESPONSE_SECONDS = 30.0
"""Time limit of a response in seconds. Counting a large ledger takes seconds, and so do caches of a shared file
system until they show a new file."""
POLL_SECONDS = 0.2
_NOT_LISTENING = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)


class CoordinatorUnreachable(RunError):
    """The run has a coordinator, but no valid response came from it."""


@dataclass(frozen=True)
class Address:
    """Address of a coordinator.

    Attributes:
        epoch: number of the launch.
        host: host name of the machine.
    """

    epoch: int
    host: str


def publish_address(owner: Owner) -> None:
    """Write coordinator.json for this launch, whose coordinator is this process.

    Raises:
        RunError: the file cannot be written.
    """
    address = Address(owner.epoch, socket.gethostname())
    with disk_errors(owner.run_dir / FILE_NAME):
        replace_file(owner.run_dir / FILE_NAME, json.dumps(asdict(address)).encode())


def withdraw_address(owner: Owner) -> None:
    """Delete coordinator.json if it is this launch's."""
    if (address := read_address(owner.run_dir)) is not None and address.epoch == owner.epoch:
        (owner.run_dir / FILE_NAME).unlink(missing_ok=True)


def read_address(run_dir: Path) -> Address | None:
    """Return the address in coordinator.json; None if the file does not exist or is invalid."""
    try:
        fields = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return Address(int(fields["epoch"]), str(fields["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def query_coordinator(
    run_dir: Path, endpoint: str, timeout_s: float = RESPONSE_SECONDS, query: bytes = b""
) -> bytes | None:
    """Send a request to the coordinator of a run, and return its response; None if the run is not live.

    Args:
        run_dir: the run folder.
        endpoint: one of ENDPOINTS.
        timeout_s: time limit in seconds.
        query: query of the endpoint; empty: none.

    Raises:
        CoordinatorUnreachable: there is no response within the time limit, or it reports an error.
    """
    address, owner = read_address(run_dir), current_owner(run_dir)
    if address is None or owner is None or address.epoch != owner.epoch:
        return None
    if address.host == socket.gethostname():
        return _by_socket(owner, request_path(endpoint, query), timeout_s)
    return _by_mailbox(address, run_dir, endpoint, query, timeout_s)


def request_path(endpoint: str, query: bytes) -> str:
    """Return the path of a request to an endpoint in the coordinator's HTTP API."""
    return f"/{endpoint}?query={quote(query, safe='')}" if query else f"/{endpoint}"


def _by_socket(owner: Owner, path: str, timeout_s: float) -> bytes | None:
    """Send a request to the coordinator's Unix socket, and return the response; None if no process listens."""
    # Root may read the run of another user, whose process then listens.
    users = {os.geteuid(), (owner.run_dir / FOLDER).stat().st_uid}
    try:
        connection = UnixConnection(owner.rollout_socket, timeout_s, users)
        status, body = exchange(connection, "GET", path, headers={KEY_HEADER: owner.key})
    except _NOT_LISTENING:
        return None
    except (OSError, http.client.HTTPException) as e:
        raise CoordinatorUnreachable(f"the run's coordinator does not respond: {error_text(e)}") from None
    if status != http.client.OK:
        message = body.decode(errors="replace")[:200]
        raise CoordinatorUnreachable(f"the run's coordinator responds with HTTP status {status}: {message}")
    return body


def _by_mailbox(address: Address, run_dir: Path, endpoint: str, query: bytes, timeout_s: float) -> bytes:
    """Send a request through the supervisor's mailbox, and return the response."""
    box = run_dir / MAILBOX
    with disk_errors(box, CoordinatorUnreachable):
        box.mkdir(exist_ok=True)
        name = f"{endpoint}-{secrets.token_hex(8)}" if query else endpoint
        response_file = box / f"{name}.told"
        response_file.unlink(missing_ok=True)
        replace_file(box / name, query)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                answer = response_file.read_bytes()
                if query:  # no other reader waits for this response
                    response_file.unlink()
                return answer
            time.sleep(POLL_SECONDS)
    raise CoordinatorUnreachable(
        f"the run's supervisor on {address.host} does not respond within {timeout_s:g} s"
    )


def take_requests(run_dir: Path) -> list[tuple[str, str]]:
    """Remove all requests from the mailbox.

    Returns:
        the name and the HTTP path of each request.
    """
    requests = []
    for path in sorted((run_dir / MAILBOX).glob("*")):
        endpoint = path.name.partition("-")[0]
        if endpoint in ENDPOINTS and not path.suffix:
            query = path.read_bytes()
            path.unlink(missing_ok=True)
            requests.append((path.name, request_path(endpoint, query)))
    return requests


def write_response(run_dir: Path, name: str, answer: bytes) -> None:
    """Write the response to a request into the mailbox."""
    replace_file(run_dir / MAILBOX / f"{name}.told", answer)


def answer_requests(run_dir: Path, get: Callable[[str], bytes | None], report: Callable[[str], None]) -> None:
    """Forward the requests in the mailbox to the coordinator, and write its responses. The supervisor calls it.

    Args:
        run_dir: the run folder.
        get: returns the coordinator's response to a path; None: there is none.
        report: called with a message for each response that cannot be written.
    """
    for name, path in take_requests(run_dir):
        if (body := get(path)) is not None:
            try:
                write_response(run_dir, name, body)
            except OSError as e:  # the reader reports the missing response after its time limit
                report(f"cannot write the response to rlsys {name}: {e.strerror}")
