"""Repositories of a Hugging Face hub, as folders in the cache of huggingface_hub.

The roles of a run read only what is on this disk (HF_HUB_OFFLINE), so a repository is fetched by the command that
starts them. `HF_ENDPOINT` names another hub than Hugging Face's own, `HF_HOME` another place for the cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rlsys.core.errors import UserError

Kind = Literal["model", "dataset"]
_NOUNS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
_ADVICE: dict[Kind, str] = {
    "model": "`hf download {name}` fetches one where there is a network",
    "dataset": "rlsys explain fetches one where HF_HUB_OFFLINE is not set",
}
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


def fetch_snapshot(
    field: str, name: str, revision: str | None, kind: Kind, without: Sequence[str] = ()
) -> Path:
    """The folder of a repository at a revision; of the hub's default branch where there is none.

    Asks the hub where that is allowed, and takes what the cache has when the hub does not answer.

    Args:
        field: Of the config or the command line, for the error.
        without: Patterns of files that are not wanted.

    Raises:
        UserError: The hub has no such repository or revision; or it does not answer, and the cache has no whole copy.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    noun = _NOUNS[kind]
    of_the_way: tuple[type[Exception], ...] = (EntryNotFoundError, *HfHubHTTPError.__bases__)
    """OSError, and the HTTPError of its HTTP library, among them."""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, repo_type=kind, revision=revision, ignore_patterns=list(without) or None
            )
        )
    except HFValidationError as e:
        raise UserError(f"{field} = {name!r}: no id of a {noun}: {_first_line(e)}") from None
    except of_the_way as e:
        at = f" at revision {revision}" if revision else ""
        copy = "only a part of it" if hasattr(e, "snapshot_path") else f"no copy{at}"
        if constants.HF_HUB_OFFLINE:
            reason = f"and the cache has {copy}; {_ADVICE[kind].format(name=name)}"
        else:
            reason = f"and {constants.ENDPOINT} gives no {noun} of this name{at}: {_first_line(e)}"
        raise UserError(f"{field} = {name!r}: no such folder, {reason}") from None


def snapshot_name(folder: Path) -> str | None:
    """`owner/name@commit` of a model's folder in a cache, wherever the cache is; None for any other folder."""
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
