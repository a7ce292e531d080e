"""Find the training command of a script, and list what makes it uncertain."""

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


def is_started(words: list[str], place: int) -> bool:
    """Whether the word at `place` is a program that the command starts, and no text or file name."""
    if Path(words[0][-99:]).name in _PRINTING:
        return False
    return place == 0 or any(
        re.match(r"python[\d.]*$|torchrun$|deepspeed$|accelerate$", Path(word[-99:]).name) or has_hole(word)
        for word in words[:place]
    )


def settings_of_command(
    script: Script, place_of: Callable[[list[str]], int], programs: Sequence[str], setting: str
) -> tuple[Command | None, Settings]:
    """The first training command, and empty settings with the problems of the script.

    Args:
        script: as it was read.
        place_of: the place of the program among the words of a training command; negative for another command.
        programs: texts that a training command has.
        setting: pattern of one of its settings; together they show a command inside one word, for another shell.
    """
    settings = Settings({}, list(script.problems))
    chosen = None
    for command in script.commands:
        training = place_of(command.words) >= 0
        if training and chosen is None:
            chosen = command
            if "xargs" in command.words[: max(0, place_of(command.words))]:
                settings.problems.append(f"line {command.line}: xargs adds words that are not known")
            if command.inside is not None:
                settings.problems.append(
                    f"line {command.line}: the training command is in {command.inside}: whether and how often it "
                    "runs, and with which values, is not known"
                )
        elif training:
            settings.problems.append(
                f"line {command.line}: a second training command; that of line {chosen.line if chosen else 0} is "
                "translated"
            )
        elif command.words[0] not in _PRINTING and any(
            any(program in word for program in programs) and re.search(setting, word)
            for word in command.words
        ):
            settings.problems.append(f"line {command.line}: a training command as text for another shell")
    if script.reads_arguments:
        settings.notes.append("$@: the script is translated as it runs without arguments of its own")
    return chosen, settings
