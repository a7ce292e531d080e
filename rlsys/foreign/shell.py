"""Reads a launch script as bash would expand it, without running anything.

Known: quotes, comments, continued lines, variables with defaults, arrays, arithmetic. Both branches of an `if` are
read, so the last assignment counts. What a command prints (`$(...)`) is not known and stands as nothing.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPERATORS: dict[type[Any], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_PREFIXES = (
    "export",
    "declare",
    "local",
    "readonly",
    "if",
    "then",
    "else",
    "elif",
    "do",
    "time",
    "nohup",
    "exec",
)


class Script:
    """A script's commands, each as its words after expansion; `unknown`: what could not be expanded."""

    def __init__(self, text: str, variables: Mapping[str, str] | None = None) -> None:
        self._text, self._at = text, 0
        self._variables: dict[str, str | list[str]] = dict(variables or {})
        self.unknown: set[str] = set()
        self.commands: list[list[str]] = []
        while self._at < len(self._text):
            if words := self._command():
                self.commands.append(words)

    def _command(self) -> list[str]:
        words: list[str] = []
        while self._at < len(self._text):
            self._skip_blanks()
            if self._at >= len(self._text):
                break
            if self._text[self._at] in "\n;&|()":
                self._at += 1
                break
            if all(word in _PREFIXES or word.startswith("-") for word in words) and self._assignment():
                continue
            words += self._word()
        return words

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            if self._text[self._at] in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _assignment(self) -> bool:
        found = _ASSIGN.match(self._text, self._at)
        if found is None:
            return False
        name, more = found.groups()
        self._at = found.end()
        if self._text.startswith("(", self._at):
            self._at += 1
            value: str | list[str] = self._array()
            before = self._variables.get(name, []) if more else []
            self._variables[name] = [*(before if isinstance(before, list) else [before]), *value]
        else:
            value = " ".join(self._word(assigned=True)) if self._at < len(self._text) else ""
            self._variables[name] = (self._text_of(name) if more else "") + value
        return True

    def _array(self) -> list[str]:
        words: list[str] = []
        while self._at < len(self._text):
            self._skip_blanks()
            if self._text.startswith(")", self._at):
                self._at += 1
                break
            if self._text.startswith("\n", self._at):
                self._at += 1
            else:
                words += self._word()
        return words

    def _word(self, assigned: bool = False) -> list[str]:
        """Several for an array; none for an expansion that is empty."""
        out, quoted = [""], assigned
        while self._at < len(self._text):
            c = self._text[self._at]
            if c in " \t\r\n;&|)" or (c == "(" and not assigned):
                if out == [""] and c in "()":
                    self._at += 1
                break
            self._at += 1
            if c == "'":
                end = self._text.find("'", self._at)
                end = len(self._text) if end < 0 else end
                out[-1] += self._text[self._at : end]
                self._at, quoted = end + 1, True
            elif c == '"':
                quoted = True
                self._quoted(out)
            elif c == "\\":
                out[-1] += (
                    "" if self._text.startswith("\n", self._at) else self._text[self._at : self._at + 1]
                )
                self._at += 1
            elif c == "$":
                self._append(out, self._expansion(), split=not assigned)
            else:
                out[-1] += c
        return out if quoted else [word for word in out if word]

    def _quoted(self, out: list[str]) -> None:
        while self._at < len(self._text) and self._text[self._at] != '"':
            c = self._text[self._at]
            self._at += 1
            if c == "$":
                self._append(out, self._expansion(), split=False)
            elif c == "\\" and self._at < len(self._text):
                out[-1] += "" if self._text[self._at] == "\n" else self._text[self._at]
                self._at += 1
            else:
                out[-1] += c
        self._at += 1

    @staticmethod
    def _append(out: list[str], value: str | list[str], *, split: bool) -> None:
        parts = value if isinstance(value, list) else value.split() if split else [value]
        if parts:
            out[-1] += parts[0]
            out.extend(parts[1:])

    def _expansion(self) -> str | list[str]:
        """What stands after a `$`."""
        if self._text.startswith("((", self._at):
            return self._arithmetic(self._inside("((", "))"))
        if self._text.startswith("(", self._at):
            self.unknown.add(f"$({self._inside('(', ')')})")
            return ""
        if self._text.startswith("{", self._at):
            return self._braces(self._inside("{", "}"))
        if found := _NAME.match(self._text, self._at):
            self._at = found.end()
            return self._value(found[0])
        if (
            self._text[self._at : self._at + 1] in ("@", "*", "?", "$", "!", "#")
            or self._text[self._at : self._at + 1].isdigit()
        ):
            self._at += 1
            return ""
        return "$"

    def _inside(self, opening: str, closing: str) -> str:
        """What lies between, with the same in it; goes on behind."""
        start = at = self._at + len(opening)
        depth = 1
        while at < len(self._text) and depth:
            if self._text.startswith(closing, at) and depth == 1:
                break
            depth += (self._text[at] == opening[0]) - (self._text[at] == closing[0])
            at += 1
        self._at = at + len(closing)
        return self._text[start:at]

    def _braces(self, inside: str) -> str | list[str]:
        found = re.match(r"([A-Za-z_]\w*)(\[[@*]\])?(:?[-=])?", inside)
        if found is None or (found.end() != len(inside) and not found[3]):
            self.unknown.add(f"${{{inside}}}")
            return self._value(found[1]) if found else ""
        name, _, otherwise = found.groups()
        if otherwise and not self._variables.get(name):
            return Script.expand(inside[found.end() :], self._variables)
        return self._value(name)

    def _value(self, name: str) -> str | list[str]:
        if name not in self._variables:
            self.unknown.add(f"${name}")
        return self._variables.get(name, "")

    def _text_of(self, name: str) -> str:
        value = self._variables.get(name, "")
        return value if isinstance(value, str) else " ".join(value)

    def _arithmetic(self, text: str) -> str:
        """Whole numbers only; nothing for what is not known."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        try:
            return str(self._number(ast.parse(plain.strip(), mode="eval").body))
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError, TypeError):
            self.unknown.add(f"$(({text}))")
            return ""

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(self._text_of(node.id))
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](self._number(node.left), self._number(node.right)))
        raise ValueError(ast.dump(node))

    @classmethod
    def expand(cls, text: str, variables: Mapping[str, str | list[str]]) -> str:
        """One word that may hold quotes and variables."""
        made = cls("")
        made._variables = dict(variables)
        made._text, made._at = text, 0
        return " ".join(made._word(assigned=True))
