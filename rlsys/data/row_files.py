"""Resolution of the paths of data files: a file, a folder of files, or a glob."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rlsys.core.errors import UserError

_ENDINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "jsonl": ((".jsonl", ".ndjson"), (".json",)),
    "parquet": ((".parquet", ".pq"),),
}
"""Endings of data files by format. The endings of the second group count only if no file has one of the first."""
_COMPRESSED = ("", ".gz", ".gzip", ".zst", ".zstd")
_MAGIC = re.compile(r"[*?\[]")
_SPLIT = re.compile(
    r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?:ing|uation)?(?![a-z])", re.IGNORECASE
)
_SPLIT_ALIASES = {"valid": "validation", "val": "validation", "dev": "validation"}


class PathError(UserError):
    """A path of data files is invalid. `of_field` adds the name of the config field to the message."""


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """Convert a PathError within the context into a UserError that starts with the config field `name`."""
    try:
        yield
    except PathError as e:
        raise UserError(f"{name}: {e}") from None


def row_files(paths: Sequence[Path], kind: Literal["jsonl", "parquet"]) -> list[Path]:
    """Return the files of `paths`, each once; files of a folder or glob are sorted by name.

    Args:
        kind: format, which selects files in folders and globs by their endings.

    Raises:
        PathError: a folder or glob has no files of this format, a folder has files of several splits, a link has no
            target, or a file occurs both plain and compressed.
    """
    files_of_paths: list[Path] = []
    for path in paths:
        if path.is_dir():
            files_of_paths += _in_folder(path, kind)
        elif _MAGIC.search(str(path)) and not path.exists():
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            _check_links(matches)
            files = _rows([match for match in matches if match.is_file()], kind)
            if not files:
                files = [file for match in matches if match.is_dir() for file in _in_folder(match, kind)]
            if not files:
                raise PathError(
                    f"{path}: no file matches; paths are relative to the current directory of rlsys"
                )
            files_of_paths += files
        else:
            files_of_paths.append(path)
    if files_of_paths == list(paths):
        return files_of_paths
    files = list(dict.fromkeys(files_of_paths))
    _check_forms(files)
    return files


def _in_folder(folder: Path, kind: Literal["jsonl", "parquet"]) -> list[Path]:
    """Return the data files of a folder and its subfolders, without hidden ones."""

    def is_hidden(file: Path) -> bool:
        return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)

    entries = [file for file in sorted(folder.rglob("*")) if not is_hidden(file)]
    _check_links(_with_endings(entries, kind))
    files = [file for file in entries if file.is_file()]
    rows = _rows(files, kind)
    endings = tuple(ending for group in _ENDINGS[kind] for ending in _endings_of(group))
    if not any(file.name.lower().endswith(endings) for file in rows):
        names = ", ".join(sorted({f.suffix or f.name for f in files})[:8]) or "nothing"
        expected = " or ".join(_ENDINGS[kind][0])
        raise PathError(f"{folder}: a folder without {expected} files; its files: {names}")
    splits = {_split_of(file.relative_to(folder)) for file in rows} - {None}
    if len(splits) > 1:
        raise PathError(
            f"{folder}: a folder with files of the splits {', '.join(sorted(map(str, splits)))}; "
            f"expected the files of one split, for example {folder}/*train*, or data.source = dataset"
        )
    return rows


def _check_links(files: Sequence[Path]) -> None:
    """Check that the targets of symbolic links exist; the rows of a missing target would be omitted silently.

    Raises:
        PathError: a target does not exist.
    """
    for file in files:
        if file.is_symlink() and not file.exists():
            raise PathError(
                f"{file}: a link to {file.readlink()}, which does not exist; expected an existing file"
            )


def _check_forms(files: Sequence[Path]) -> None:
    """Check that no file occurs both plain and compressed, because its rows would then count twice.

    Raises:
        PathError: two files differ only in the ending of a compression.
    """
    forms: dict[str, Path] = {}
    for file in files:
        plain = str(file).removesuffix(file.suffix if file.suffix in _COMPRESSED else "")
        if (first_form := forms.setdefault(plain, file)) != file:
            raise PathError(
                f"{first_form} and {file}: the same file in two forms, whose rows would count twice; remove one"
            )


def _rows(files: Sequence[Path], kind: Literal["jsonl", "parquet"]) -> list[Path]:
    """Return the files with the endings of a format; all files if none has one of them."""
    return _with_endings(files, kind) or list(files)


def _with_endings(files: Sequence[Path], kind: Literal["jsonl", "parquet"]) -> list[Path]:
    for endings in _ENDINGS[kind]:
        if matches := [f for f in files if f.name.lower().endswith(_endings_of(endings))]:
            return matches
    return []


def _endings_of(endings: Sequence[str]) -> tuple[str, ...]:
    return tuple(ending + compressed for ending in endings for compressed in _COMPRESSED)


def _split_of(file: Path) -> str | None:
    match = _SPLIT.search(str(file))
    return None if match is None else _SPLIT_ALIASES.get(match[1].lower(), match[1].lower())
