"""The tutorials that start nothing, run as written; and what holds for all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.tutorials import PAGES, ROOT, needs_stack, reads_first_run, run_page, script_of


@pytest.mark.full  # each command imports torch: seconds
@pytest.mark.parametrize("page", [p for p in PAGES if not needs_stack(p)], ids=lambda p: p.stem)
def test_it_runs_as_written(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path)


def test_they_are_numbered_listed_and_have_commands() -> None:
    numbers = [page.name[:3] for page in PAGES]
    assert len(set(numbers)) == len(numbers) > 0
    listed = re.findall(r"\((\d\d-[\w-]+\.md)\)", (ROOT / "docs" / "tutorials" / "README.md").read_text())
    assert listed == [page.name for page in PAGES]
    assert all("rlsys " in script_of(page) for page in PAGES)


def test_pages_05_and_06_continue_the_run_of_the_first_page() -> None:
    assert [page.name[:2] for page in PAGES if reads_first_run(page)] == ["05", "06"]
