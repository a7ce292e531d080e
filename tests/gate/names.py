"""Check of names and docstrings for technical terms: `python -m tests.gate.names [PATH ...]` lists the violations.

A name that consists of one participle, pronoun or everyday word states the origin of a value, not its meaning
(`checksums`, not `found`; `requested_samples`, not `asked`). A docstring starts with a verb in the imperative or with
a noun phrase, not with a pronoun, a preposition or a relative clause. The remaining violations per package are
recorded in tests/unit/test_names.py, and may only decrease.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlsys", "launch", "megatron_patches")
PARTICIPLES = """
answered asked began begun broken brought called changed chosen come counted cut described drawn ended filled
flushed found given gone grown heard held hung joined kept known left listed lost made met moved named needed
noted ordered passed placed prepared put refused said saved seen sent served settled shown spoke spoken stopped
stored taken told tried used wanted wished won written
"""
PRONOUNS = """
again all alone also away before behind beside each every everything further here mine more most nobody nothing
now once one other others ours own rest same since something such theirs there these they this together what
where which who whole whose why
"""
EVERYDAY = """
ask chatter door gently hear look mourn opinion opinions patience place places say seat seats sit speak tell
voice wish word words
"""
WORDS = frozenset(f"{PARTICIPLES} {PRONOUNS} {EVERYDAY}".split())
_FIRST_WORDS = """
Among And Any Anybody Anything Are As At Before Beside Besides But By Everybody Everyone Everything For From
Here How If In Into Is It Its Like May Most Must Nobody None Not Nothing Of On Once Only Or Other Others
Otherwise Out Over Same She Since So Some Somebody Something Such Than That Their Them There These They Thing
This Those Though Through To Together Too Under Until Up Upon We What Whatever When Where Wherever Which
Whichever While Who Whoever Whom Whose Why Will With Within Without Would You
"""
FIRST_WORDS = frozenset(_FIRST_WORDS.split())
"""A docstring may start with an article, a quantifier, or `Whether`."""


class Violation(NamedTuple):
    """A name or the first word of a docstring, with its line."""

    file: str
    line: int
    kind: str
    text: str


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each name with the line at which it is defined or assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text


def violations(file: Path) -> list[Violation]:
    """List the violations of a Python file, by line."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = str(file.relative_to(ROOT))
    rows = [
        Violation(name, line, "name", text)
        for line, text in _names(tree)
        if text.strip("_").lower() in WORDS and text != "__all__"
    ]
    rows += [
        Violation(name, line, "docstring", text.split("\n", 1)[0])
        for line, text in _docstrings(tree)
        if text.split(None, 1)[0].strip(".,:;") in FIRST_WORDS
    ]
    return sorted(rows)


def package(file: Path) -> str:
    """Return the package of a file, at most two folders deep: `rlsys/router`, `launch`."""
    folders = file.relative_to(ROOT).parts[:-1]
    return "/".join(folders[:2])


def totals() -> Counter[str]:
    """Count the violations of each package."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return Counter(package(file) for file in files for _ in violations(file))


if __name__ == "__main__":
    for path in sys.argv[1:] or FOLDERS:
        target = (ROOT / path).resolve()
        for source in sorted(target.rglob("*.py")) if target.is_dir() else [target]:
            for row in violations(source):
                print(f"{row.file}:{row.line}: {row.kind}: {row.text}")
