"""A real run whose second pool explores: it sizes groups, dies, and the run goes on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.engine_join import engines
from rlsys.obs.metrics import read_metrics
from tests.helpers.churn import engine_process
from tests.helpers.runs import checked_ledger
from tests.helpers.sessions import GROUPS, Session, step_lines

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS = 14


def test_groups_are_sized_and_a_dead_pool_leaves_the_run_going(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session = Session(
        run, f"trainer.steps={STEPS}", "launch.placement=disaggregated", "launch.min_engines=1",
        "engine.pools=[{name: exact, count: 1}, {name: scouts, count: 1, role: explore}]",
        "algo.planners=[{name: explore, probes: 4, first: 2, largest: 8}]", "engine.start_timeout=300",
    )  # fmt: skip
    try:
        session.wait_for(lambda: step_lines(run) >= 4)
        url = next(url for url, engine_figures in engines(run).items() if engine_figures["pool"] == "scouts")
        scout = engine_process(url)
        assert scout is not None
        for process in [*scout.children(recursive=True), scout]:
            process.kill()
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    ledger = checked_ledger(run)
    assert ledger["trained"] == STEPS * GROUPS
    steps = read_metrics(run).steps
    last = steps[-1]
    print({k: v for k, v in last.items() if k.startswith(("explore", "pool_"))})
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1)) and last["lost"] == 0
    assert last["explored"] > 0 < last["explored_not"]
    assert -1 <= last["explore_correlation"] <= 1
    assert last["pool_scouts_tokens"] > 0
