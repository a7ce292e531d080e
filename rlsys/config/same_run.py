"""Identity of a run: a hash of the config fields that must stay equal when a run folder is used again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.core.hub import snapshot_name


def identity_fields(config: Config) -> dict[str, Any]:
    """Return the config without the fields that may change when a run folder is used again."""
    data = config.model_dump(mode="json")
    data.pop("launch")
    data.pop("router")
    for key in ("dir", "share", "trackers", "spans", "profile"):
        data["run"].pop(key)
    for key in ("repeat", "keep_groups", "workers", "max_failed_share"):
        data["rollout"].pop(key)
    data["data"].pop("judge_timeout")
    if "://" in (data["data"]["judge"] or ""):
        data["data"]["judge"] = "url"  # the server's address may change
    data["engine"] = {k: data["engine"][k] for k in ("deterministic",)}
    for key in ("steps", "checkpoint_every", "export_every", "keep_checkpoints"):
        data["trainer"].pop(key)
    if (teacher := data["algo"]["teacher"]) is not None and teacher.pop("engine") is not None:
        teacher["engine"] = "engine"  # the server's address may change
    models = [data["model"]] if teacher is None else [data["model"], teacher, teacher["by_source"]]
    for section in models:
        section |= {name: _model_name(value) for name, value in section.items()}
    data.pop("eval")
    data.pop("parallel")  # a checkpoint loads in any layout
    return data


def _model_name(value: Any) -> Any:
    """Return `owner/name@commit` for a path in a hub's cache, which may move; return another value unchanged."""
    return (snapshot_name(Path(value)) or value) if isinstance(value, str) else value


def identity(config: Config) -> str:
    """Return the hash of `identity_fields` as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(identity_fields(config), sort_keys=True).encode()).hexdigest()[:16]
