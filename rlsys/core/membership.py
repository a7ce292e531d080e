"""Engines that join a run, or leave it, while it goes on: RUN/engines says which are wanted.

    RUN/engines/NAME.json   {epoch, url, tp, pool, wanted}: by whoever starts an engine for the run, or sends one away

The rollout process reads it (rlsys/rollout/members.py), so both hold over its restarts, and no port is needed but the
engine's own. A file of an earlier launch counts no more: that launch's engines have keys that nobody uses now.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsys.core.errors import disk_errors
from rlsys.core.owner import Owner

FOLDER = "engines"
WEIGHTS_VARIABLE = "RLSYS_PEER_WEIGHTS"
"""Names the folder by which an engine passes its weights on to another one."""
_URL = re.compile(r"http://[A-Za-z0-9.\[\]:-]+:[0-9]{1,5}")


@dataclass(frozen=True)
class Member:
    """`wanted` False: it is to leave. `tp`: its ranks. `pool`: of engine.pools, the one that it is to be in."""

    epoch: int
    url: str
    tp: int
    pool: str | None = None
    wanted: bool = True


def tell(owner: Owner, url: str, tp: int, pool: str | None = None, *, wanted: bool) -> None:
    """An engine of this launch serves at `url` and joins, or is to leave. Raises RunError when the disk refuses."""
    path = _file(owner, url)
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(Member(owner.epoch, url, tp, pool, wanted))), encoding="utf-8")
        os.replace(part, path)


def forget(owner: Owner, url: str) -> None:
    """It has gone."""
    _file(owner, url).unlink(missing_ok=True)


def members(owner: Owner) -> list[Member]:
    """Of this launch, by URL. A file that is none of ours is passed over."""
    found = []
    for path in sorted((owner.run_dir / FOLDER).glob("*.json")):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            pool = None if said["pool"] is None else str(said["pool"])
            member = Member(int(said["epoch"]), str(said["url"]), int(said["tp"]), pool, bool(said["wanted"]))
        except (OSError, ValueError, KeyError, TypeError):  # deleted since, or somebody else's
            continue
        if member.epoch == owner.epoch and member.tp > 0 and _URL.fullmatch(member.url):
            found.append(member)
    return found


def _file(owner: Owner, url: str) -> Path:
    return owner.run_dir / FOLDER / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', url)}.json"
