"""Find the training command in a script, and list the reasons why it is uncertain."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rlsys.importers.draft import Settings
from rlsys.importers.shell import Command, Script, has_hole

_PRINTING = (
    "echo",
    "printf",
    "cat",
    "grep",
    "pkill",
    "pgrep",
    "sed",
    "ls",
    "cp",
    "mv",
    "rm",
    "tail",
    "head",
    "chmod",
)


def is_program(argv: list[str], index: int) -> bool:
    """Whether argument `index` is a program that the command starts, not a text or a file name."""
    if Path(argv[0][-99:]).name in _PRINTING:
        return False
    return index == 0 or any(
        re.match(r"python[\d.]*$|torchrun$|deepspeed$|accelerate$", Path(argument[-99:]).name)
        or has_hole(argument)
        for argument in argv[:index]
    )


def find_training_command(
    script: Script, program_index: Callable[[list[str]], int], programs: Sequence[str], setting_pattern: str
) -> tuple[Command | None, Settings]:
    """Return the first training command, and empty settings with the problems of the script.

    Args:
        script: the parsed script.
        program_index: returns the index of the program in an argument list; negative if the command is not a
            training command.
        programs: substrings of a training command.
        setting_pattern: regex of one of its settings; together with `programs` it detects a training command
            that is an argument of another shell.
    """
    settings = Settings({}, list(script.problems))
    training_command = None
    for command in script.commands:
        training = program_index(command.argv) >= 0
        if training and training_command is None:
            training_command = command
            if "xargs" in command.argv[: max(0, program_index(command.argv))]:
                settings.problems.append(f"line {command.line}: xargs adds words that are not known")
            if command.block is not None:
                settings.problems.append(
                    f"line {command.line}: the training command is in {command.block}: whether and how often it "
                    "runs, and with which values, is not known"
                )
        elif training:
            settings.problems.append(
                f"line {command.line}: a second training command; that of line "
                f"{training_command.line if training_command else 0} is "
                "translated"
            )
        elif command.argv[0] not in _PRINTING and any(
            any(program in argument for program in programs) and re.search(setting_pattern, argument)
            for argument in command.argv
        ):
            settings.problems.append(f"line {command.line}: a training command as text for another shell")
    if script.reads_arguments:
        settings.notes.append("$@: the script is translated as it runs without arguments of its own")
    return training_command, settings
