"""Download of repositories of a Hugging Face hub to the cache of huggingface_hub.

The roles of a run read local files only (HF_HUB_OFFLINE), so the command that starts them downloads repositories
first. `HF_ENDPOINT` selects another hub, `HF_HOME` another folder for the cache.
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
    """Download a repository to the cache if needed, and return its folder there.

    If HF_HUB_OFFLINE is set or the hub is unreachable, only the cache is used.

    Args:
        field: config field or command-line option with the name, for messages.
        name: `owner/name` of the repository.
        revision: branch, tag or commit; None: the default branch.
        kind: kind of the repository.
        without: patterns of files that are not downloaded.

    Raises:
        UserError: the hub has no such repository or revision, or it is unreachable and the cache lacks files.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    noun = _NOUNS[kind]
    # The bases include OSError and the HTTPError of the hub's HTTP library.
    download_errors: tuple[type[Exception], ...] = (EntryNotFoundError, *HfHubHTTPError.__bases__)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, repo_type=kind, revision=revision, ignore_patterns=list(without) or None
            )
        )
    except HFValidationError as e:
        raise UserError(f"{field} = {name!r}: expected the id of a {noun}: {_first_line(e)}") from None
    except download_errors as e:
        suffix = f" at revision {revision}" if revision else ""
        copy = "only a part of it" if hasattr(e, "snapshot_path") else f"no copy{suffix}"
        if constants.HF_HUB_OFFLINE:
            reason = f"and the cache has {copy}; {_ADVICE[kind].format(name=name)}"
        else:
            reason = (
                f"and the download of this {noun}{suffix} from {constants.ENDPOINT} failed: {_first_line(e)}"
            )
        raise UserError(f"{field} = {name!r}: no such folder, {reason}") from None


def snapshot_name(folder: Path) -> str | None:
    """Return `owner/name@commit` of a model folder in a hub's cache; None for another folder."""
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
