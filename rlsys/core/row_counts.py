"""Number of rows and media columns of data files, as far as the files exist on this host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def existing_files(path: Any) -> list[Path]:
    """Return the files of `path`, a path or a list of paths; an empty list if one of them does not exist."""
    files = [Path(str(p)) for p in (path if isinstance(path, list) else [path])]
    return files if path and all(file.is_file() for file in files) else []


def count_rows(path: Any) -> int | None:
    """Return the number of rows of all files of `path`; None if a file does not exist or cannot be read."""
    counts = [_rows(file) for file in existing_files(path)]
    return None if not counts or None in counts else sum(n for n in counts if n is not None)


def find_media_column(path: Any, media: Sequence[str]) -> str | None:
    """Return the first name in `media` that the first row of a file of `path` has; None if no file has one."""
    for file in existing_files(path):
        if column := next((name for name in media if name in _columns(file)), None):
            return column
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
