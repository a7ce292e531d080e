"""Identity of an engine: its API keys, and the owner in the label of its weights.

A label is OWNER:EPOCH:VERSION:
    OWNER    the launch that started the engine
    EPOCH    the number of this launch
    VERSION  the weight version, or a word for weights that must not be used

The keys are derived from the launch's key and the engine's address, and the owner from the launch's key. Each process
of the launch can derive them. Each engine has other keys, so a process that listens at an engine's address gets no
key of another engine. An engine reads its keys from a file for SGLang's `--config`, which only its user can read;
they are not on the command line.
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

_API_KEY_PATHS = (
    "/generate",
    "/tokenize",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/",
)
"""Prefixes of the paths for which SGLang expects the API key; other paths need the admin key (SGLang's
utils/auth.py)."""
_FIELDS = {"api-key": "api_key", "admin-api-key": "admin_key"}


@dataclass(frozen=True)
class Identity:
    """API keys and label prefix of an engine.

    Attributes:
        owner: OWNER:EPOCH of the engine's labels; empty for an engine that no run owns, whose labels are versions.
        api_key: key for requests; empty: none.
        admin_key: key for administration, such as weight updates; empty: none.
    """

    owner: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)

    def label(self, version: int | str) -> str:
        """Return the label of a weight version on the engine."""
        return f"{self.owner}:{version}" if self.owner else str(version)

    def parse_label(self, label: str) -> str | None:
        """Return the weight version in a label; None if another owner set the label."""
        if not self.owner:
            return label
        owner, _, version = label.rpartition(":")
        return version if owner == self.owner else None

    def headers(self, path: str) -> dict[str, str]:
        """Return the headers that authorize a request to `path`; empty if the engine needs no key."""
        key = self.api_key if path.startswith(_API_KEY_PATHS) else self.admin_key
        return {"Authorization": f"Bearer {key}"} if key else {}


ANONYMOUS = Identity()


def engine_identity(owner: Owner, url: str) -> Identity:
    """Return the identity of the launch's engine at `url`."""

    def derive_key(purpose: str) -> str:
        return hmac.new(owner.key.encode(), f"{purpose} {url}".encode(), hashlib.sha256).hexdigest()

    tag = hmac.new(owner.key.encode(), b"owner", hashlib.sha256).hexdigest()[:12]
    return Identity(f"{tag}:{owner.epoch}", derive_key("api"), derive_key("admin"))


def config_path(run_dir: Path, unit: str) -> Path:
    """Return the path of the file that the engine `unit` gets as SGLang's `--config`."""
    return run_dir / FOLDER / f"{unit}.yaml"


def write_config(path: Path, identity: Identity) -> None:
    """Write an engine's `--config` file atomically, with mode 0600 and weight version 0.

    Raises:
        RunError: the file cannot be written.
    """
    part = path.with_suffix(".part")
    # JSON is YAML, and quotes a key that consists of digits.
    text = json.dumps(
        {
            "api-key": identity.api_key,
            "admin-api-key": identity.admin_key,
            "weight-version": identity.label(0),
        }
    )
    with disk_errors(path):
        part.unlink(missing_ok=True)
        with os.fdopen(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as f:
            f.write(text)
        os.replace(part, path)


def read_keys(path: Path) -> Identity:
    """Read the keys in a file for SGLang's `--config`.

    Raises:
        UserError: the file cannot be read or has no keys, or other users can read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: readable by other users; expected mode 0600")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(
            f"{path}: cannot read engine keys: {getattr(e, 'strerror', None) or type(e).__name__}"
        ) from None
    keys = (
        {attribute: str(document.get(name) or "") for name, attribute in _FIELDS.items()}
        if isinstance(document, dict)
        else {}
    )
    if not any(keys.values()):
        raise UserError(f"{path}: expected api-key and admin-api-key, as SGLang's --config takes them")
    # If only one key is set, SGLang accepts it for both kinds of requests, or needs no key for one kind.
    admin = keys["admin_key"] or keys["api_key"]
    return Identity(api_key=keys["api_key"], admin_key=admin)
