"""The tutorials that start an engine or load Megatron, run as written on the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tutorials import PAGES, needs_stack, run_page

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("page", [p for p in PAGES if needs_stack(p)], ids=lambda p: p.stem)
def test_it_runs_as_written(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path)
