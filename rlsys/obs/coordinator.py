"""How readers outside a run reach its coordinator, the rollout process, which alone may have the ledger open.

    RUN/coordinator.json   {epoch, host, port}: written once it listens, deleted when it ends in order
    RUN/.ask/NAME          a question of another machine, which the coordinator's loopback port does not hear; the
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
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from rlsys.errors import RunError, disk_errors
from rlsys.obs.direct import opener
from rlsys.owner import KEY_HEADER, Owner, current

FILE_NAME = "coordinator.json"
MAILBOX = ".ask"
QUESTIONS = ("status", "ledger", "samples")
ANSWER_SECONDS = 30.0
"""A count of a large ledger takes seconds; caches of a shared file system hide a new file for as long."""
LOOK_SECONDS = 0.2
_REFUSED = (ConnectionRefusedError, ConnectionResetError)


class Silent(RunError):
    """There is a coordinator, and it does not answer."""


@dataclass(frozen=True)
class Address:
    epoch: int
    host: str
    port: int


def publish(owner: Owner, port: int) -> None:
    """The coordinator of this launch listens on loopback."""
    address = Address(owner.epoch, socket.gethostname(), port)
    with disk_errors(owner.run_dir / FILE_NAME):
        replace(owner.run_dir / FILE_NAME, json.dumps(asdict(address)).encode())


def withdraw(owner: Owner) -> None:
    """It ends. Another launch's file stays."""
    if (address := published(owner.run_dir)) is not None and address.epoch == owner.epoch:
        (owner.run_dir / FILE_NAME).unlink(missing_ok=True)


def published(run_dir: Path) -> Address | None:
    try:
        found = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
        return Address(int(found["epoch"]), str(found["host"]), int(found["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ask(run_dir: Path, question: str, patience: float = ANSWER_SECONDS, query: bytes = b"") -> bytes | None:
    """The answer of the run's coordinator; None when there is none: the run has ended, or not begun.

    `query`: what exactly is asked for, where the question takes one.

    Raises Silent when it does not answer within `patience` seconds, or not yet, with its words.
    """
    address, owner = published(run_dir), current(run_dir)
    if address is None or owner is None or address.epoch != owner.epoch:
        return None
    if address.host == socket.gethostname():
        return _by_loopback(address, owner.key, path_of(question, query), patience)
    return _by_mailbox(address, run_dir, question, query, patience)


def path_of(question: str, query: bytes) -> str:
    """What to GET from the coordinator."""
    return f"/{question}?query={quote(query, safe='')}" if query else f"/{question}"


def _by_loopback(address: Address, key: str, path: str, patience: float) -> bytes | None:
    url = f"http://127.0.0.1:{address.port}{path}"
    try:
        with opener.open(urllib.request.Request(url, headers={KEY_HEADER: key}), timeout=patience) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as e:
        if e.code == http.client.FORBIDDEN:  # its port is another process's by now
            return None
        raise Silent(f"the run's coordinator: {e.read().decode(errors='replace')[:200]}") from None
    except urllib.error.URLError as e:
        if isinstance(e.reason, _REFUSED):  # killed: nobody has the port
            return None
        raise Silent(f"the run's coordinator at {url} does not answer: {e.reason}") from None
    except (OSError, http.client.HTTPException) as e:
        raise Silent(f"the run's coordinator at {url} does not answer: {e or type(e).__name__}") from None


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
