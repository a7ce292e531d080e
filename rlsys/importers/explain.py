"""What to say to people who give our config or command line a name of verl or slime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rlsys.importers.slime import SLIME
from rlsys.importers.verl import VERL

_TRACKERS = "trackers of a run are named in run.trackers"
ELSEWHERE = {
    "max_turns": "it is the generator's: rollout.generator_params={max_turns: 4}",
    "wandb": _TRACKERS,
    "use_wandb": _TRACKERS,
    "logger": _TRACKERS,
    "adv_estimator": "it is algo.advantage",
    "reward_fn_key": "a row's key data_source goes to a reward function with verl's signature as it is",
}
"""Fields that others have and rlsys has not, or has in another way."""


def explain_foreign(error: ValidationError) -> str | None:
    """One line for a config's first mistake, where it is a key of verl, or an option of slime without its dashes."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return None
    return next(filter(None, map(_told, _leaves(".".join(map(str, first["loc"])), first["input"]))), None)


def _leaves(path: str, value: Any) -> Iterator[str]:
    """The fields below an unknown key, which may be one of verl's whole sections."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}", below)
    else:
        yield path


def _told(path: str) -> str | None:
    if path in VERL:
        return f"{path}: a field of verl; here it is {VERL[path]}"
    key = path.rpartition(".")[2].replace("-", "_").lstrip("_").removeprefix("rollout_")
    if key in ELSEWHERE:
        return f"{path}: there is no such field: {ELSEWHERE[key]}"
    for name in (path, path.rpartition(".")[2]):
        option = "--" + name.lstrip("-").replace("_", "-")
        if option in SLIME:
            return f"{path}: an option of slime; here it is {SLIME[option]}"
    return None


def told_of_options(words: list[str]) -> str | None:
    """What to say of words that the command line does not know; None where none is slime's, nor a field of ours."""
    for word, following in zip(words, [*words[1:], "VALUE"], strict=True):
        option, _, value = word.partition("=")
        if option in SLIME:
            return f"{option}: an option of slime; here it is {SLIME[option]}"
        if option.startswith("--") and "." in option:
            return f"{option}: fields have no dashes: {option[2:]}={value or following}"
    return None
