"""The commit of a hub's data sets, written into the config: a run that goes on has the data that it began with."""

from __future__ import annotations

from typing import Any

from rlsys.config import Config, load_config
from rlsys.data.hub import head

_CONFIG = "config.yaml"


def pin_data(config: Config) -> Config:
    """With `revision` for each data set of a hub that names none: the one that the run folder has, else the hub's
    newest, which is fetched. Raises UserError for what cannot be fetched."""
    file = config.run.dir / _CONFIG
    before = load_config(file).data.params if file.is_file() else {}
    params = _pinned(config.data.source, config.data.params, before)
    if params == config.data.params:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"params": params})})


def _pinned(source: Any, params: Any, before: Any) -> Any:
    """What is not as it should be stays as it is: the source says so."""
    if not isinstance(params, dict):
        return params
    if source == "mixture" and isinstance(parts := params.get("sources"), list):
        known = before.get("sources") if isinstance(before, dict) else None
        known = known if isinstance(known, list) and len(known) == len(parts) else [{}] * len(parts)
        return {**params, "sources": [_pinned_part(p, k) for p, k in zip(parts, known, strict=True)]}
    if source != "dataset" or params.get("revision") or not isinstance(name := params.get("name"), str):
        return params
    if isinstance(before, dict) and before.get("name") == name and before.get("revision"):
        return {**params, "revision": before["revision"]}
    commit = head(name, None)
    return params if commit is None else {**params, "revision": commit}


def _pinned_part(part: Any, before: Any) -> Any:
    if not isinstance(part, dict):
        return part
    known = before.get("params") if isinstance(before, dict) else {}
    return {**part, "params": _pinned(part.get("source"), part.get("params", {}), known)}
