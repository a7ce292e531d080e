"""An engine joins a real run while its trainer is stopped, serves attested weights, and leaves in order."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from launch.engine_join import engines
from rlsys.obs.metrics import read_metrics
from tests.helpers.runs import RLSYS
from tests.helpers.servers import ROOT
from tests.helpers.sessions import GROUPS, Session, check_ledger, step_lines

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 8


@pytest.mark.parametrize("method", ["broadcast"])
def test_an_engine_joins_while_the_trainer_is_stopped(method: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    session = Session(
        run_dir, f"trainer.steps={STEPS}", f"weights.method={method}", "launch.placement=disaggregated",
        "rollout.max_staleness=1000", "rollout.over_provision=4", "engine.start_timeout=600",
    )  # fmt: skip
    try:
        session.wait_for(lambda: step_lines(run_dir) >= 1)
        trainer = session.find("rlsys.train", "--config", "launch.ranks")
        ranks = [p for p in trainer.children(recursive=True) if "rlsys.train" in p.cmdline()]
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        lines, (first,) = step_lines(run_dir), engines(run_dir)
        with subprocess.Popen([*RLSYS, "engines", "join", str(run_dir)], cwd=ROOT) as joiner:
            busy: list[str] = []

            def works() -> bool:
                assert joiner.poll() is None
                engine_figures = {u: f for u, f in engines(run_dir).items() if u != first and f["serving"]}
                busy.extend(str(f["state"]) for f in engine_figures.values() if f["requests"])
                return len(busy) > 3

            session.wait_for(works)
            engine_figures = engines(run_dir)
            assert (
                len({f["weight_version"] for f in engine_figures.values()}) == 1
                and step_lines(run_dir) == lines
            )
            joiner.send_signal(signal.SIGTERM)
            assert joiner.wait(timeout=120) == 0
        assert list(engines(run_dir)) == [first] and step_lines(run_dir) == lines
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    assert check_ledger(run_dir)["trained"] == STEPS * GROUPS
    assert [s["step"] for s in read_metrics(run_dir).steps] == list(range(1, STEPS + 1))
    log_text = (run_dir / "logs" / "rollout.log").read_text()
    assert f"from {first}" in log_text and "samples continue on other engines" in log_text
    print(
        [
            line
            for line in log_text.splitlines()
            if "joins" in line or "has weight" in line or "leaves" in line
        ]
    )


def test_an_engine_joins_a_chain_and_receives_its_pushes(tmp_path: Path) -> None:
    """`--pool` of a pool behind a slow link: the trainer sends to the first engine alone."""
    run_dir = tmp_path / "run"
    session = Session(
        run_dir, "launch.placement=disaggregated", "engine.start_timeout=600",
        "rollout.max_staleness=1000", "engine.pools=[{name: far, count: 1, relay: true, cost: 0.5}]",
        "engine.count=null", "trainer.steps=100000",
    )  # fmt: skip
    try:
        session.wait_for(lambda: step_lines(run_dir) >= 1)
        with subprocess.Popen([*RLSYS, "engines", "join", str(run_dir), "--pool", "far"], cwd=ROOT) as joiner:

            def serves() -> bool:
                assert joiner.poll() is None
                return sum(bool(f["serving"]) for f in engines(run_dir).values()) == 2

            session.wait_for(serves)
            lines = step_lines(run_dir)
            session.wait_for(lambda: step_lines(run_dir) >= lines + 4)
            joiner.send_signal(signal.SIGTERM)
            assert joiner.wait(timeout=120) == 0
        session.send(signal.SIGINT)
        session.end()
    finally:
        session.kill()
    check_ledger(run_dir)
    # The step in which it came may have counted its engines before.
    together = read_metrics(run_dir).steps[lines + 1 : lines + 4]
    assert [s["pool_far_serving"] for s in together] == [2, 2, 2]
    for step in together:
        assert step["push_tensors_unknown"] == 0 and step["push_relayed_bytes"] < 0.9 * step["push_bytes"]
