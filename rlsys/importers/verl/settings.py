"""Reads the settings of verl's launch scripts and YAML files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlsys.core.errors import UserError
from rlsys.importers.arguments import Arguments
from rlsys.importers.draft import Settings
from rlsys.importers.namespace import ScriptRun
from rlsys.importers.verl.names import CONFIGS, PROGRAM, PROGRAMS

SECTIONS = (
    "data",
    "model",
    "optim",
    "actor_rollout_ref",
    "algorithm",
    "trainer",
    "critic",
    "reward",
    "reward_model",
    "custom_reward_function",
)
"""Sections that identify a command of verl: at least one of its settings is in such a section."""
EXPECTED = "python -m verl.trainer.main_ppo with settings such as data.train_batch_size=256"
_SETTING = re.compile(r"(~|\+{1,2})?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


def read_yaml(data: Any) -> Settings:
    """Return the settings of a resolved config or of hydra's overrides.yaml; their keys are dotted names.

    Args:
        data: content of the file.

    Raises:
        UserError: the content is neither a mapping nor a list of overrides.
    """
    if isinstance(data, list):
        if not data or not all(isinstance(argument, str) and "=" in argument for argument in data):
            raise UserError("expected a mapping of settings, or a list of overrides such as data.seed=1")
        settings = Settings({})
        for argument in data:
            _read_argument(Arguments([], ScriptRun()), str(argument), settings)
        return settings
    if not isinstance(data, dict):
        raise UserError(f"found {type(data).__name__}; expected a mapping of settings")
    return Settings(_flatten(data))


def program_index(argv: Sequence[str]) -> int:
    """Return the index of the program in an argument list; -1 if the list has no setting of verl.

    The program is the argument before the first setting.
    """
    for index, argument in enumerate(argv):
        match = _SETTING.fullmatch(argument[:200])
        if match and match[3] is not None and "." in match[2] and match[2].partition(".")[0] in SECTIONS:
            index -= 1
            while index > 0 and argv[index].startswith(("-", "+", "~")) and argv[index - 1] != "-m":
                index -= 1
            while index > 0 and "=" in argv[index]:
                index -= 1
            return max(index, 0)
    return -1


def read_settings(arguments: Arguments) -> Settings:
    """Return the settings of the training command; their keys are dotted names, and PROGRAM."""
    settings = Settings({}, list(arguments.problems), list(arguments.notes))
    program = arguments.run.source_text(arguments.argv[0]).removesuffix(".py").rpartition("/")[2]
    settings.values[PROGRAM] = program
    if program not in PROGRAMS and "sft_trainer" not in program:
        settings.problems.append(
            f"{program or 'the command'}: this program is not supported; expected python -m verl.trainer.main_ppo"
        )
    for argument in arguments.argv[1:]:
        _read_argument(arguments, argument, settings)
    return settings


def _read_argument(arguments: Arguments, argument: str, settings: Settings) -> None:
    """Add an argument of the command to the values or the problems of `settings`."""
    option, _, value = argument.partition("=")
    if option in ("--config-name", "-cn") and value.removesuffix(".yaml") in CONFIGS:
        return
    if option in ("--config-path", "-cp") and value in ("config", "./config"):  # verl's own
        return
    text, reason = arguments.run.source_text(argument), arguments.run.explain(option)
    if argument.startswith("-"):
        settings.problems.append(f"{text}: not supported; settings of this option or file are not read")
        return
    match = _SETTING.fullmatch(argument)
    if match is None or reason:
        settings.problems.append(f"{text}: {reason or 'expected NAME=VALUE'}; it may be any setting")
    elif match[1] == "~":
        settings.problems.append(f"{text}: no counterpart: the argument removes a setting")
    elif match[3] is None:
        settings.problems.append(f"{text}: expected NAME=VALUE")
    else:
        settings.values[match[2]] = arguments.value([match[3]])


def _flatten(data: Any) -> dict[str, Any]:
    """Return dotted name -> value for all settings of nested mappings, without null values.

    Raises:
        UserError: there are more than 20,000 settings.
    """
    flat: dict[str, Any] = {}
    pending = [("", data)]
    count = 0
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            count += 1
            if count > 20_000:
                raise UserError("the file has more than 20,000 settings; expected a config of verl")
            if isinstance(value, dict):
                pending.append((f"{prefix}{key}.", value))
            elif value is not None:
                flat[f"{prefix}{key}"] = value
    return flat
