"""What a translation must know of the files that a script names, where they are here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def files_of(path: Any) -> list[Path]:
    """The files, or none where one is not here."""
    files = [Path(str(p)) for p in (path if isinstance(path, list) else [path])]
    return files if path and all(file.is_file() for file in files) else []


def rows_of(path: Any) -> int | None:
    """Rows of all files together; None where one is not here or cannot be read."""
    counts = [_rows(file) for file in files_of(path)]
    return None if not counts or None in counts else sum(n for n in counts if n is not None)


def media_of(path: Any, media: Sequence[str]) -> str | None:
    """The first of the columns `media` that the files' first rows have; None where there is none."""
    for file in files_of(path):
        if found := next((name for name in media if name in _columns(file)), None):
            return found
    return None


def _rows(file: Path) -> int | None:
    try:
        if file.suffix == ".parquet":
            return int(_parquet(file).metadata.num_rows)
        with file.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines)
    except (OSError, ValueError):  # pyarrow's errors are both
        return None


def _columns(file: Path) -> list[str]:
    try:
        if file.suffix == ".parquet":
            return list(_parquet(file).schema_arrow.names)
        with file.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"{}"))
        return [name for name, value in first.items() if value] if isinstance(first, dict) else []
    except (OSError, ValueError, RecursionError):
        return []


def _parquet(file: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file)
