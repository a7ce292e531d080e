"""What sequences of a micro-batch begin with is computed once, with the numbers of a pass that computes it anew for
each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import prefix_cases as prefixes
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration

ALONE = (
    "dense",
    "run",
    "windows",
    "deepseek",
    "replay",
    "balance",
    "lora",
    "support",
    "tied",
    "balance,replay,recompute",
    "deepseek,recompute",
    "padded",
)
ON_TWO = (
    "tp=2",
    "pp=2",
    "pp=2,vpp=2",
    "ep=2",
    "dp=2",
    "tp=2,ep=2,etp=1,balance",
    "tp=2,replay",
    "pp=2,balance,replay,recompute",
    "tp=2,deepseek",
    "ep=2,padded,replay",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixes")
    cases.write_model(folder / "model")
    for name, overrides in (cases.MODELS | prefixes.MODELS).items():
        cases.write_model(folder / name, **overrides)
    return folder


@pytest.mark.parametrize("layout", ALONE)
def test_a_shared_prefix_changes_no_number(layout: str, workplace: Path) -> None:
    trainer = prefixes.trainer_of(workplace, layout)
    try:
        prefixes.check(layout, prefixes.gaps(trainer))
    finally:
        trainer.close()


def test_multi_token_prediction_packs_every_prompt(workplace: Path) -> None:
    trainer = prefixes.trainer_of(workplace, "mtp")
    try:
        assert trainer.passes.pack.shared == "no"
        assert not any(micro.prefixes for micro in prefixes.batch_for(trainer, True))
    finally:
        trainer.close()


def on_two(workplace: Path, layouts: tuple[str, ...]) -> dict[str, list[dict]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    (workplace / "gaps.jsonl").unlink(missing_ok=True)
    subprocess.run([*torchrun, "-m", prefixes.__name__, str(workplace), *layouts], check=True, env=env)
    return dict(json.loads(line) for line in (workplace / "gaps.jsonl").read_text().splitlines())


@pytest.mark.full
def test_nor_does_it_in_any_layout(workplace: Path) -> None:
    layout_gaps = on_two(workplace, ON_TWO)
    assert tuple(layout_gaps) == ON_TWO
    for layout, of_ranks in layout_gaps.items():
        for gaps in of_ranks:
            prefixes.check(layout, gaps)
