"""Pinned commits of a hub's data sets, which the run's config saves so that a resumed run reads the same data."""

from __future__ import annotations

from typing import Any

from rlsys.config import Config, load_config
from rlsys.data.hub import head

_CONFIG = "config.yaml"


def pin_data(config: Config) -> Config:
    """Return the config with a `revision` for each data set of a hub.

    An unset revision becomes the one in the run folder's config, or else the hub's newest commit, which is
    downloaded.

    Raises:
        UserError: a data set cannot be downloaded.
    """
    file = config.run.dir / _CONFIG
    previous = load_config(file).data.params if file.is_file() else {}
    params = _pinned(config.data.source, config.data.params, previous)
    if params == config.data.params:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"params": params})})


def _pinned(source: Any, params: Any, previous: Any) -> Any:
    """Return the parameters of a source with revisions.

    Malformed parameters are returned unchanged; the source reports them later.

    Args:
        previous: parameters of the source in the run folder's config; {}: none.
    """
    if not isinstance(params, dict):
        return params
    if source == "mixture" and isinstance(parts := params.get("sources"), list):
        previous_parts = previous.get("sources") if isinstance(previous, dict) else None
        previous_parts = (
            previous_parts
            if isinstance(previous_parts, list) and len(previous_parts) == len(parts)
            else [{}] * len(parts)
        )
        return {**params, "sources": [_pinned_part(p, k) for p, k in zip(parts, previous_parts, strict=True)]}
    if source != "dataset" or params.get("revision") or not isinstance(name := params.get("name"), str):
        return params
    if isinstance(previous, dict) and previous.get("name") == name and previous.get("revision"):
        return {**params, "revision": previous["revision"]}
    commit = head(name, None)
    return params if commit is None else {**params, "revision": commit}


def _pinned_part(part: Any, previous: Any) -> Any:
    if not isinstance(part, dict):
        return part
    previous_params = previous.get("params") if isinstance(previous, dict) else {}
    return {**part, "params": _pinned(part.get("source"), part.get("params", {}), previous_params)}
