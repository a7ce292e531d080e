"""Which test files a change can reach: `python -m tests.gate.selection [BASE]` prints them, the nearest first.

One file reaches another when it imports it, or names it in a string: as a module (`-m rlsys.cli.main`,
"tests.helpers.saboteur:reward") or as a path ("configs/quickstart.yaml"). Imports inside functions count. A
change reaches a test file when a chain of such steps leads from the test file to what has changed. A changed file
that no Python file names (Makefile, pyproject.toml) may change everything: then all test files are printed, as they
are without history. Prose (*.md) changes only the tests that name it.
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
"""With Python files of ours."""
EVERY_RUN = ("tests/conftest.py", "tests/gate/")
"""What every test runs with, though it names none of it."""
MODULE = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")


def sources(root: Path) -> list[str]:
    """Python files of ours, relative to the root."""
    return sorted(str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def modules(files: Iterable[str]) -> dict[str, str]:
    """Module name -> file."""
    module_files: dict[str, str] = {}
    for file in files:
        path = Path(file).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        module_files[".".join(parts)] = file
    return module_files


def named(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Module names, also of imports inside functions, of `from a import b` both `a` and `a.b`; and the strings of the
    source, without its docstrings."""
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
    """`a.b.c` runs `a`, `a.b` and `a.b.c`; the last word may be a name in the module before it."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


class Reach:
    """What each file of the repository names, read once."""

    def __init__(self, root: Path) -> None:
        self._files = sources(root)
        self._users: dict[str, set[str]] = {}
        self._words: dict[str, set[str]] = {}
        module_files = modules(self._files)
        for file in self._files:
            module_names, words = named(ast.parse((root / file).read_text(encoding="utf-8"), file))
            self._words[file] = words
            for module in module_names.union(*(MODULE.findall(word) for word in words)):
                for name in with_parents(module):
                    if name in module_files:
                        self._users.setdefault(module_files[name], set()).add(file)

    def tests(self, changed: Iterable[str] | None) -> list[str]:
        """Test files, the nearest to the change first. `changed` None: nobody knows what did."""
        steps = None if changed is None else self.steps(changed)
        tests = [f for f in self._files if f.startswith("tests/") and Path(f).name.startswith("test_")]
        if steps is None:
            return tests
        return sorted((file for file in tests if file in steps), key=lambda file: (steps[file], file))

    def naming(self, path: str) -> set[str]:
        """Files that name a path in a string, whole or its name; tests name a folder above it, and glob."""
        *folders, name = Path(path).parts
        return {
            file
            for file, words in self._words.items()
            if any(path in word or word == name for word in words)
            or (file.startswith("tests/") and not words.isdisjoint(folders))
        }

    def steps(self, changed: Iterable[str]) -> dict[str, int] | None:
        """File -> the fewest steps from it to something changed. None: the change may reach everything."""
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
    """The commit that the change began at: where it left main; on main itself, the newest tag before it."""
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        if (merge_base := git("merge-base", "HEAD", main)) not in (None, head):
            return merge_base
    return git("describe", "--tags", "--abbrev=0", "HEAD~1")


def main(given: str | None) -> None:
    start = given or base()
    listed = git("diff", "--name-only", start, "--") if start else None
    if listed is None:
        print("no history to compare with: every test file", file=sys.stderr)
    else:
        print(f"{len(listed.splitlines())} files changed since {start}", file=sys.stderr)
    print("\n".join(Reach(ROOT).tests(None if listed is None else listed.splitlines())))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
