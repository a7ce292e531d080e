"""Tokens are read by the ranks that train them, and what comes of it is what packing samples in memory gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.core.errors import RunError
from rlsys.core.messages import decode, encode
from rlsys.trainer.trainer import Trainer
from tests.helpers import share_cases
from tests.helpers import trainer_cases as cases
from tests.helpers.python_path import python_path

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    cases.write_model(tmp_path / "model")
    for name, batch in zip(("light", "whole"), share_cases.write_step(tmp_path / "run"), strict=True):
        (tmp_path / f"{name}.msgpack").write_bytes(encode(batch))
    return tmp_path


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(4, ("tp=2,dp=2", "pp=2,dp=2,replay"), id="four ranks"),
        pytest.param(8, ("tp=2,pp=2,dp=2", "cp=2,dp=4"), id="eight ranks"),
    ],
)
def test_each_rank_reads_its_own_share(ranks: int, layouts: tuple[str, ...], workplace: Path) -> None:
    """At most 1.1 times the bytes of the samples in its micro-batches; all of dp together have every row once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": python_path(ROOT),
    }
    command = [*torchrun, "-m", "tests.helpers.share_cases", str(workplace), *layouts]
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    lines = (workplace / "seen.jsonl").read_text().splitlines()
    layout_reports: dict[str, list[dict[str, Any]]] = dict(json.loads(line) for line in lines)
    assert tuple(layout_reports) == layouts
    for layout, reports in layout_reports.items():
        assert len(reports) == ranks
        shares = {report["dp"]: report for report in reports}
        for report in reports:
            where = f"{layout}, rank {report['rank']}"
            print(f"{where}: {report['read']} bytes read, {report['own']} its own, {report['all']} of all")
            assert report["same"] and report["same_scores"], where
            assert 0 < report["own"] <= report["read"] <= 1.1 * report["own"], where
            assert report["rows"] == shares[report["dp"]]["rows"], where
        rows = [row for report in shares.values() for row in report["rows"]]
        assert (
            len(rows) == len(set(rows))
            and sum(report["own"] for report in shares.values()) == reports[0]["all"]
        )
        assert (
            sum(report["read_for_scores"] for report in shares.values()) <= 1.1 * reports[0]["all_for_scores"]
        )


def test_a_rank_reports_a_missing_segment(workplace: Path) -> None:
    shutil.rmtree(workplace / "run" / "segments")
    light = decode((workplace / "light.msgpack").read_bytes(), share_cases.TrainBatch)
    trainer = Trainer(cases.config_of(workplace / "model", workplace / "run"))
    with pytest.raises(
        RunError, match=r"^trainer rank 0: .*/segments/000000-000001-000001.seg: no such file; each machine"
    ):
        share_cases.pack_rows(light, [0], trainer)
    trainer.close()
