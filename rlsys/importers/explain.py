"""Error messages for settings of verl or slime in a config or on the command line of rlsys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rlsys.importers.slime import SLIME
from rlsys.importers.verl import VERL

_TRACKERS = "run.trackers names the trackers of a run"
RENAMED_FIELDS = {
    "max_turns": "it is a parameter of the generator: rollout.generator_params={max_turns: 4}",
    "wandb": _TRACKERS,
    "use_wandb": _TRACKERS,
    "logger": _TRACKERS,
    "adv_estimator": "it is algo.advantage",
    "reward_fn_key": "a reward function with verl's signature always gets the row's data_source",
}
"""Common names of fields in other frameworks -> the counterpart in rlsys."""


def explain_foreign(error: ValidationError) -> str | None:
    """Return a message if the first unknown key of a config is a setting of verl or slime; otherwise None."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return None
    return next(
        filter(None, map(_explain, _leaf_paths(".".join(map(str, first["loc"])), first["input"]))), None
    )


def _leaf_paths(path: str, value: Any) -> Iterator[str]:
    """Yield the dotted paths of the leaves below an unknown key."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaf_paths(f"{path}.{key}", below)
    else:
        yield path


def _explain(path: str) -> str | None:
    """Return a message if a dotted path is a setting of verl or slime; otherwise None."""
    if path in VERL:
        return f"{path}: a field of verl; here it is {VERL[path]}"
    key = path.rpartition(".")[2].replace("-", "_").lstrip("_").removeprefix("rollout_")
    if key in RENAMED_FIELDS:
        return f"{path}: there is no such field: {RENAMED_FIELDS[key]}"
    for name in (path, path.rpartition(".")[2]):
        option = "--" + name.lstrip("-").replace("_", "-")
        if option in SLIME:
            return f"{path}: an option of slime; here it is {SLIME[option]}"
    return None


def explain_options(arguments: list[str]) -> str | None:
    """Return a message if an argument is an option of slime, or a config field with dashes; otherwise None."""
    for argument, following in zip(arguments, [*arguments[1:], "VALUE"], strict=True):
        option, _, value = argument.partition("=")
        if option in SLIME:
            return f"{option}: an option of slime; here it is {SLIME[option]}"
        if option.startswith("--") and "." in option:
            return f"{option}: expected a field without dashes: {option[2:]}={value or following}"
    return None
