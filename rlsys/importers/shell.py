"""Static reader for bash launch scripts; nothing is executed.

The reader expands quotes, continued lines, variables with defaults, arrays, integer arithmetic, `seq` and the
script's own folder, and it follows `source`. Everything else leaves a hole in the word that contains it:
command output, an unset variable, and a variable that is assigned where it is unknown whether or how often
the line runs (a branch, a loop, a function, the right side of `&&` and `||`). A hole is a pair of private-use
characters around a number; `Script.holes_in` returns its source text and reason. The reader never fills a
hole.

Every loop advances the position or ends, and the size of a script, of all its expansions and of the nesting
is bounded, so an untrusted script takes bounded time.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError

MAX_SCRIPT = 1 << 18
"""Maximum characters of a script."""
MAX_EXPANDED = 1 << 22
"""Maximum total characters of all expansions of a script."""
MAX_DEPTH = 32
"""Maximum nesting of expansions and of sourced files."""
_LONGEST_PATTERN = 400
"""Maximum characters of a text that is matched against a regex with quadratic worst-case time."""

_OPEN, _CLOSE = "\ue000", "\ue001"
_HOLE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^]\n]*\])?(\+?)=")
_ELEMENT = re.compile(r"\[[^]\n]{0,200}\]\+?=")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|&>>|&>|>>|>\||<>|<&|>&|<(?!\()|>(?!\())")
_FUNCTION = re.compile(r"[ \t]*\([ \t]*\)")
_PLAIN = re.compile(r"""[^\s;&|()'"\\$`<>~*?{]*""")
_PLAIN_QUOTED = re.compile(r"""[^"$\\`]*""")
_BRACE_EXPANSION = re.compile(r"\{[^\s{}'\"]{0,200}?(?:,|\.\.)[^\s{}'\"]{0,200}\}")
_ARITHMETIC = re.compile(r"[\w\s+\-*/%()]*")
_ARITHMETIC_ASSIGNMENT = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_NO_SEPARATOR = re.compile(r"[\w./+=-]*")
"""Values that contain no common separator."""
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_PREFIX_KEYWORDS = ("then", "else", "elif", "do", "time", "!", "nohup", "exec", "command")
_OPENING = {
    "if": "fi",
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
}
_UNCERTAIN = ("if", "for", "while", "until", "select", "case", "function", "&& or ||")
_ASSIGNING_BUILTINS = ("read", "mapfile", "readarray", "getopts", "let", "unset")
_SPECIAL = {
    "?": "the exit status of a command",
    "$": "a process id",
    "!": "a process id",
    "#": "the number of the script's arguments",
    "-": "bash's flags",
}


def has_hole(token: str) -> bool:
    """Whether a part of a word is unknown."""
    return _OPEN in token


@dataclass(frozen=True)
class Hole:
    """Part of a word that the script alone does not determine."""

    text: str
    """Text in the script."""
    reason: str


@dataclass(frozen=True)
class Command:
    """Simple command after expansion."""

    argv: list[str]
    line: int
    block: str | None
    """Enclosing branch, loop or function, with its line; None if the command certainly runs once."""


@dataclass
class _Frame:
    kind: str
    line: int
    name: str = ""


class Script:
    """Commands of a script, and the constructs that the reader does not support.

    Args:
        text: the script.
        variables: the environment of the script.
        path: location of the script, for `source` and for scripts that look up their own folder.

    Raises:
        UserError: the script or its expansions exceed the reader's limits.
    """

    def __init__(
        self, text: str, variables: Mapping[str, str] | None = None, path: Path | None = None
    ) -> None:
        self.variables: dict[str, str | list[str]] = dict(variables or {})
        self.path = path
        self.commands: list[Command] = []
        self.holes: list[Hole] = []
        self.problems: list[str] = []
        """Unsupported constructs, one line each."""
        self.reads_arguments = False
        """Whether `$@` is used; it is empty for a script that is started without arguments."""
        self.positional: str | None = None
        """Reason why `$1` etc. are unknown; None: the script is started without arguments."""
        self.changed_directory = False
        """Whether the script has changed the working directory, so that relative paths are unknown."""
        self.frames: list[_Frame] = []
        self.readonly: set[str] = set()
        self.functions: dict[str, tuple[set[str], set[str]]] = {}
        """Function name -> the variables that it may set, and the commands that it runs."""
        self.exited = False
        """Whether an unconditional `exit` was read; later lines do not run."""
        self._budget = MAX_EXPANDED
        _Reader(self, text, 0, path).read_commands()

    @property
    def unknown(self) -> set[str]:
        """Source text of every hole."""
        return {hole.text for hole in self.holes}

    def add_hole(self, text: str, reason: str) -> str:
        """Add a hole, and return the text that represents it in a word."""
        self.holes.append(Hole(text, reason))
        self.spend(8)
        return f"{_OPEN}{len(self.holes) - 1}{_CLOSE}"

    def holes_in(self, token: str) -> list[Hole]:
        """Return the holes in a word."""
        return [self.holes[int(number)] for number in _HOLE.findall(token)]

    def is_hole(self, token: str) -> bool:
        """Whether the entire word is unknown, so that it may expand to several words, or none."""
        return _HOLE.fullmatch(token) is not None

    def source_text(self, token: str) -> str:
        """Return the word with each hole replaced by its source text."""
        return _HOLE.sub(lambda match: self.holes[int(match[1])].text, token)

    def assigned_variables(self, name: str) -> set[str]:
        """Return the variables that the function `name` may set, including by functions that it calls."""
        variables: set[str] = set()
        visited, pending = {name}, [name]
        while pending:
            assigned, callees = self.functions.get(pending.pop(), (set(), set()))
            variables |= assigned
            pending += callees - visited
            visited |= callees
        return variables

    def spend(self, characters: int) -> None:
        self._budget -= characters
        if self._budget < 0:
            raise UserError(
                f"its expansions have more than {MAX_EXPANDED:,} characters; it is not read further"
            )


class _Reader:
    """Parser at a position of a text; variables, holes and commands belong to the script."""

    def __init__(self, script: Script, text: str, depth: int, path: Path | None) -> None:
        if len(text) > MAX_SCRIPT:
            raise UserError(f"has {len(text):,} characters; expected a script of at most {MAX_SCRIPT:,}")
        if depth > MAX_DEPTH:
            raise UserError(f"is nested more than {MAX_DEPTH} deep; it is not read further")
        self._script, self._depth, self._path = script, depth, path
        self._text, self._at = text.replace(_OPEN, "").replace(_CLOSE, ""), 0
        self._line, self._line_at = 1, 0
        self._conditional = False  # whether `&&` or `||` decides if the next command runs
        self._heredocs: list[tuple[str, bool]] = []

    def read_commands(self) -> None:
        while self._at < len(self._text) and not self._script.exited:
            position = self._at
            self._command()
            self._at = max(self._at, position + 1)

    # Commands

    def _command(self) -> None:
        self._blanks()
        if self._at >= len(self._text) or self._separator():
            return
        line = self._line_now()
        argv: list[str] = []
        replaced: dict[str, str | list[str] | None] = {}
        declared: dict[str, str | list[str]] = {}
        while self._at < len(self._text):
            self._blanks()
            if self._at >= len(self._text) or self._text[self._at] in "\n;&|)":
                if self._text.startswith("&>", self._at) and self._redirect():
                    continue
                break
            if self._redirect():
                continue
            if self._text[self._at] == "(":
                if len(argv) == 1 and (match := _FUNCTION.match(self._text, self._at)):
                    self._at = match.end()
                    self._open_function(argv[0], line)
                    return
                break
            if (not argv or argv[0] in _DECLARE) and self._assignment(argv, replaced, declared):
                continue
            if not argv:
                self._restore(replaced)
            start, new = self._at, self._read_word()
            if not argv and new:
                token = self._text[start : self._at]
                if self._keyword(token, line):
                    return
                if token in _PREFIX_KEYWORDS or token in _OPENING or token in _OPENING.values():
                    continue
            argv += new
            self._at = max(self._at, start + 1)
        self._script.variables |= declared
        if not argv and self._in_subprocess():
            for name in replaced:
                self._set_hole(name, f"${name}", f"is set in another process at line {line}")
        if argv:
            self._builtin(argv, line)
            self._script.commands.append(Command(argv, line, self._uncertain(commands=True)))

    def _in_subprocess(self) -> bool:
        """Whether the command runs in a process of its own: `&` or `|` follows."""
        following = self._text[self._at : self._at + 2]
        return following[:1] in ("&", "|") and following not in ("&&", "||")

    def _restore(self, replaced: dict[str, str | list[str] | None]) -> None:
        """Restore variables after `LR=1 command`, which sets LR for that command only."""
        for name, value in replaced.items():
            if value is None:
                self._script.variables.pop(name, None)
            else:
                self._script.variables[name] = value
        replaced.clear()

    def _separator(self) -> bool:
        """Read one operator between commands; return whether there was one."""
        for operator in ("&&", "||", "\n", ";", "&", "|"):
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                self._conditional = operator in ("&&", "||") or (self._conditional and operator == "|")
                if operator == "\n":
                    self._skip_heredocs()
                return True
        if self._text.startswith("((", self._at):
            inside = self._delimited("((", "))")
            if len(inside) > _LONGEST_PATTERN:
                self._script.problems.append(
                    f"{self._location(self._line_now())}: (({inside[:40]}...)): not followed"
                )
                return True
            for name in (match[1] or match[2] for match in _ARITHMETIC_ASSIGNMENT.finditer(inside)):
                self._set_hole(name, f"(({inside}))", "is set by arithmetic that is not computed")
            return True
        if self._text[self._at] == "(":
            self._script.frames.append(_Frame("subshell", self._line_now()))
            self._at += 1
            return True
        if self._text[self._at] == ")":
            if self._script.frames and self._script.frames[-1].kind == "subshell":
                self._script.frames.pop()
            self._at += 1
            return True
        return False

    def _keyword(self, token: str, line: int) -> bool:
        """Open or close the block of a reserved word; return True if no command follows directly."""
        frames = self._script.frames
        if token in ("fi", "done", "esac", "}"):
            for depth in range(len(frames) - 1, -1, -1):
                if _OPENING.get(frames[depth].kind, "}") == token and frames[depth].kind != "subshell":
                    del frames[depth:]
                    break
            return False
        if token == "function":
            self._blanks()
            if match := re.compile(r"[\w:.-]+").match(self._text, self._at):
                self._at = match.end()
                if (paired := _FUNCTION.match(self._text, self._at)) is not None:
                    self._at = paired.end()
                self._open_function(match[0], line)
            return True
        if token not in _OPENING:
            return False
        if len(frames) >= 1000:
            raise UserError(f"line {line}: more than 1000 blocks are open; it is not read further")
        frames.append(_Frame(token, line))
        if token in ("for", "select"):
            self._blanks()
            if self._text.startswith("((", self._at):
                self._separator()
            elif match := _NAME.match(self._text, self._at):
                self._at = match.end()
                self._set_hole(match[0], f"${match[0]}", f"has several values in the loop at line {line}")
        return token not in ("if", "while", "until", "{")

    def _open_function(self, name: str, line: int) -> None:
        self._script.frames.append(_Frame("function", line, name))
        self._script.functions[name] = (set(), set())
        match = re.compile(r"\s*\{").match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _uncertain(self, commands: bool = False) -> str | None:
        """Return the innermost block that makes execution of a line uncertain; a subshell affects variables only."""
        for frame in reversed(self._script.frames):
            if frame.kind == "function":
                return f"the function {frame.name} at line {frame.line}"
            if frame.kind in _UNCERTAIN or (frame.kind == "subshell" and not commands):
                return f"the {frame.kind} at line {frame.line}"
        return None

    def _builtin(self, argv: list[str], line: int) -> None:
        """Apply the effects of a command on variables."""
        name, arguments = argv[0], argv[1:]
        if (function := self._function()) is not None:
            self._script.functions[function][1].add(name)
        if name in self._script.functions:
            for variable in sorted(self._script.assigned_variables(name)):
                self._set_hole(
                    variable, f"${variable}", f"is set by the function {name}, called at line {line}"
                )
        elif (
            name == "exit"
            and self._uncertain() is None
            and not self._conditional
            and not self._in_subprocess()
        ):
            self._script.exited = True
        elif (name == "shopt" and "expand_aliases" in arguments and "-s" in arguments) or (
            name == "trap" and "DEBUG" in arguments
        ):
            self._script.problems.append(
                f"{self._location(line)}: {' '.join(argv)[:80]}: not followed; it changes later commands"
            )
        elif name in _ASSIGNING_BUILTINS:
            for token in arguments:
                if match := _NAME.match(token):
                    self._set_hole(match[0], f"${match[0]}", f"is set by `{name}` at line {line}")
        elif name == "printf" and arguments[:1] == ["-v"] and len(arguments) > 1:
            self._set_hole(arguments[1], f"${arguments[1]}", f"is set by `printf` at line {line}")
        elif name == "shift" or (name == "set" and "--" in arguments):
            self._script.positional = f"`{name}` at line {line} changes the arguments"
        elif name in ("cd", "pushd", "popd"):
            self._script.changed_directory = True
        elif name in _DECLARE and any(self._script.holes_in(token) for token in arguments):
            text = self._script.source_text(" ".join(arguments))[:80]
            self._script.problems.append(
                f"{self._location(line)}: {name} {text}: which variables it sets is not known"
            )
        elif name == "eval":
            text = self._script.source_text(" ".join(arguments))[:80]
            self._script.problems.append(
                f"{self._location(line)}: eval {text}: not followed; it may set any variable"
            )
        elif name in ("source", ".") and arguments:
            self._source(arguments[0], line)

    def _source(self, token: str, line: int) -> None:
        script = self._script
        if holes := script.holes_in(token):
            script.problems.append(
                f"{self._location(line)}: source {script.source_text(token)}: {holes[0].reason}"
            )
            return
        file = Path(token)
        if script.changed_directory and not file.is_absolute():
            script.problems.append(
                f"{self._location(line)}: source {token}: relative to a folder that `cd` chose"
            )
            return
        try:
            small = file.is_file() and file.stat().st_size <= 4 * MAX_SCRIPT
            text = file.read_text(encoding="utf-8") if small else None
        except (OSError, UnicodeDecodeError, ValueError):
            text = None
        if text is None:
            script.problems.append(
                f"{self._location(line)}: source {token}: no such text file here; what it sets is unknown"
            )
            return
        frames = len(script.frames)
        if self._conditional:
            script.frames.append(_Frame("&& or ||", line))
        try:
            _Reader(script, text, self._depth + 1, file.absolute()).read_commands()
        except UserError as e:
            raise UserError(f"{token} {e}") from None
        del script.frames[frames:]

    # Assignments

    def _assignment(
        self,
        argv: list[str],
        replaced: dict[str, str | list[str] | None],
        declared: dict[str, str | list[str]],
    ) -> bool:
        """Read one assignment; return False if there is none.

        Args:
            argv: the words of the command so far; not empty for `declare` and similar builtins.
            replaced: receives the previous values of the variables.
            declared: receives the new values, which apply once the whole declaration is read.
        """
        match = _ASSIGN.match(self._text, self._at)
        if match is None:
            return False
        name, index, appends = match.groups()
        self._at = match.end()
        variables = self._script.variables
        if not argv:
            replaced.setdefault(name, variables.get(name))
        array = self._text.startswith("(", self._at) and not index
        value: str | list[str]
        if array:
            self._at += 1
            value = self._array()
        else:
            value = "".join(self._read_word(assigned=True)) if self._at < len(self._text) else ""
        shadowed = variables.get(name)
        previous = declared.get(name, variables.get(name, [] if array else ""))
        reason = self._uncertain()
        if self._conditional and reason is None:
            reason = f"the && or || at line {self._line_now()}"
        if name in self._script.readonly:
            variables[name] = self._unknown(name, f"is readonly, and set again at line {self._line_now()}")
        elif index or any(
            token.startswith("-") and set(token) & set("ainlu") for token in argv[1:] if not array
        ):
            variables[name] = self._unknown(
                name, f"is set with an index or an attribute at line {self._line_now()}"
            )
        elif reason is not None:
            if appends and isinstance(previous, list):
                variables[name] = [*previous, self._script.add_hole(f"{name}+=(...)", f"is set in {reason}")]
            else:
                variables[name] = self._unknown(name, f"is set in {reason}")
        elif isinstance(value, list):
            prefix = (previous if isinstance(previous, list) else [previous]) if appends else []
            variables[name] = [*prefix, *value]
        else:
            prefix_text = (previous[0] if previous else "") if isinstance(previous, list) else previous
            variables[name] = (prefix_text if appends else "") + value
        self._script.spend(sum(map(len, variables[name])) + len(variables[name]))
        if argv:
            declared[name] = variables.pop(name)
            if shadowed is not None:
                variables[name] = shadowed
            if argv[0] == "readonly" or any(w.startswith("-") and "r" in w for w in argv[1:]):
                self._script.readonly.add(name)
        if (function := self._function()) is not None and argv[:1] != ["local"]:
            self._script.functions[function][0].add(name)
        return True

    def _function(self) -> str | None:
        """Return the function whose body is being read."""
        return next((f.name for f in reversed(self._script.frames) if f.kind == "function"), None)

    def _set_hole(self, name: str, text: str, reason: str) -> None:
        self._script.variables[name] = self._script.add_hole(text, f"{name} {reason}")
        if (function := self._function()) is not None:
            self._script.functions[function][0].add(name)

    def _unknown(self, name: str, reason: str) -> str:
        return self._script.add_hole(f"${name}", f"{name} {reason}")

    def _array(self) -> list[str]:
        argv: list[str] = []
        while self._at < len(self._text):
            self._blanks()
            if self._text.startswith(")", self._at):
                self._at += 1
                break
            position = self._at
            if self._at < len(self._text) and self._text[self._at] in "\n;&|(":
                self._at += 1  # bash refuses all but the newline
            elif match := _ELEMENT.match(self._text, self._at):
                self._at = match.end()
                self._read_word(assigned=True)
                argv.append(
                    self._script.add_hole(f"{match[0]}...", "elements with an index are not followed")
                )
            else:
                argv += self._read_word()
            self._at = max(self._at, position + 1)
        return argv

    # Blanks, here-documents, redirections

    def _line_now(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = max(self._at, self._line_at)
        return self._line

    def _location(self, line: int) -> str:
        """Format a line number, with the file if it is a sourced one."""
        sourced = self._path is not None and self._path != self._script.path
        return f"{self._path}, line {line}" if sourced else f"line {line}"

    def _blanks(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at] in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at) or self._text.startswith("\\\r\n", self._at):
                self._at = self._text.index("\n", self._at) + 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _redirect(self) -> bool:
        match = _REDIRECT.match(self._text, self._at)
        if match is None:
            return False
        self._at = match.end()
        self._blanks()
        start = self._at
        token = "".join(self._read_word())
        if match[0].endswith(("<<", "<<-")) and not match[0].endswith("<<<"):
            quoted = self._text[start : self._at]
            self._heredocs.append((re.sub(r"['\"\\]", "", quoted) or token, match[0].endswith("-")))
        return True

    def _skip_heredocs(self) -> None:
        for end, tabs in self._heredocs:
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line = self._text[self._at : stop]
                self._at = stop + 1
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == end:
                    break
        self._heredocs = []

    # Words

    def _read_word(self, assigned: bool = False) -> list[str]:
        """Read one word: several strings for an array, none for an empty expansion."""
        out, quoted, start = [""], assigned, self._at
        while self._at < len(self._text):
            c = self._text[self._at]
            if c in " \t\n;&|)" or (c == "(" and not assigned) or (c == "\r" and self._ends_line()):
                break
            if c in "<>" and not self._text.startswith("(", self._at + 1):
                break
            self._at += 1
            if c == "'":
                end = self._end_of("'")
                out[-1] += self._text[self._at : end]
                self._at, quoted = end + 1, True
            elif c == '"':
                quoted |= self._quoted(out)
            elif c == "\\":
                out[-1] += (
                    "" if self._text.startswith("\n", self._at) else self._text[self._at : self._at + 1]
                )
                self._at += 1
            elif c == "$":
                self._append(out, self._expansion(), split=not assigned)
            elif c == "`":
                end = self._end_of("`")
                out[-1] += self._command_substitution(
                    self._text[self._at : end], f"`{self._text[self._at : end]}`"
                )
                self._at = end + 1
            elif c in "<>":
                out[-1] += self._command_substitution(self._delimited("(", ")"), f"{c}(...)")
            elif c == "~" and self._at - 1 == start and self._text[self._at : self._at + 1] in "/ \t\n;":
                home = self._value("HOME", "~")
                out[-1] += home if isinstance(home, str) else ""
            elif c in "*?" and not assigned:
                out[-1] += self._script.add_hole(c, "a pattern depends on the files that are there")
            elif c == "{" and not assigned and (match := _BRACE_EXPANSION.match(self._text, self._at - 1)):
                out[-1] += self._script.add_hole(match[0], "braces are not expanded")
                self._at = match.end()
            else:
                end = _PLAIN.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches nothing, too
                out[-1] += c + self._text[self._at : end]
                self._at = end
        return out if quoted else [token for token in out if token]

    def _ends_line(self) -> bool:
        return self._text[self._at + 1 : self._at + 2] in ("\n", "")

    def _quoted(self, out: list[str]) -> bool:
        """Read to the closing quote; return False if the result is no word, as for the elements of an empty array."""
        empty_array = anything = False
        while self._at < len(self._text) and self._text[self._at] != '"':
            c = self._text[self._at]
            self._at += 1
            if c == "$":
                value = self._expansion()
                empty_array |= value == []
                anything |= value != []
                self._append(out, value, split=False)
                continue
            anything = True
            if c == "\\" and self._at < len(self._text):
                escaped = self._text[self._at]
                out[-1] += "" if escaped == "\n" else escaped if escaped in '$`"\\' else f"\\{escaped}"
                self._at += 1
            elif c == "`":
                end = self._end_of("`")
                out[-1] += self._command_substitution(
                    self._text[self._at : end], f"`{self._text[self._at : end]}`"
                )
                self._at = end + 1
            else:
                end = _PLAIN_QUOTED.match(self._text, self._at).end()  # type: ignore[union-attr]
                out[-1] += c + self._text[self._at : end]
                self._at = end
        if self._at >= len(self._text):
            self._end_of('"')
        self._at += 1
        return anything or not empty_array

    def _end_of(self, quote: str) -> int:
        """Return the position of the closing quote, or the end of the text."""
        end = self._text.find(quote, self._at)
        if end < 0:
            self._script.problems.append(
                f"{self._text[self._at :][:40]!r}: a {quote} before it is not closed"
            )
        return len(self._text) if end < 0 else end

    def _append(self, out: list[str], value: str | list[str], *, split: bool) -> None:
        self._script.spend(len(value) if isinstance(value, str) else sum(map(len, value)) + len(value))
        if isinstance(value, list):
            parts = [part for element in value for part in self._fields(element)] if split else value
        elif not split:
            parts = [value]
        else:
            parts = self._fields(value)
            if value[:1].isspace() and out[-1]:
                out.append("")
        if parts:
            out[-1] += parts[0]
            out.extend(parts[1:])
        if split and isinstance(value, str) and value[-1:].isspace() and out[-1]:
            out.append("")

    def _fields(self, value: str) -> list[str]:
        """Split an unquoted expansion into words; a hole if the script's own separator may split it."""
        separators = self._script.variables.get("IFS")
        if separators is None or separators == " \t\n" or not value:
            return value.split()
        separators_known = isinstance(separators, str) and not has_hole(separators)
        plain = _NO_SEPARATOR.fullmatch(value) is not None or has_hole(value)
        if (
            separators_known
            and not any(c in value for c in separators)
            and not any(c.isspace() for c in value)
        ):
            return [value]
        if not separators_known and plain:
            return [value]
        return [self._script.add_hole(value[:80], "IFS decides how it is cut")]

    # Expansions

    def _expansion(self) -> str | list[str]:
        """Read an expansion after `$`."""
        if self._text.startswith("((", self._at):
            return self._arithmetic(self._delimited("((", "))"))
        if self._text.startswith("(", self._at):
            inside = self._delimited("(", ")")
            return self._command_substitution(inside, f"$({inside})")
        if self._text.startswith("[", self._at):
            inside = self._delimited("[", "]")
            return self._script.add_hole(f"$[{inside}]", "arithmetic that is not computed")
        if self._text.startswith("{", self._at):
            return self._parameter_expansion(self._delimited("{", "}"))
        if match := _NAME.match(self._text, self._at):
            self._at = match.end()
            return self._value(match[0], f"${match[0]}")
        c = self._text[self._at : self._at + 1]
        if c and (c in "@*" or c.isdigit() or c in _SPECIAL):
            self._at += 1
            return self._special_parameter(c, f"${c}")
        if c == "'":
            self._at += 1
            end = self._end_of("'")
            inside, self._at = self._text[self._at : end], end + 1
            return (
                inside
                if "\\" not in inside
                else self._script.add_hole(f"$'{inside}'", "escapes are not expanded")
            )
        return "" if c == '"' else "$"

    def _delimited(self, opening: str, closing: str) -> str:
        """Read up to the matching closing delimiter, with nesting and quotes; return the text between."""
        start = at = self._at + len(opening)
        depth = 1
        while at < len(self._text):
            c = self._text[at]
            if self._text.startswith(closing, at) and depth == 1:
                break
            if c == "\\":
                at += 1
            elif c in "'\"" and opening != "((":
                end = self._text.find(c, at + 1)
                at = end if end > 0 else at
            elif c == opening[0]:
                depth += 1
            elif c == closing[0]:
                depth -= 1
            at += 1
        self._at = min(at, len(self._text)) + len(closing)
        return self._text[start:at]

    def _command_substitution(self, command: str, text: str) -> str:
        """Return a command's output if it can be computed: path commands and `seq`; otherwise a hole."""
        if len(command) > _LONGEST_PATTERN:
            return self._script.add_hole(text, "what a command prints is not known")
        plain = _DISCARDED_OUTPUT.sub(" ", command).strip()
        if match := _PATH_COMMAND.fullmatch(plain):
            path = self._expanded(match["of"] or match["folder"])
            if path.startswith("/") and not has_hole(path):
                return (
                    os.path.dirname(path)
                    if match["of"] and plain.startswith("dirname")
                    else os.path.normpath(path)
                )
        if match := re.fullmatch(r"\s*seq((?:\s+\d{1,6}){1,3})\s*", command):
            numbers = [int(n) for n in match[1].split()]
            first, step = (
                numbers[0] if len(numbers) > 1 else 1,
                numbers[1] if len(numbers) > 2 else 1,
            )
            if step and (numbers[-1] - first) // step < 10_000:
                return " ".join(map(str, range(first, numbers[-1] + 1, step)))
        return self._script.add_hole(text, "what a command prints is not known")

    def _parameter_expansion(self, inside: str) -> str | list[str]:
        text = f"${{{inside}}}"
        match = re.match(r"([A-Za-z_]\w*|\d+|[@*#?!$-])(\[(?:[@*]|\d+)\])?(:?[-=+?])?", inside)
        if match is None or (match.end() != len(inside) and not match[3]):
            return self._script.add_hole(text, "this expansion is not computed")
        name, index, operator = match.groups()
        is_set = name in self._script.variables
        if name.isdigit():
            is_set = self._script.positional is not None or self._in_function()
        value = self._script.variables.get(name, "")
        non_empty = is_set and (not operator or not operator.startswith(":") or value not in ("", []))
        if operator and operator[-1] in "-=" and not non_empty:
            token = self._expanded(inside[match.end() :])
            if operator[-1] == "=" and (reason := self._uncertain()) is not None:
                self._set_hole(name, text, f"may be set in {reason}")
            elif operator[-1] == "=":
                self._script.variables[name] = token
            return token
        if operator and operator[-1] == "+":
            return self._expanded(inside[match.end() :]) if non_empty else ""
        if not _NAME.fullmatch(name):
            return self._special_parameter(name, text)
        return self._value(name, text, index)

    def _expanded(self, text: str) -> str:
        """Expand text that may contain quotes and variables, as one word."""
        reader = _Reader(self._script, text, self._depth + 1, self._path)
        out = []
        while reader._at < len(reader._text):
            position = reader._at
            out.append("".join(reader._read_word(assigned=True)))
            if reader._at == position:  # a blank or an operator, literal here
                out.append(reader._text[reader._at])
                reader._at += 1
        return "".join(out)

    def _in_function(self) -> bool:
        return any(frame.kind == "function" for frame in self._script.frames)

    def _special_parameter(self, name: str, text: str) -> str | list[str]:
        """Expand `$1`, `$@`, `$?` and similar parameters."""
        if name in _SPECIAL:
            return self._script.add_hole(text, f"{_SPECIAL[name]} is not known")
        if name == "0":
            path = self._script.path
            return self._script.add_hole(text, "the script's own name") if path is None else str(path)
        if self._in_function():
            return self._script.add_hole(text, "the arguments of a function are not followed")
        if self._script.positional is not None:
            return self._script.add_hole(text, self._script.positional)
        if name in "@*":
            self._script.reads_arguments = True
            return []
        return self._script.add_hole(text, "an argument that the script is started with")

    def _value(self, name: str, text: str, index: str | None = None) -> str | list[str]:
        value = self._script.variables.get(name)
        if name == "BASH_SOURCE" and index in (None, "[0]") and self._path is not None:
            value = str(self._path)
        if value is None:
            return self._script.add_hole(text, f"{name} is not set")
        if isinstance(value, str):
            if index in (None, "[@]", "[*]", "[0]"):
                return value
            return self._script.add_hole(text, "this expansion is not computed")
        if index == "[*]":
            return " ".join(value)
        if index == "[@]":
            return value
        if any(self._script.holes_in(token) for token in value):  # which element it is is not known
            return self._script.add_hole(text, f"{name} is not known as a whole")
        return next(iter(value[int(index[1:-1]) if index else 0 :]), "")

    def _arithmetic(self, text: str) -> str:
        """Evaluate an arithmetic expression with 64-bit integers, as bash does; a hole if it cannot be evaluated."""
        source = f"$(({text}))"
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        if len(plain) > _LONGEST_PATTERN or not _ARITHMETIC.fullmatch(plain):
            return self._script.add_hole(source, "arithmetic that is not computed")
        try:
            return str(self._number(ast.parse(plain, mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return self._script.add_hole(source, "arithmetic that is not computed")

    def _number(self, node: ast.expr) -> int:
        """Evaluate an integer expression.

        Raises:
            ValueError: the expression is not one of integers and known variables.
        """
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return _bounded(node.value)
        if isinstance(node, ast.Name):
            value = self._script.variables.get(node.id)
            if not isinstance(value, str) or not re.fullmatch(r"\s*-?(0|[1-9]\d{0,17})\s*", value):
                raise ValueError(node.id)
            return int(value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = self._number(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp):
            return _bounded(_operate(node.op, self._number(node.left), self._number(node.right)))
        raise ValueError(ast.dump(node))


def _operate(operator: Any, first: int, second: int) -> int:
    if isinstance(operator, ast.Add):
        return first + second
    if isinstance(operator, ast.Sub):
        return first - second
    if isinstance(operator, ast.Mult):
        return first * second
    if isinstance(operator, ast.Pow) and 0 <= second < 64:
        return int(first**second)
    if isinstance(operator, ast.Div | ast.Mod):  # C truncates towards zero, Python rounds down
        quotient = abs(first) // abs(second) * (1 if (first < 0) == (second < 0) else -1)
        return quotient if isinstance(operator, ast.Div) else first - quotient * second
    raise ValueError(ast.dump(operator))


def _bounded(number: int) -> int:
    if abs(number) >= 1 << 63:
        raise ValueError("more than 64 bits")
    return number


_DISCARDED_OUTPUT = re.compile(r"&?>\s*/dev/null|2>&1")
_PATH_COMMAND = re.compile(
    r"(?:dirname|realpath|readlink -f)\s+(?:--\s+)?(?P<of>\S.*)"
    r"|cd\s+(?:-P\s+)?(?:--\s+)?(?P<folder>\S.*?)\s*(?:&&|;)\s*pwd(?:\s+-P)?",
    re.DOTALL,
)
