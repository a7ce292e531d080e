"""Read a bash launch script without running anything.

The reader expands quotes, continued lines, variables with defaults, arrays, integer arithmetic, `seq` and the
script's own folder, and it follows `source`. Everything else leaves a hole in the word that it is a part of: what a
command prints, a variable that is not set, and a variable that is set where the reader does not know whether or how
often the line runs (a branch, a loop, a function, the right side of `&&` and `||`). A hole is a pair of private
characters around a number; `Script.unresolved` says what stands there. The reader never fills a hole in.

Every loop moves the position or ends, and the size of a script, of all its expansions and of the nesting is bounded,
so a script of a stranger costs a bounded time.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.errors import UserError

MAX_SCRIPT = 1 << 18
"""Characters of one script."""
MAX_EXPANDED = 1 << 22
"""Characters that all expansions of a script have together."""
MAX_DEPTH = 32
"""Nesting of expansions and of sourced files."""
_LONGEST_PATTERN = 400
"""Characters of a text that is matched against a pattern whose time may grow with the square of its length."""

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
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_NO_SEPARATOR = re.compile(r"[\w./+=-]*")
"""Values that no usual separator cuts."""
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SKIPPED = ("then", "else", "elif", "do", "time", "!", "nohup", "exec", "command")
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
_SETTING = ("read", "mapfile", "readarray", "getopts", "let", "unset")
_SPECIAL = {
    "?": "the exit status of a command",
    "$": "a process id",
    "!": "a process id",
    "#": "the number of the script's arguments",
    "-": "bash's flags",
}


def has_hole(word: str) -> bool:
    """Whether a part of a command's word is not known."""
    return _OPEN in word


@dataclass(frozen=True)
class Hole:
    """A part of a word that the script alone does not tell."""

    text: str
    """As the script has it."""
    why: str


@dataclass(frozen=True)
class Command:
    """One simple command after expansion."""

    words: list[str]
    line: int
    inside: str | None
    """The branch, loop or function that it is in, with its line; None where it certainly runs once."""


@dataclass
class _Frame:
    kind: str
    line: int
    name: str = ""


class Script:
    """The commands of a script, and what the reader could not follow.

    Args:
        text: the script.
        variables: the environment that it is started in.
        path: where it lies, for `source` and for scripts that ask for their own folder.

    Raises:
        UserError: the script is larger, or expands to more, than the reader's bounds.
    """

    def __init__(
        self, text: str, variables: Mapping[str, str] | None = None, path: Path | None = None
    ) -> None:
        self.variables: dict[str, str | list[str]] = dict(variables or {})
        self.path = path
        self.commands: list[Command] = []
        self.holes: list[Hole] = []
        self.problems: list[str] = []
        """Commands that may set any variable and are not followed."""
        self.reads_arguments = False
        """Whether `$@` is used, which is empty for a script that is started without arguments."""
        self.positional: str | None = None
        """Why `$1` and the like are not known; None: the script is started without arguments."""
        self.moved = False
        """Whether the script has changed the folder, so that relative paths are not known."""
        self.frames: list[_Frame] = []
        self.readonly: set[str] = set()
        self.functions: dict[str, tuple[set[str], set[str]]] = {}
        """By name: the variables of the script that a function may set, and the commands that it runs."""
        self.ended = False
        """Whether an `exit` that certainly runs was read: nothing behind it does."""
        self._budget = MAX_EXPANDED
        _Reader(self, text, 0, path).read_commands()

    @property
    def unknown(self) -> set[str]:
        """The text of every hole."""
        return {hole.text for hole in self.holes}

    def hole(self, text: str, why: str) -> str:
        """A new hole, as it stands in a word."""
        self.holes.append(Hole(text, why))
        self.spend(8)
        return f"{_OPEN}{len(self.holes) - 1}{_CLOSE}"

    def unresolved(self, word: str) -> list[Hole]:
        """The holes in a word."""
        return [self.holes[int(number)] for number in _HOLE.findall(word)]

    def is_whole_hole(self, word: str) -> bool:
        """Whether nothing of the word is known, so that it may be several words, or none."""
        return _HOLE.fullmatch(word) is not None

    def shown(self, word: str) -> str:
        """The word with each hole as the script has it."""
        return _HOLE.sub(lambda found: self.holes[int(found[1])].text, word)

    def changes(self, name: str) -> set[str]:
        """Variables that the function `name` may set, by itself or by others that it runs."""
        changed: set[str] = set()
        seen, pending = {name}, [name]
        while pending:
            own, runs = self.functions.get(pending.pop(), (set(), set()))
            changed |= own
            pending += runs - seen
            seen |= runs
        return changed

    def spend(self, characters: int) -> None:
        self._budget -= characters
        if self._budget < 0:
            raise UserError(
                f"its expansions have more than {MAX_EXPANDED:,} characters; it is not read further"
            )


class _Reader:
    """A position in a text; variables, holes and commands are the script's."""

    def __init__(self, script: Script, text: str, depth: int, path: Path | None) -> None:
        if len(text) > MAX_SCRIPT:
            raise UserError(f"has {len(text):,} characters; expected a script of at most {MAX_SCRIPT:,}")
        if depth > MAX_DEPTH:
            raise UserError(f"is nested more than {MAX_DEPTH} deep; it is not read further")
        self._script, self._depth, self._path = script, depth, path
        self._text, self._at = text.replace(_OPEN, "").replace(_CLOSE, ""), 0
        self._line, self._line_at = 1, 0
        self._maybe = False  # whether `&&` or `||` decides if the next command runs
        self._heredocs: list[tuple[str, bool]] = []

    def read_commands(self) -> None:
        while self._at < len(self._text) and not self._script.ended:
            before = self._at
            self._command()
            self._at = max(self._at, before + 1)

    # Commands

    def _command(self) -> None:
        self._blanks()
        if self._at >= len(self._text) or self._separator():
            return
        line = self._line_now()
        words: list[str] = []
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
                if len(words) == 1 and (found := _FUNCTION.match(self._text, self._at)):
                    self._at = found.end()
                    self._open_function(words[0], line)
                    return
                break
            if (not words or words[0] in _DECLARE) and self._assignment(words, replaced, declared):
                continue
            if not words:
                self._restore(replaced)
            start, new = self._at, self._word()
            if not words and new:
                word = self._text[start : self._at]
                if self._keyword(word, line):
                    return
                if word in _SKIPPED or word in _OPENING or word in _OPENING.values():
                    continue
            words += new
            self._at = max(self._at, start + 1)
        self._script.variables |= declared
        if not words and self._apart():
            for name in replaced:
                self._set_hole(name, f"${name}", f"is set in another process at line {line}")
        if words:
            self._builtin(words, line)
            self._script.commands.append(Command(words, line, self._uncertain(commands=True)))

    def _apart(self) -> bool:
        """Whether what was read runs in a process of its own: `&` or `|` follows."""
        rest = self._text[self._at : self._at + 2]
        return rest[:1] in ("&", "|") and rest not in ("&&", "||")

    def _restore(self, replaced: dict[str, str | list[str] | None]) -> None:
        """`LR=1 command` sets LR for that command alone, after its words are expanded."""
        for name, value in replaced.items():
            if value is None:
                self._script.variables.pop(name, None)
            else:
                self._script.variables[name] = value
        replaced.clear()

    def _separator(self) -> bool:
        """Read one operator between commands; True where there was one."""
        for operator in ("&&", "||", "\n", ";", "&", "|"):
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                self._maybe = operator in ("&&", "||") or (self._maybe and operator == "|")
                if operator == "\n":
                    self._skip_heredocs()
                return True
        if self._text.startswith("((", self._at):
            inside = self._inside("((", "))")
            if len(inside) > _LONGEST_PATTERN:
                self._script.problems.append(
                    f"{self._place(self._line_now())}: (({inside[:40]}...)): not followed"
                )
                return True
            for name in (found[1] or found[2] for found in _CHANGED.finditer(inside)):
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

    def _keyword(self, word: str, line: int) -> bool:
        """Open or close what a reserved word opens or closes; True where no command follows it at once."""
        frames = self._script.frames
        if word in ("fi", "done", "esac", "}"):
            for place in range(len(frames) - 1, -1, -1):
                if _OPENING.get(frames[place].kind, "}") == word and frames[place].kind != "subshell":
                    del frames[place:]
                    break
            return False
        if word == "function":
            self._blanks()
            if found := re.compile(r"[\w:.-]+").match(self._text, self._at):
                self._at = found.end()
                if (paired := _FUNCTION.match(self._text, self._at)) is not None:
                    self._at = paired.end()
                self._open_function(found[0], line)
            return True
        if word not in _OPENING:
            return False
        if len(frames) >= 1000:
            raise UserError(f"line {line}: more than 1000 blocks are open; it is not read further")
        frames.append(_Frame(word, line))
        if word in ("for", "select"):
            self._blanks()
            if self._text.startswith("((", self._at):
                self._separator()
            elif found := _NAME.match(self._text, self._at):
                self._at = found.end()
                self._set_hole(found[0], f"${found[0]}", f"has several values in the loop at line {line}")
        return word not in ("if", "while", "until", "{")

    def _open_function(self, name: str, line: int) -> None:
        self._script.frames.append(_Frame("function", line, name))
        self._script.functions[name] = (set(), set())
        found = re.compile(r"\s*\{").match(self._text, self._at)
        if found is not None:
            self._at = found.end()

    def _uncertain(self, commands: bool = False) -> str | None:
        """The innermost thing that leaves open whether a line runs; a subshell matters to variables alone."""
        for frame in reversed(self._script.frames):
            if frame.kind == "function":
                return f"the function {frame.name} at line {frame.line}"
            if frame.kind in _UNCERTAIN or (frame.kind == "subshell" and not commands):
                return f"the {frame.kind} at line {frame.line}"
        return None

    def _builtin(self, words: list[str], line: int) -> None:
        """What a command does to variables."""
        name, arguments = words[0], words[1:]
        if (function := self._function()) is not None:
            self._script.functions[function][1].add(name)
        if name in self._script.functions:
            for changed in sorted(self._script.changes(name)):
                self._set_hole(
                    changed, f"${changed}", f"is set by the function {name}, called at line {line}"
                )
        elif name == "exit" and self._uncertain() is None and not self._maybe and not self._apart():
            self._script.ended = True
        elif (name == "shopt" and "expand_aliases" in arguments and "-s" in arguments) or (
            name == "trap" and "DEBUG" in arguments
        ):
            self._script.problems.append(
                f"{self._place(line)}: {' '.join(words)[:80]}: not followed; it changes later commands"
            )
        elif name in _SETTING:
            for word in arguments:
                if found := _NAME.match(word):
                    self._set_hole(found[0], f"${found[0]}", f"is set by `{name}` at line {line}")
        elif name == "printf" and arguments[:1] == ["-v"] and len(arguments) > 1:
            self._set_hole(arguments[1], f"${arguments[1]}", f"is set by `printf` at line {line}")
        elif name == "shift" or (name == "set" and "--" in arguments):
            self._script.positional = f"`{name}` at line {line} changes the arguments"
        elif name in ("cd", "pushd", "popd"):
            self._script.moved = True
        elif name in _DECLARE and any(self._script.unresolved(word) for word in arguments):
            text = self._script.shown(" ".join(arguments))[:80]
            self._script.problems.append(
                f"{self._place(line)}: {name} {text}: which variables it sets is not known"
            )
        elif name == "eval":
            text = self._script.shown(" ".join(arguments))[:80]
            self._script.problems.append(
                f"{self._place(line)}: eval {text}: not followed; it may set any variable"
            )
        elif name in ("source", ".") and arguments:
            self._source(arguments[0], line)

    def _source(self, word: str, line: int) -> None:
        script = self._script
        if holes := script.unresolved(word):
            script.problems.append(f"{self._place(line)}: source {script.shown(word)}: {holes[0].why}")
            return
        file = Path(word)
        if script.moved and not file.is_absolute():
            script.problems.append(
                f"{self._place(line)}: source {word}: relative to a folder that `cd` chose"
            )
            return
        try:
            small = file.is_file() and file.stat().st_size <= 4 * MAX_SCRIPT
            text = file.read_text(encoding="utf-8") if small else None
        except (OSError, UnicodeDecodeError, ValueError):
            text = None
        if text is None:
            script.problems.append(
                f"{self._place(line)}: source {word}: no such text file here; what it sets is unknown"
            )
            return
        frames = len(script.frames)
        if self._maybe:
            script.frames.append(_Frame("&& or ||", line))
        try:
            _Reader(script, text, self._depth + 1, file.absolute()).read_commands()
        except UserError as e:
            raise UserError(f"{word} {e}") from None
        del script.frames[frames:]

    # Assignments

    def _assignment(
        self,
        words: list[str],
        replaced: dict[str, str | list[str] | None],
        declared: dict[str, str | list[str]],
    ) -> bool:
        """Read one, of `declare` and the like where `words` has it; `replaced` collects what the variables were,
        `declared` what they become once all words of a declaration are read."""
        found = _ASSIGN.match(self._text, self._at)
        if found is None:
            return False
        name, index, more = found.groups()
        self._at = found.end()
        variables = self._script.variables
        if not words:
            replaced.setdefault(name, variables.get(name))
        array = self._text.startswith("(", self._at) and not index
        value: str | list[str]
        if array:
            self._at += 1
            value = self._array()
        else:
            value = "".join(self._word(assigned=True)) if self._at < len(self._text) else ""
        was = variables.get(name)
        before = declared.get(name, variables.get(name, [] if array else ""))
        why = self._uncertain()
        if self._maybe and why is None:
            why = f"the && or || at line {self._line_now()}"
        if name in self._script.readonly:
            variables[name] = self._unknown(name, f"is readonly, and set again at line {self._line_now()}")
        elif index or any(
            word.startswith("-") and set(word) & set("ainlu") for word in words[1:] if not array
        ):
            variables[name] = self._unknown(
                name, f"is set with an index or an attribute at line {self._line_now()}"
            )
        elif why is not None:
            if more and isinstance(before, list):
                variables[name] = [*before, self._script.hole(f"{name}+=(...)", f"is set in {why}")]
            else:
                variables[name] = self._unknown(name, f"is set in {why}")
        elif isinstance(value, list):
            kept = (before if isinstance(before, list) else [before]) if more else []
            variables[name] = [*kept, *value]
        else:
            kept_text = (before[0] if before else "") if isinstance(before, list) else before
            variables[name] = (kept_text if more else "") + value
        self._script.spend(sum(map(len, variables[name])) + len(variables[name]))
        if words:
            declared[name] = variables.pop(name)
            if was is not None:
                variables[name] = was
            if words[0] == "readonly" or any(w.startswith("-") and "r" in w for w in words[1:]):
                self._script.readonly.add(name)
        if (function := self._function()) is not None and words[:1] != ["local"]:
            self._script.functions[function][0].add(name)
        return True

    def _function(self) -> str | None:
        """The function whose body is read."""
        return next((f.name for f in reversed(self._script.frames) if f.kind == "function"), None)

    def _set_hole(self, name: str, text: str, why: str) -> None:
        self._script.variables[name] = self._script.hole(text, f"{name} {why}")
        if (function := self._function()) is not None:
            self._script.functions[function][0].add(name)

    def _unknown(self, name: str, why: str) -> str:
        return self._script.hole(f"${name}", f"{name} {why}")

    def _array(self) -> list[str]:
        words: list[str] = []
        while self._at < len(self._text):
            self._blanks()
            if self._text.startswith(")", self._at):
                self._at += 1
                break
            before = self._at
            if self._at < len(self._text) and self._text[self._at] in "\n;&|(":
                self._at += 1  # bash refuses all but the newline
            elif found := _ELEMENT.match(self._text, self._at):
                self._at = found.end()
                self._word(assigned=True)
                words.append(self._script.hole(f"{found[0]}...", "elements with an index are not followed"))
            else:
                words += self._word()
            self._at = max(self._at, before + 1)
        return words

    # Blanks, here-documents, redirections

    def _line_now(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = max(self._at, self._line_at)
        return self._line

    def _place(self, line: int) -> str:
        """A line, with the file where it is a sourced one."""
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
        found = _REDIRECT.match(self._text, self._at)
        if found is None:
            return False
        self._at = found.end()
        self._blanks()
        start = self._at
        word = "".join(self._word())
        if found[0].endswith(("<<", "<<-")) and not found[0].endswith("<<<"):
            quoted = self._text[start : self._at]
            self._heredocs.append((re.sub(r"['\"\\]", "", quoted) or word, found[0].endswith("-")))
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

    def _word(self, assigned: bool = False) -> list[str]:
        """Several for an array; none for an expansion that is empty."""
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
                out[-1] += self._printed(self._text[self._at : end], f"`{self._text[self._at : end]}`")
                self._at = end + 1
            elif c in "<>":
                out[-1] += self._printed(self._inside("(", ")"), f"{c}(...)")
            elif c == "~" and self._at - 1 == start and self._text[self._at : self._at + 1] in "/ \t\n;":
                home = self._value("HOME", "~")
                out[-1] += home if isinstance(home, str) else ""
            elif c in "*?" and not assigned:
                out[-1] += self._script.hole(c, "a pattern depends on the files that are there")
            elif c == "{" and not assigned and (found := _BRACE_EXPANSION.match(self._text, self._at - 1)):
                out[-1] += self._script.hole(found[0], "braces are not expanded")
                self._at = found.end()
            else:
                end = _PLAIN.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches nothing, too
                out[-1] += c + self._text[self._at : end]
                self._at = end
        return out if quoted else [word for word in out if word]

    def _ends_line(self) -> bool:
        return self._text[self._at + 1 : self._at + 2] in ("\n", "")

    def _quoted(self, out: list[str]) -> bool:
        """Read to the closing quote; False for what is no word, the quoted elements of an empty array."""
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
                out[-1] += self._printed(self._text[self._at : end], f"`{self._text[self._at : end]}`")
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
        """Where the quote is closed, or the end of the text."""
        end = self._text.find(quote, self._at)
        if end < 0:
            self._script.problems.append(
                f"{self._text[self._at :][:40]!r}: a {quote} before it is not closed"
            )
        return len(self._text) if end < 0 else end

    def _append(self, out: list[str], value: str | list[str], *, split: bool) -> None:
        self._script.spend(len(value) if isinstance(value, str) else sum(map(len, value)) + len(value))
        if isinstance(value, list):
            parts = [part for one in value for part in self._fields(one)] if split else value
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
        """The words of an expansion that is not quoted; a hole where a separator of the script's own may cut it."""
        separators = self._script.variables.get("IFS")
        if separators is None or separators == " \t\n" or not value:
            return value.split()
        known = isinstance(separators, str) and not has_hole(separators)
        plain = _NO_SEPARATOR.fullmatch(value) is not None or has_hole(value)
        if known and not any(c in value for c in separators) and not any(c.isspace() for c in value):
            return [value]
        if not known and plain:
            return [value]
        return [self._script.hole(value[:80], "IFS decides how it is cut")]

    # Expansions

    def _expansion(self) -> str | list[str]:
        """What stands after a `$`."""
        if self._text.startswith("((", self._at):
            return self._arithmetic(self._inside("((", "))"))
        if self._text.startswith("(", self._at):
            inside = self._inside("(", ")")
            return self._printed(inside, f"$({inside})")
        if self._text.startswith("[", self._at):
            inside = self._inside("[", "]")
            return self._script.hole(f"$[{inside}]", "arithmetic that is not computed")
        if self._text.startswith("{", self._at):
            return self._braces(self._inside("{", "}"))
        if found := _NAME.match(self._text, self._at):
            self._at = found.end()
            return self._value(found[0], f"${found[0]}")
        c = self._text[self._at : self._at + 1]
        if c and (c in "@*" or c.isdigit() or c in _SPECIAL):
            self._at += 1
            return self._parameter(c, f"${c}")
        if c == "'":
            self._at += 1
            end = self._end_of("'")
            inside, self._at = self._text[self._at : end], end + 1
            return (
                inside
                if "\\" not in inside
                else self._script.hole(f"$'{inside}'", "escapes are not expanded")
            )
        return "" if c == '"' else "$"

    def _inside(self, opening: str, closing: str) -> str:
        """What lies between, with the same in it and with quotes; the position is behind it."""
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

    def _printed(self, command: str, text: str) -> str:
        """What a command prints, for the kinds that need no running: paths as they are written, and `seq`."""
        if len(command) > _LONGEST_PATTERN:
            return self._script.hole(text, "what a command prints is not known")
        plain = _TO_NOWHERE.sub(" ", command).strip()
        if found := _PATH_COMMAND.fullmatch(plain):
            path = self._expanded(found["of"] or found["folder"])
            if path.startswith("/") and not has_hole(path):
                return (
                    os.path.dirname(path)
                    if found["of"] and plain.startswith("dirname")
                    else os.path.normpath(path)
                )
        if found := re.fullmatch(r"\s*seq((?:\s+\d{1,6}){1,3})\s*", command):
            numbers = [int(n) for n in found[1].split()]
            first, step = (
                numbers[0] if len(numbers) > 1 else 1,
                numbers[1] if len(numbers) > 2 else 1,
            )
            if step and (numbers[-1] - first) // step < 10_000:
                return " ".join(map(str, range(first, numbers[-1] + 1, step)))
        return self._script.hole(text, "what a command prints is not known")

    def _braces(self, inside: str) -> str | list[str]:
        text = f"${{{inside}}}"
        found = re.match(r"([A-Za-z_]\w*|\d+|[@*#?!$-])(\[(?:[@*]|\d+)\])?(:?[-=+?])?", inside)
        if found is None or (found.end() != len(inside) and not found[3]):
            return self._script.hole(text, "this expansion is not computed")
        name, index, operator = found.groups()
        is_set = name in self._script.variables
        if name.isdigit():
            is_set = self._script.positional is not None or self._in_function()
        value = self._script.variables.get(name, "")
        filled = is_set and (not operator or not operator.startswith(":") or value not in ("", []))
        if operator and operator[-1] in "-=" and not filled:
            word = self._expanded(inside[found.end() :])
            if operator[-1] == "=" and (why := self._uncertain()) is not None:
                self._set_hole(name, text, f"may be set in {why}")
            elif operator[-1] == "=":
                self._script.variables[name] = word
            return word
        if operator and operator[-1] == "+":
            return self._expanded(inside[found.end() :]) if filled else ""
        if not _NAME.fullmatch(name):
            return self._parameter(name, text)
        return self._value(name, text, index)

    def _expanded(self, text: str) -> str:
        """One word that may hold quotes and variables."""
        reader = _Reader(self._script, text, self._depth + 1, self._path)
        out = []
        while reader._at < len(reader._text):
            before = reader._at
            out.append("".join(reader._word(assigned=True)))
            if reader._at == before:  # a blank or an operator, literal here
                out.append(reader._text[reader._at])
                reader._at += 1
        return "".join(out)

    def _in_function(self) -> bool:
        return any(frame.kind == "function" for frame in self._script.frames)

    def _parameter(self, name: str, text: str) -> str | list[str]:
        """`$1`, `$@`, `$?` and the like."""
        if name in _SPECIAL:
            return self._script.hole(text, f"{_SPECIAL[name]} is not known")
        if name == "0":
            path = self._script.path
            return self._script.hole(text, "the script's own name") if path is None else str(path)
        if self._in_function():
            return self._script.hole(text, "the arguments of a function are not followed")
        if self._script.positional is not None:
            return self._script.hole(text, self._script.positional)
        if name in "@*":
            self._script.reads_arguments = True
            return []
        return self._script.hole(text, "an argument that the script is started with")

    def _value(self, name: str, text: str, index: str | None = None) -> str | list[str]:
        value = self._script.variables.get(name)
        if name == "BASH_SOURCE" and index in (None, "[0]") and self._path is not None:
            value = str(self._path)
        if value is None:
            return self._script.hole(text, f"{name} is not set")
        if isinstance(value, str):
            if index in (None, "[@]", "[*]", "[0]"):
                return value
            return self._script.hole(text, "this expansion is not computed")
        if index == "[*]":
            return " ".join(value)
        if index == "[@]":
            return value
        if any(self._script.unresolved(word) for word in value):  # which element it is is not known
            return self._script.hole(text, f"{name} is not known as a whole")
        return next(iter(value[int(index[1:-1]) if index else 0 :]), "")

    def _arithmetic(self, text: str) -> str:
        """64-bit integers, as bash computes them; a hole for what is not computed."""
        whole = f"$(({text}))"
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        if len(plain) > _LONGEST_PATTERN or not _ARITHMETIC.fullmatch(plain):
            return self._script.hole(whole, "arithmetic that is not computed")
        try:
            return str(self._number(ast.parse(plain, mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return self._script.hole(whole, "arithmetic that is not computed")

    def _number(self, node: ast.expr) -> int:
        """Raises ValueError for what is no integer expression of known values."""
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


def _operate(operator: Any, left: int, right: int) -> int:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Pow) and 0 <= right < 64:
        return int(left**right)
    if isinstance(operator, ast.Div | ast.Mod):  # C truncates towards zero, Python rounds down
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if isinstance(operator, ast.Div) else left - quotient * right
    raise ValueError(ast.dump(operator))


def _bounded(number: int) -> int:
    if abs(number) >= 1 << 63:
        raise ValueError("more than 64 bits")
    return number


_TO_NOWHERE = re.compile(r"&?>\s*/dev/null|2>&1")
_PATH_COMMAND = re.compile(
    r"(?:dirname|realpath|readlink -f)\s+(?:--\s+)?(?P<of>\S.*)"
    r"|cd\s+(?:-P\s+)?(?:--\s+)?(?P<folder>\S.*?)\s*(?:&&|;)\s*pwd(?:\s+-P)?",
    re.DOTALL,
)
