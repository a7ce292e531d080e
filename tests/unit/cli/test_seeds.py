"""docs/seeds.md: every work has one row, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PAGE = (TESTS.parent / "docs" / "seeds.md").read_text()


def test_each_work_has_one_row_with_a_test_or_a_reason() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(number) for number, *_ in rows] == list(range(1, 55))
    assert all(work.strip() and has.strip() and evidence.strip() for _, work, has, evidence in rows)
    unshown = [int(row[0]) for row in rows if "::test_" not in row[3] and row[2].strip() != "nothing"]
    assert unshown == [9, 39], "a vocabulary, and an option of SGLang's"


def test_each_test_that_the_page_names_exists() -> None:
    """One that is named without a file stands in the file before it."""
    references, file = [], ""
    for match in re.finditer(r"`([a-z_0-9/]*\.?p?y?)::(test_\w+)`", PAGE):
        file = match[1] or file
        references.append((file, match[2]))
    assert len(references) > 40
    lost = [f"{file}::{test}" for file, test in references if test not in names_in(TESTS / file)]
    assert lost == []


def names_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
