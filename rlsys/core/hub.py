"""Repositories of a Hugging Face hub, as folders in the cache of huggingface_hub.

The roles of a run read local files only (HF_HUB_OFFLINE), so the command that starts them fetches repositories first.
`HF_ENDPOINT` selects another hub, `HF_HOME` another folder for the cache.
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
    """Return the local folder of a repository, downloaded if needed.

    If HF_HUB_OFFLINE is set or the hub is unreachable, the cache is used.

    Args:
        field: Config field or command-line option, for error messages.
        name: `owner/name` of the repository.
        revision: Branch, tag or commit; None for the default branch.
        kind: Kind of the repository.
        without: Patterns of files to leave out.

    Raises:
        UserError: The hub has no such repository or revision, or it is unreachable and the cache lacks files of it.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    noun = _NOUNS[kind]
    download_errors: tuple[type[Exception], ...] = (EntryNotFoundError, *HfHubHTTPError.__bases__)
    """The bases include OSError and the HTTPError of the hub's HTTP library."""
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
    """Return `owner/name@commit` for a model's folder in a hub cache; None for any other folder."""
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
