"""Whether two configs may use one run folder: the fields that must not change when a run goes on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rlsys.config.schema import Config


def identity_fields(config: Config) -> dict[str, Any]:
    """What must not change when a run folder is used again (the number of steps, say, may)."""
    data = config.model_dump(mode="json")
    data.pop("launch")
    data.pop("router")
    for key in ("dir", "share", "trackers", "spans"):
        data["run"].pop(key)
    for key in ("repeat", "keep_groups", "workers", "max_failed_share"):
        data["rollout"].pop(key)
    data["data"].pop("judge_timeout")
    if "://" in (data["data"]["judge"] or ""):
        data["data"]["judge"] = "url"  # its server may move
    data["engine"] = {k: data["engine"][k] for k in ("deterministic",)}
    for key in ("steps", "checkpoint_every", "export_every", "keep_checkpoints"):
        data["trainer"].pop(key)
    if (teacher := data["algo"]["teacher"]) is not None and teacher.pop("engine") is not None:
        teacher["engine"] = "engine"  # its server may move
    data.pop("eval")
    data.pop("parallel")  # a checkpoint loads in any layout
    return data


def identity(config: Config) -> str:
    """Hash of identity_fields."""
    return hashlib.sha256(json.dumps(identity_fields(config), sort_keys=True).encode()).hexdigest()[:16]
