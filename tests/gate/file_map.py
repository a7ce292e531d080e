"""Write docs/files.md: the packages and their files, each with the first paragraph of its docstring.

python -m tests.gate.file_map
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "files.md"
PACKAGES = ("rlsys", "launch", "megatron_patches")
HEAD = """# Files

What each file is for, from its docstring. `python -m tests.gate.file_map` writes this page;
[architecture.md](architecture.md) says how the packages work together, and who may import whom.
"""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring, as one line, or "" without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")


def page() -> str:
    """Return the page, with one section per package.

    Raises:
        ValueError: A file has no docstring.
    """
    sections = [HEAD]
    folders = sorted({path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")})
    for folder in folders:
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        missing = [path for path in (folder / "__init__.py", *files) if not summary(path)]
        if missing:
            raise ValueError(f"{missing[0].relative_to(ROOT)}: the file has no docstring")
        rows = [f"| `{path.name}` | {summary(path)} |" for path in files]
        name = folder.relative_to(ROOT)
        table = ["| file | |", "| --- | --- |", *rows, ""] if rows else []
        sections.append("\n".join([f"## `{name}/`", "", summary(folder / "__init__.py"), "", *table]))
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
