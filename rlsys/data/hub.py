"""Data sets of the `datasets` library: folders on disk, and data sets of a Hugging Face hub.

The trial of `rlsys explain`, `try`, `train` and `submit` downloads a data set of a hub (rlsys/core/hub.py) before the
roles of a run start.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError
from rlsys.core.hub import fetch_snapshot
from rlsys.data.tables import Arrow

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files of `save_to_disk` for one split, and for several."""


def read_dataset(name: str, subset: str | None, split: str, revision: str | None) -> Arrow:
    """Read one split of a data set.

    Args:
        name: folder, or id of a data set on the hub.
        subset: configuration of the data set; None: its only or default one.
        revision: commit, tag or branch on the hub; None: the newest commit. A folder has none.

    Raises:
        UserError: the data set, subset or split does not exist or cannot be read, or the split has no rows.
    """
    import datasets

    folder = Path(name)
    if not folder.exists():
        folder = fetch(name, revision)
    elif revision is not None:
        raise UserError(
            f"data.params.revision = {revision!r}: {name} is a folder; expected null, or the id of a hub's data set"
        )
    is_saved = any((folder / file).is_file() for file in _SAVED_FILES)
    try:
        rows = (
            datasets.load_from_disk(str(folder))
            if is_saved
            else datasets.load_dataset(str(folder), subset, split=split)
        )
    except Exception as e:  # noqa: BLE001  (a damaged folder makes the library raise exceptions of any class)
        raise UserError(_load_error(name, subset, split, e)) from None
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(_no_split(name, split, list(rows)))
        rows = rows[split]
    rows = rows.with_format(None)  # a saved data set may have the format of numpy or torch
    if not len(rows):
        raise UserError(f"{name}, split {split}: no rows; expected at least one")
    return Arrow(rows, f"{name} ({split})")


def fetch(name: str, revision: str | None) -> Path:
    """Download a data set of the hub to the cache of huggingface_hub, and return its folder.

    If HF_HUB_OFFLINE is set or the hub is unreachable, only the cache is used.

    Raises:
        UserError: the id is invalid, or the data set is neither on the hub nor in the cache.
    """
    if not _HUB_ID.fullmatch(name):
        raise UserError(
            f"data.params.name = {name!r}: no such folder, and no id of a data set; expected owner/name"
        )
    return fetch_snapshot("data.params.name", name, revision, "dataset")


def head(name: str, revision: str | None) -> str | None:
    """Download a data set of the hub, and return its commit; return None for a folder on disk."""
    return None if Path(name).exists() else fetch(name, revision).name


def _load_error(name: str, subset: str | None, split: str, error: Exception) -> str:
    """Return the message for an exception of `datasets`, with the existing names that the exception lists."""
    names = re.findall("'([^']*)'", str(error).partition("[")[2])
    if "split" in str(error) and names:
        return _no_split(name, split, names)
    if "BuilderConfig" in str(error) or "Config name" in str(error):
        hint = f"it has {', '.join(names)}" if names else _first_line(error)
        return f"data.params.subset = {subset!r}: {name} has no such subset; {hint}"
    return f"data.params.name = {name!r}: cannot read it: {_first_line(error)}"


def _no_split(name: str, split: str, names: list[str]) -> str:
    matches = difflib.get_close_matches(split, names, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]}?" if matches else f"it has {', '.join(names)}"
    return f"data.params.split = {split!r}: {name} has no such split; {hint}"


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
