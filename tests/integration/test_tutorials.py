"""The tutorials that start an engine, load Megatron or read a run, as written on the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.tutorials import FIRST_RUN, PAGES, needs_stack, reads_first_run, run_page

pytestmark = pytest.mark.integration


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the first page leaves, with its run."""
    folder = tmp_path_factory.mktemp("first-run")
    (folder / "told").write_text(run_page(FIRST_RUN, folder), encoding="utf-8")
    return folder


def test_the_first_run_reaches_the_documented_accuracy(first_run: Path) -> None:
    initial_accuracy, final_accuracy = (
        e["accuracy"] for e in read_metrics(first_run / "runs" / "quickstart").evals
    )
    assert initial_accuracy < 0.1 and final_accuracy > 0.8, "as the page says: from 5 % to 98 %"
    assert "eval at step 5" in (first_run / "told").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [p for p in PAGES if reads_first_run(p)], ids=lambda p: p.stem)
def test_it_reads_the_first_run(page: Path, first_run: Path) -> None:
    assert run_page(page, first_run)


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if needs_stack(p) and p != FIRST_RUN and not reads_first_run(p)],
    ids=lambda p: p.stem,
)
def test_it_runs_as_written(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path)
