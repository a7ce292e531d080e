"""Select the test files that a change can affect: `python -m tests.gate.selection [BASE]` prints them, nearest first.

A file uses another if it imports it, or names it in a string: as a module (`-m rlsys.cli.main`,
"tests.helpers.saboteur:reward") or as a path ("configs/quickstart.yaml"). Imports inside functions count. A
change affects a test file if a chain of such uses leads from the test file to a changed file. A changed file that no
Python file names (Makefile, pyproject.toml) may affect everything: then all test files are printed, as without a git
history. A document (*.md) affects only the tests that name it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlsys", "launch", "megatron_patches", "bench", "tests", "examples")
"""Folders with Python files of the repository."""
EVERY_RUN = ("tests/conftest.py", "tests/gate/")
"""Files that affect every test, although tests do not name them."""
MODULE = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")


def sources(root: Path) -> list[str]:
    """Return the Python files of the repository, relative to the root."""
    return sorted(str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def modules(files: Iterable[str]) -> dict[str, str]:
    """Return the files by module name."""
    module_files: dict[str, str] = {}
    for file in files:
        path = Path(file).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        module_files[".".join(parts)] = file
    return module_files


def used_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the imported module names and the strings of a source, without docstrings.

    Imports inside functions count. `from a import b` has the names `a` and `a.b`.
    """
    module_names, words, prose = set[str](), list[ast.Constant](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            words.append(node)
        elif isinstance(node, ast.Expr):
            prose.add(id(node.value))
        elif isinstance(node, ast.Import):
            module_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module_names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return module_names, {
        word.value for word in words if isinstance(word.value, str) and id(word) not in prose
    }


def with_parents(module: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`. The last part may be a name in the module before it."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class Reach:
    """Uses among all files of the repository."""

    def __init__(self, root: Path) -> None:
        self._files = sources(root)
        self._users: dict[str, set[str]] = {}
        self._words: dict[str, set[str]] = {}
        module_files = modules(self._files)
        for file in self._files:
            module_names, words = used_names(ast.parse((root / file).read_text(encoding="utf-8"), file))
            self._words[file] = words
            for module in module_names.union(*(MODULE.findall(word) for word in words)):
                for name in with_parents(module):
                    if name in module_files:
                        self._users.setdefault(module_files[name], set()).add(file)

    def tests(self, changed: Iterable[str] | None) -> list[str]:
        """Return the affected test files, nearest to the change first. `changed`: None if unknown."""
        steps = None if changed is None else self.steps(changed)
        tests = [f for f in self._files if f.startswith("tests/") and Path(f).name.startswith("test_")]
        if steps is None:
            return tests
        return sorted((file for file in tests if file in steps), key=lambda file: (steps[file], file))

    def naming(self, path: str) -> set[str]:
        """Return the files with a path or its file name in a string; for tests, also with a parent folder's name."""
        *folders, name = Path(path).parts
        return {
            file
            for file, words in self._words.items()
            if any(path in word or word == name for word in words)
            or (file.startswith("tests/") and not words.isdisjoint(folders))
        }

    def steps(self, changed: Iterable[str]) -> dict[str, int] | None:
        """Return the number of uses from each affected file to a changed one, or None if all may be affected."""
        distances: dict[str, int] = {}
        for path in changed:
            if path.startswith(EVERY_RUN):
                return None
            if path.endswith(".py"):
                distances[path] = 0
            elif users := self.naming(path):
                distances |= dict.fromkeys(users, 1)
            elif not path.endswith(".md"):
                return None
        waiting = deque(sorted(distances, key=lambda file: distances[file]))
        while waiting:
            file = waiting.popleft()
            for user in self._users.get(file, ()):
                if user not in distances:
                    distances[user] = distances[file] + 1
                    waiting.append(user)
        return distances


def git(*words: str) -> str | None:
    process = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def base() -> str | None:
    """Return the base commit of the change: the merge base with main, or on main the newest tag before HEAD."""
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        if (merge_base := git("merge-base", "HEAD", main)) not in (None, head):
            return merge_base
    return git("describe", "--tags", "--abbrev=0", "HEAD~1")


def main(base_commit: str | None) -> None:
    start = base_commit or base()
    changes = git("diff", "--name-only", start, "--") if start else None
    if changes is None:
        print("no history to compare with: all test files are selected", file=sys.stderr)
    else:
        print(f"{len(changes.splitlines())} files changed since {start}", file=sys.stderr)
    print("\n".join(Reach(ROOT).tests(None if changes is None else changes.splitlines())))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
