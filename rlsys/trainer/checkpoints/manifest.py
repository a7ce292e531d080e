"""Manifest of a checkpoint, manifest.json: step, score, duration of the save, and the SHA-256 of each file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "manifest.json"


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(
    folder: Path, step: int, score: float | None, checksums: dict[str, str], seconds: float = 0.0
) -> None:
    """Write the manifest of a checkpoint.

    Args:
        folder: The checkpoint, otherwise complete.
        step: Number of completed train steps.
        score: Evaluation score of the weights; None: not evaluated.
        checksums: SHA-256 of files, by path in the folder. The SHA-256 of other files is computed here.
        seconds: Duration of the save on rank 0; 0: unknown.
    """
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    files = {name: checksums.get(name) or sha256(folder / name) for name in names}
    content = {"step": step, "score": score, "seconds": round(seconds, 3), "files": files}
    (folder / NAME).write_text(json.dumps(content, indent=1) + "\n")


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # absent or truncated: find_damage reports it
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def score(folder: Path) -> float | None:
    """Return the evaluation score of the checkpoint; None if the manifest has none."""
    return (_read(folder) or {}).get("score")


def seconds(folder: Path) -> float:
    """Return the duration of the save in seconds; 0 if the manifest has none."""
    return float((_read(folder) or {}).get("seconds", 0.0))


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Compare every `parts`-th file of the manifest, from index `part` on, with its checksum.

    Returns:
        A message for each missing or changed file.
    """
    manifest = _read(folder)
    if manifest is None:
        return [f"{NAME} is missing or truncated"]
    messages = []
    for name, expected in list(manifest["files"].items())[part::parts]:
        if not (folder / name).is_file():
            messages.append(f"{name} is missing")
        elif sha256(folder / name) != expected:
            messages.append(f"{name} has changed (its SHA-256 differs)")
    return messages
