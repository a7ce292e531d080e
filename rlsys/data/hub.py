"""Data sets of the `datasets` library: a folder on disk, or one of a Hugging Face hub by its id.

A data set of a hub is fetched (rlsys/core/hub.py) before the roles of a run start: by the trial of `rlsys explain`,
`try`, `train` and `submit`.
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
_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` writes for one split, and for several."""


def read_dataset(name: str, subset: str | None, split: str, revision: str | None) -> Arrow:
    """One split. Raises UserError: neither a folder nor to be had from the hub, or it has no such subset or split."""
    import datasets

    folder = Path(name)
    if not folder.exists():
        folder = fetch(name, revision)
    elif revision is not None:
        raise UserError(f"data.params.revision = {revision!r}: {name} is a folder; a revision is a hub's")
    saved = any((folder / file).is_file() for file in _SAVED)
    try:
        found = (
            datasets.load_from_disk(str(folder))
            if saved
            else datasets.load_dataset(str(folder), subset, split=split)
        )
    except Exception as e:  # noqa: BLE001  (what a damaged folder makes the library raise)
        raise UserError(_told(name, subset, split, e)) from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UserError(_no_split(name, split, list(found)))
        found = found[split]
    found = found.with_format(None)  # a saved one may have numpy's or torch's
    if not len(found):
        raise UserError(f"{name}, split {split}: no prompts in it")
    return Arrow(found, f"{name} ({split})")


def fetch(name: str, revision: str | None) -> Path:
    """The folder of a hub's data set, in the cache of huggingface_hub. Asks the hub where that is allowed, and takes
    what the cache has when the hub does not answer. Raises UserError."""
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"data.params.name = {name!r}: no such folder, and no id of a data set, owner/name")
    return fetch_snapshot("data.params.name", name, revision, "dataset")


def head(name: str, revision: str | None) -> str | None:
    """The commit that a hub's data set is at, as it is in the cache after `fetch`; None for a folder."""
    return None if Path(name).exists() else fetch(name, revision).name


def _told(name: str, subset: str | None, split: str, error: Exception) -> str:
    """`datasets` names what there is in its message."""
    known = re.findall("'([^']*)'", str(error).partition("[")[2])
    if "split" in str(error) and known:
        return _no_split(name, split, known)
    if "BuilderConfig" in str(error) or "Config name" in str(error):
        hint = f"it has {', '.join(known)}" if known else _first_line(error)
        return f"data.params.subset = {subset!r}: {name} has no such subset; {hint}"
    return f"data.params.name = {name!r}: cannot read it: {_first_line(error)}"


def _no_split(name: str, split: str, known: list[str]) -> str:
    near = difflib.get_close_matches(split, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return f"data.params.split = {split!r}: {name} has no such split; {hint}"


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
