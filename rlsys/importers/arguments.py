"""Arguments of a training command, read from a script that runs in a sealed namespace, or from a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.core.errors import UserError
from rlsys.importers.draft import Unresolved
from rlsys.importers.namespace import ScriptRun, run_script

MAX_TEXT = 2**20
"""Maximum number of characters of a script, command line or YAML file."""
_EXPANSION = re.compile(r"\$\{?([A-Za-z_]\w*|[1-9@*])[^}\s]*\}?|\$\(|`")
_PROGRAM = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|ray|srun|sudo|docker|ssh|xargs|uv|conda")


@dataclass
class Arguments:
    """Arguments of one training command.

    Attributes:
        argv: the program and its arguments.
        run: record of the script.
        problems: reasons why the script may run another command, one line each.
        notes: lines for the user.
    """

    argv: list[str]
    run: ScriptRun
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def value(self, arguments: Sequence[str]) -> str | list[str] | bool | Unresolved:
        """Return the value of an option with these arguments.

        Returns:
            True for no argument, a list for several; Unresolved if the script does not determine an argument.
        """
        if reason := next(filter(None, map(self.run.explain, arguments)), None):
            return Unresolved(" ".join(map(self.run.source_text, arguments)), reason)
        if not arguments:
            return True
        return arguments[0] if len(arguments) == 1 else list(arguments)


def read_arguments(
    text: str,
    path: Path | None,
    program_index: Callable[[Sequence[str]], int],
    program: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    gpus: int = 8,
) -> Arguments:
    """Return the arguments of the first training command, from the training program on.

    Args:
        text: a script or a command line.
        path: file of the text; None if it has none.
        program_index: returns the index of the training program in an argument list; -1 if there is none.
        program: description of the expected command, for the error.
        arguments: arguments of the script.
        variables: environment variables of the script.
        gpus: number of GPUs that `nvidia-smi` prints.

    Raises:
        UserError: there is no training command, or the script cannot run.
    """
    if path is not None and is_script(text, path):
        run = run_script(path, arguments, variables, gpus)
    else:
        run = ScriptRun(_split(text, variables or {}))
    commands: list[list[str]] = []
    for argv in run.commands:
        if argv[:3] == ["ray", "job", "submit"] and "--" in argv:
            continue  # the job's command has its own record
        index = program_index(argv)
        if (
            index >= 0
            and (index == 0 or _PROGRAM.fullmatch(Path(argv[0]).name))
            and argv[index:] not in commands
        ):
            commands.append(argv[index:])
    if not commands:
        status = f"; the script ended with status {run.status}: {run.last_line}" if run.status else ""
        raise UserError(
            f"no training command: expected {program}{status} (--env NAME=VALUE and --arguments TEXT set values)"
        )
    result = Arguments(commands[0], run, list(run.branches))
    result.problems += [
        f"a second training command: {' '.join(map(run.source_text, c))[:200]}" for c in commands[1:]
    ]
    if run.status in (124, 137):
        result.notes.append("the script was stopped at its time limit; later training commands are unknown")
    return result


def is_script(text: str, path: Path) -> bool:
    """Return whether a file is a script rather than a command line."""
    return text.startswith("#!") or path.suffix in (".sh", ".bash", ".slurm", ".sbatch")


def _split(text: str, variables: Mapping[str, str]) -> list[list[str]]:
    """Split a command line into commands, as a shell does.

    Args:
        text: the command line.
        variables: values of variables. All other expansions become markers.

    Raises:
        UserError: the text has unbalanced quotes.
    """
    if "\0" in text:  # /proc/PID/cmdline
        return [text.strip("\0").split("\0")]

    def marker(match: re.Match[str]) -> str:
        if match[1] in variables:
            suffix = "" if match[0].startswith("${") else match[0][1 + len(match[1]) :]
            return variables[match[1]] + _EXPANSION.sub(marker, suffix)
        return f"@@unset:{match[1]}@@" if match[1] else "@@output:@@"

    try:
        lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        lexer.commenters = ""
        arguments = list(lexer)
    except ValueError as e:
        raise UserError(f"expected a command line: {e}") from None
    commands: list[list[str]] = [[]]
    for argument in arguments:
        if argument and not argument.strip("();<>|&"):
            commands.append([])
        else:
            commands[-1].append(_EXPANSION.sub(marker, argument))
    return [command for command in commands if command]
