"""manifest.json of a checkpoint: its step, its score, what writing it took, and the SHA-256 of each file in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "manifest.json"


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(folder: Path, step: int, score: float | None, known: dict[str, str], seconds: float = 0.0) -> None:
    """`known` are checksums that need not be computed again; `seconds`: of the save on rank 0, 0 if unknown."""
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    files = {name: known.get(name) or sha256(folder / name) for name in names}
    about = {"step": step, "score": score, "seconds": round(seconds, 3)}
    (folder / NAME).write_text(json.dumps(about | {"files": files}, indent=1) + "\n")


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # absent or cut short: `damaged` says so
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def score(folder: Path) -> float | None:
    return (_read(folder) or {}).get("score")


def seconds(folder: Path) -> float:
    """How long the save took; 0 where the manifest does not say."""
    return float((_read(folder) or {}).get("seconds", 0.0))


def damaged(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with every `parts`-th file from `part` on, in words; empty when all is well."""
    found = _read(folder)
    if found is None:
        return [f"{NAME} is missing or not whole"]
    told = []
    for name, expected in list(found["files"].items())[part::parts]:
        if not (folder / name).is_file():
            told.append(f"{name} is missing")
        elif sha256(folder / name) != expected:
            told.append(f"{name} is not what was written (its SHA-256 differs)")
    return told
