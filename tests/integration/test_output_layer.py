"""Logits for a few rows at a time give the scores and gradients of logits that are computed at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.trainer.model import model
from tests.helpers import prefix_cases as prefixes
from tests.helpers import row_cases
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration

ALONE = ("run", "tied", "odd vocabulary", "odd tied", "lora", "support", "mtp", "mtp trunk", "odd mtp")
ON_TWO = (
    "tp=2",
    "tp=2,tied",
    "tp=2,odd vocabulary",
    "tp=2,support",
    "tp=2,mtp trunk",
    "pp=2",
    "pp=2,mtp",
    "cp=2",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    cases.write_model(folder / "model")
    for name, overrides in (cases.MODELS | prefixes.MODELS).items():
        cases.write_model(folder / name, **overrides)
    return folder


@pytest.mark.parametrize("layout", ALONE)
def test_rows_change_no_number(layout: str, workplace: Path) -> None:
    trainer = prefixes.trainer_of(workplace, layout)
    try:
        gaps = row_cases.gaps(trainer)
    finally:
        trainer.close()
    prefixes.check_rounding(layout, gaps)
    assert gaps["products"] > 20


@pytest.mark.parametrize("layout", ["run", "tied", "mtp trunk"])
def test_weight_gradients_that_are_accumulated_as_they_are_computed(
    layout: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Transformer Engine or Apex, by their plain counterpart in megatron_patches."""
    fields = {"gradient_accumulation_fusion": True, "apply_rope_fusion": False}
    monkeypatch.setattr(model, "_fusions", lambda *_: fields)
    trainer = prefixes.trainer_of(workplace, layout)
    try:
        assert trainer.models[0].module.output_layer.gradient_accumulation_fusion
        prefixes.check_rounding(layout, row_cases.gaps(trainer))
    finally:
        trainer.close()


@pytest.mark.full
def test_nor_do_they_in_any_layout(workplace: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([*torchrun, "-m", row_cases.__name__, str(workplace), *ON_TWO], check=True, env=env)
    for rank in (0, 1):
        lines = (workplace / f"gaps-{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)[0] for line in lines] == list(ON_TWO)
        for layout, of_ranks in map(json.loads, lines):
            for gaps in of_ranks:
                prefixes.check_rounding(layout, gaps)
                assert gaps["products"] > 20 or ("pp" in layout and rank == 0)
