"""Registry of the engines that join or leave a live run.

    RUN/engines/NAME.json   {epoch, url, tp, pool, wanted}, written by the process that starts or removes the engine

The rollout process reads the folder (rlsys/rollout/members.py), so the registry survives its restarts and needs no
port. Files of earlier launches are ignored, because the keys of their engines are no longer valid.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rlsys.core.errors import disk_errors
from rlsys.core.folders import replace_file
from rlsys.core.owner import Owner

FOLDER = "engines"
WEIGHTS_VARIABLE = "RLSYS_PEER_WEIGHTS"
"""Environment variable: the folder through which an engine sends its weights to another engine."""
_URL = re.compile(r"http://[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}")


@dataclass(frozen=True)
class Member:
    """An engine in the registry.

    Attributes:
        epoch: number of the launch.
        url: address of the engine.
        tp: tensor-parallel size of the engine.
        pool: name of the engine's pool in engine.pools; None: none.
        active: whether the engine should serve the run; False: it should leave. The file has it as `wanted`.
    """

    epoch: int
    url: str
    tp: int
    pool: str | None = None
    active: bool = True


def write_member(owner: Owner, url: str, tp: int, pool: str | None = None, *, active: bool) -> None:
    """Write the entry of an engine of this launch.

    Args:
        active: whether the engine should serve the run, or leave it.

    Raises:
        RunError: the file cannot be written.
    """
    path = _file(owner, url)
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        member = {"epoch": owner.epoch, "url": url, "tp": tp, "pool": pool, "wanted": active}
        replace_file(path, json.dumps(member).encode())


def remove_member(owner: Owner, url: str) -> None:
    """Delete the entry of an engine that has left."""
    _file(owner, url).unlink(missing_ok=True)


def read_members(owner: Owner) -> list[Member]:
    """Return the engines of this launch, sorted by file name. Invalid files are ignored."""
    entries = []
    for path in sorted((owner.run_dir / FOLDER).glob("*.json")):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            pool = None if fields["pool"] is None else str(fields["pool"])
            member = Member(
                int(fields["epoch"]), str(fields["url"]), int(fields["tp"]), pool, bool(fields["wanted"])
            )
        except (OSError, ValueError, KeyError, TypeError):  # deleted meanwhile, or no entry of rlsys
            continue
        if member.epoch == owner.epoch and member.tp > 0 and _URL.fullmatch(member.url):
            entries.append(member)
    return entries


def _file(owner: Owner, url: str) -> Path:
    return owner.run_dir / FOLDER / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', url)}.json"
