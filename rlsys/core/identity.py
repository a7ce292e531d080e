"""Whose an engine is: the keys that open it, and the word by which it names its weights.

    label   OWNER:EPOCH:WHAT   the launch that started it, that launch's number, and its weight version (or a word for
                               weights that nobody may use)

Keys and owner follow from the launch's own key and the engine's address. So every process of the launch knows them,
no two engines share one, and what somebody learns who listens in an engine's place opens nothing else. An engine
gets them as SGLang's `--config`, a file that only its user can read: never on a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlsys.core.errors import UserError, disk_errors
from rlsys.core.owner import FOLDER, Owner

_NORMAL = (
    "/generate",
    "/tokenize",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/",
)
"""What SGLang opens with the api key, where it has an admin key too; the rest takes the admin key (utils/auth.py)."""
_FIELDS = {"api-key": "api_key", "admin-api-key": "admin_key"}


@dataclass(frozen=True)
class Identity:
    """`owner`: OWNER:EPOCH of its labels; empty for an engine that no run owns, whose labels are plain versions.
    Empty keys are not sent.
    """

    owner: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)

    def label(self, what: int | str) -> str:
        """What the engine calls such weights."""
        return f"{self.owner}:{what}" if self.owner else str(what)

    def what(self, label: str) -> str | None:
        """The part of a label that is not its owner; None for weights of somebody else."""
        if not self.owner:
            return label
        owner, _, what = label.rpartition(":")
        return what if owner == self.owner else None

    def headers(self, path: str) -> dict[str, str]:
        key = self.api_key if path.startswith(_NORMAL) else self.admin_key
        return {"Authorization": f"Bearer {key}"} if key else {}


NOBODY = Identity()


def engine_identity(owner: Owner, url: str) -> Identity:
    """Of the engine of this launch that answers at `url`."""

    def derived(what: str) -> str:
        return hmac.new(owner.key.encode(), f"{what} {url}".encode(), hashlib.sha256).hexdigest()

    tag = hmac.new(owner.key.encode(), b"owner", hashlib.sha256).hexdigest()[:12]
    return Identity(f"{tag}:{owner.epoch}", derived("api"), derived("admin"))


def config_path(run_dir: Path, unit: str) -> Path:
    """The file that engine `unit` is given as SGLang's `--config`."""
    return run_dir / FOLDER / f"{unit}.yaml"


def write_config(path: Path, of: Identity) -> None:
    """Mode 0600, replaced in one step. Its weights are version 0 until somebody pushes others.

    Raises RunError when the disk refuses.
    """
    part = path.with_suffix(".part")
    # JSON is YAML, and a key of digits alone stays text.
    text = json.dumps({"api-key": of.api_key, "admin-api-key": of.admin_key, "weight-version": of.label(0)})
    with disk_errors(path):
        part.unlink(missing_ok=True)
        with os.fdopen(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as f:
            f.write(text)
        os.replace(part, path)


def read_keys(path: Path) -> Identity:
    """Keys of engines that were started with this file as SGLang's `--config`. Raises UserError when it has none, or
    others may read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: others may read it; expected mode 0600")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(
            f"{path}: cannot read engine keys: {getattr(e, 'strerror', None) or type(e).__name__}"
        ) from None
    keys = (
        {ours: str(found.get(name) or "") for name, ours in _FIELDS.items()}
        if isinstance(found, dict)
        else {}
    )
    if not any(keys.values()):
        raise UserError(f"{path}: expected api-key and admin-api-key, as SGLang's --config takes them")
    # With one key alone SGLang opens both kinds of request with it, or asks for none.
    admin = keys["admin_key"] or keys["api_key"]
    return Identity(api_key=keys["api_key"], admin_key=admin)
