"""How readers outside a run reach its coordinator, the rollout process, which alone may have the ledger open.

    RUN/coordinator.json   {epoch, host}: written once it listens (on the Unix socket that the launch's file in
                           RUN/owners names), deleted when it ends in order
    RUN/.ask/NAME          a question of another machine, which the coordinator's socket does not hear; the
                           supervisor asks for it, and puts the answer into NAME.told. A question with a query has it
                           as its content, and a number of its own behind its name, because answers differ

The questions are the paths that the coordinator answers to a GET: `status`, `ledger`, `samples`.
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

from rlsys.core.errors import RunError, disk_errors
from rlsys.core.owner import FOLDER, KEY_HEADER, Owner, current_owner
from rlsys.core.sockets import UnixConnection, exchange

FILE_NAME = "coordinator.json"
MAILBOX = ".ask"
QUESTIONS = ("status", "ledger", "samples")
ANSWER_SECONDS = 30.0
"""A count of a large ledger takes seconds; caches of a shared file system hide a new file for as long."""
LOOK_SECONDS = 0.2
_GONE = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)


class Silent(RunError):
    """There is a coordinator, and it does not answer."""


@dataclass(frozen=True)
class Address:
    epoch: int
    host: str


def publish(owner: Owner) -> None:
    """The coordinator of this launch listens on this machine."""
    address = Address(owner.epoch, socket.gethostname())
    with disk_errors(owner.run_dir / FILE_NAME):
        replace(owner.run_dir / FILE_NAME, json.dumps(asdict(address)).encode())


def withdraw(owner: Owner) -> None:
    """It ends. Another launch's file stays."""
    if (address := published(owner.run_dir)) is not None and address.epoch == owner.epoch:
        (owner.run_dir / FILE_NAME).unlink(missing_ok=True)


def published(run_dir: Path) -> Address | None:
    try:
        found = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return Address(int(found["epoch"]), str(found["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ask(run_dir: Path, question: str, patience: float = ANSWER_SECONDS, query: bytes = b"") -> bytes | None:
    """The answer of the run's coordinator; None when there is none: the run has ended, or not begun.

    `query`: what exactly is asked for, where the question takes one.

    Raises Silent when it does not answer within `patience` seconds, or not yet, with its words.
    """
    address, owner = published(run_dir), current_owner(run_dir)
    if address is None or owner is None or address.epoch != owner.epoch:
        return None
    if address.host == socket.gethostname():
        return _by_socket(owner, path_of(question, query), patience)
    return _by_mailbox(address, run_dir, question, query, patience)


def path_of(question: str, query: bytes) -> str:
    """What to GET from the coordinator."""
    return f"/{question}?query={quote(query, safe='')}" if query else f"/{question}"


def _by_socket(owner: Owner, path: str, patience: float) -> bytes | None:
    # Root may look at the run of another user, who then listens.
    users = {os.geteuid(), (owner.run_dir / FOLDER).stat().st_uid}
    try:
        connection = UnixConnection(owner.rollout_socket, patience, users)
        status, body = exchange(connection, "GET", path, headers={KEY_HEADER: owner.key})
    except _GONE:  # killed: nobody listens there
        return None
    except (OSError, http.client.HTTPException) as e:
        raise Silent(f"the run's coordinator does not answer: {e or type(e).__name__}") from None
    if status != http.client.OK:
        raise Silent(f"the run's coordinator: {body.decode(errors='replace')[:200]}")
    return body


def _by_mailbox(address: Address, run_dir: Path, question: str, query: bytes, patience: float) -> bytes:
    box = run_dir / MAILBOX
    with disk_errors(box, Silent):
        box.mkdir(exist_ok=True)
        name = f"{question}-{secrets.token_hex(8)}" if query else question
        told = box / f"{name}.told"
        told.unlink(missing_ok=True)
        replace(box / name, query)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                answer = told.read_bytes()
                if query:  # nobody else asks by this name
                    told.unlink()
                return answer
            time.sleep(LOOK_SECONDS)
    raise Silent(f"the run's supervisor on {address.host} does not answer within {patience:g} s")


def asked(run_dir: Path) -> list[tuple[str, str]]:
    """Questions in the mailbox, taken out of it: their names there, and what to GET. For the supervisor."""
    found = []
    for path in sorted((run_dir / MAILBOX).glob("*")):
        question = path.name.partition("-")[0]
        if question in QUESTIONS and not path.suffix:
            query = path.read_bytes()
            path.unlink(missing_ok=True)
            found.append((path.name, path_of(question, query)))
    return found


def tell(run_dir: Path, name: str, answer: bytes) -> None:
    replace(run_dir / MAILBOX / f"{name}.told", answer)


def answer(run_dir: Path, get: Callable[[str], bytes | None], say: Callable[[str], None]) -> None:
    """What is asked in the mailbox. For the supervisor: `get` gives the coordinator's answer, None for none."""
    for name, path in asked(run_dir):
        if (body := get(path)) is not None:
            try:
                tell(run_dir, name, body)
            except OSError as e:  # the reader gives up by itself
                say(f"the answer to rlsys {name} cannot be written: {e.strerror}")


def replace(path: Path, content: bytes) -> None:
    """In one step: whoever reads sees the old content or the new."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
