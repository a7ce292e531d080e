"""Tables of rows: JSON lines, Parquet, and data sets of the `datasets` library, each row with its place for messages.

Parquet and data sets stay in Arrow's memory; a row becomes Python objects when it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.core.errors import UserError

_PARQUET = b"PAR1"
"""How a Parquet file begins."""


class Table(Protocol):
    def __len__(self) -> int: ...

    def row(self, number: int) -> Any:
        """Row `number`, counted from 0."""
        ...

    def place(self, number: int) -> str:
        """Where that row stands, for a person."""
        ...


@dataclass(frozen=True)
class Lines:
    """Rows of JSON-lines files, with file and line of each."""

    rows: Sequence[Any]
    places: Sequence[str]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Any:
        return self.rows[number]

    def place(self, number: int) -> str:
        return self.places[number]


@dataclass(frozen=True)
class Arrow:
    """Rows of a `pyarrow.Table` or a `datasets.Dataset`; `name`: of where they came from."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Any:
        if hasattr(self.rows, "to_pylist"):
            return self.rows.slice(number, 1).to_pylist()[0]
        return self.rows[number]

    def place(self, number: int) -> str:
        return f"{self.name}, row {number}"


def read_lines(paths: Sequence[Path]) -> Lines:
    """Raises UserError naming file and line."""
    rows: list[Any] = []
    places: list[str] = []
    for path in paths:
        data = _read(path)
        if data.startswith(_PARQUET):
            raise UserError(f"{path}: a Parquet file; data.source = parquet reads it")
        try:
            lines = data.decode().splitlines()
        except UnicodeDecodeError as e:
            raise UserError(f"{path}: cannot read: not UTF-8 text: {e.reason} at byte {e.start}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except RecursionError:
                raise UserError(f"{path}:{number}: not JSON: nested too deeply") from None
            except ValueError as e:
                whole = number == 1 and line.lstrip()[0] in "[{" and _is_json(data)
                hint = "; the file is one JSON value, expected one object a line" if whole else f": {e}"
                raise UserError(f"{path}:{number}: not JSON{hint}") from None
            places.append(f"{path}:{number}")
    if not rows:
        raise UserError(f"{', '.join(map(str, paths))}: no prompts in it")
    return Lines(rows, places)


def read_parquet(paths: Sequence[Path]) -> Arrow:
    """Files with the same columns, one after the other. Raises UserError naming the file."""
    import pyarrow
    import pyarrow.parquet

    tables = []
    for path in paths:
        if not _read(path, len(_PARQUET)).startswith(_PARQUET):
            raise UserError(f"{path}: not a Parquet file; data.source = jsonl reads JSON lines")
        try:
            tables.append(pyarrow.parquet.read_table(path))
        except (pyarrow.ArrowException, OSError) as e:
            raise UserError(f"{path}: cannot read: {' '.join(str(e).split())}") from None
    try:
        table = pyarrow.concat_tables(tables, promote_options="default")
    except pyarrow.ArrowException as e:
        raise UserError(
            f"data.params.path: files with different columns: {' '.join(str(e).split())}"
        ) from None
    if not len(table):
        raise UserError(f"{', '.join(map(str, paths))}: no prompts in it")
    return Arrow(table, ", ".join(map(str, paths)))


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as e:
        raise UserError(
            f"data.params: {path}: cannot read: {e.strerror}; a path is seen from the folder where rlsys starts"
        ) from None


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True
