"""The tutorials that train, try or convert, run as written on the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.tutorials import PAGES, needs_stack, run_page

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("page", [p for p in PAGES if needs_stack(p)], ids=lambda p: p.stem)
def test_it_runs_as_written(page: Path, tmp_path: Path) -> None:
    told = run_page(page, tmp_path)
    for run in (tmp_path / "runs").glob("*"):
        assert read_metrics(run).last_step >= 2
    if page.stem.startswith("09"):
        assert "no learning signal for 3 steps: all rewards are 0" in told
        assert [len(w["samples"]) for w in read_metrics(tmp_path / "runs" / "mine").warnings] == [3]
