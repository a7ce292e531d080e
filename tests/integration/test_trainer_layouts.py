"""The matrix: every layout trains as one rank does, on packed micro-batches and on padded ones."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration

# Every axis once, alone where it can be: tp has sequence parallelism with it, etp needs ep and tp.
AXES = ("tp=2", "pp=2", "pp=2,vpp=2,save", "ep=2", "tp=2,ep=2,etp=1", "cp=2", "dp=2")
ON_TWO = (
    "pp=2,vpp=2",
    "ep=2,overlap",
    "tp=2,padded",
    "pp=2,padded",
    "pp=2,vpp=2,padded",
    "ep=2,padded",
    "ep=2,dispatcher=allgather,padded",
    "cp=2,padded",
    "tp=2,replay",
    "pp=2,vpp=2,replay",
    "cp=2,replay",
    "pp=2,vpp=2,replay,recompute",
    "tp=2,balance,selective,recompute",
    "tp=2,deepseek",
    "cp=2,deepseek",
    "pp=2,vpp=2,deepseek",
    "pp=2,tied",
    "tp=2,tied",
    "dp=2,padded",
    "pp=2,uneven",
    "pp=2,vpp=2,save",
    "tp=2,resume",
)
ON_FOUR = (
    "tp=2,ep=2,dp=2",
    "tp=2,ep=2,etp=1,dp=2",
    "pp=2,ep=2,dp=2",
    "pp=2,vpp=2,dp=2,overlap",
    "tp=2,pp=2",
    "cp=2,pp=2,vpp=2",
    "cp=2,ep=2,tp=2,etp=1",
    "tp=2,pp=2,padded",
    "pp=2,ep=2,dp=2,padded",
    "tp=2,ep=2,dp=2,dispatcher=allgather,padded",
    "cp=2,ep=2,tp=2,etp=1,replay",
    "tp=2,ep=2,etp=1,dp=2,save",
    "pp=2,dp=2,resume",
)
ODD_VOCABULARY = (
    "tp=2,odd vocabulary,save",
    "pp=2,odd vocabulary",
    "tp=2,odd vocabulary,resume",
    "tp=2,odd tied",
    "tp=2,odd mtp",
)
MUON_ON_TWO = ("tp=2,muon", "pp=2,vpp=2,muon", "dp=2,muon", "ep=2,muon", "tp=2,ep=2,etp=1,muon,save")
MUON_ON_FOUR = (
    "tp=2,ep=2,dp=2,muon",
    "pp=2,ep=2,dp=2,overlap,muon",
    "cp=2,dp=2,muon,save",
    "tp=2,pp=2,muon,resume",
)
LORA_ON_TWO = (
    "tp=2,lora",
    "pp=2,vpp=2,lora",
    "ep=2,lora",
    "cp=2,lora",
    "tp=2,lora,recompute",
    "tp=2,latent lora",
    "pp=2,lora,save",
    "tp=2,ep=2,etp=1,lora,resume",
)
LORA_ON_FOUR = (
    "tp=2,ep=2,dp=2,lora",
    "tp=2,dp=2,lora,overlap",
    "pp=2,ep=2,dp=2,lora",
    "tp=2,ep=2,etp=1,dp=2,lora,save",
    "tp=2,pp=2,lora,resume",
)
MTP_ON_TWO = (
    "tp=2,mtp",
    "pp=2,mtp",
    "ep=2,mtp",
    "cp=2,mtp",
    "pp=2,vpp=2,mtp",
    "dp=2,mtp,overlap",
    "pp=2,mtp,overlap",
    "tp=2,mtp,recompute",
    "tp=2,mtp trunk",
    "pp=2,mtp trunk",
    "tp=2,ep=2,etp=1,mtp,save",
    "pp=2,mtp,resume",
)
MTP_ON_FOUR = (
    "tp=2,pp=2,mtp",
    "pp=2,ep=2,dp=2,overlap,mtp,save",
    "cp=2,pp=2,mtp trunk",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    cases.write_model(folder / "model")
    for name, overrides in cases.MODELS.items():
        cases.write_model(folder / name, **overrides)
    return folder


@pytest.fixture(scope="module")
def alone(workplace: Path) -> Callable[[str], dict[str, Any]]:
    """What one rank sees of a kind of layout, made when it is first asked for; it leaves a checkpoint of step 3."""

    @functools.cache
    def of_kind(name: str) -> dict[str, Any]:
        trainer = Trainer(
            cases.config_of(
                workplace / cases.model_name(name), workplace / f"run-{name}", **cases.sections(name)
            )
        )
        outcome = cases.three_steps(trainer)
        cases.save(trainer, 3)
        outcome["fourth"] = cases.steps(trainer, 1, cases.LR)
        trainer.close()
        return outcome

    return of_kind


def near(got: list[Any], expected: list[Any], **tolerance: float) -> bool:
    return torch.allclose(torch.tensor(got), torch.tensor(expected), **tolerance)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, AXES, id="each axis", marks=pytest.mark.gate),
        pytest.param(2, ON_TWO, id="two ranks"),
        pytest.param(2, ("tp=2,support", "cp=2,support"), id="cut distributions"),
        pytest.param(2, ODD_VOCABULARY, id="vocabularies that two do not divide"),
        pytest.param(4, ON_FOUR, id="four ranks"),
        pytest.param(2, MUON_ON_TWO, id="muon on two ranks", marks=pytest.mark.full),
        pytest.param(4, MUON_ON_FOUR, id="muon on four ranks"),
        pytest.param(2, LORA_ON_TWO, id="adapters on two ranks", marks=pytest.mark.full),
        pytest.param(4, LORA_ON_FOUR, id="adapters on four ranks"),
        pytest.param(2, MTP_ON_TWO, id="multi-token prediction on two ranks", marks=pytest.mark.full),
        pytest.param(4, MTP_ON_FOUR, id="multi-token prediction on four ranks"),
    ],
)
def test_every_layout_trains_as_one_rank_does(
    ranks: int, layouts: tuple[str, ...], workplace: Path, alone: Callable[[str], dict[str, Any]]
) -> None:
    """Log-probs, three optimizer steps (loss, gradient norm, metric), log-probs, weights, a fourth step from a
    checkpoint of one rank or of another layout; and one rank goes on from a checkpoint of several."""
    single = {layout: alone(cases.kind(layout)) for layout in layouts}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    (workplace / "seen.jsonl").unlink(missing_ok=True)
    command = [*torchrun, "-m", cases.__name__, str(workplace), *layouts]
    subprocess.run(command, check=True, env=env)
    outcomes = dict(json.loads(line) for line in (workplace / "seen.jsonl").read_text().splitlines())
    assert tuple(outcomes) == layouts
    for layout, outcome in outcomes.items():
        reference = single[layout]
        assert near(outcome["before"], reference["before"], rtol=0, atol=1e-5), layout
        assert near(outcome["steps"], reference["steps"], rtol=1e-5), layout
        assert near(outcome["after"], reference["after"], rtol=0, atol=1e-5), layout
        assert outcome["sums"] == pytest.approx(reference["sums"], rel=1e-5), layout
        assert outcome["loaded"] == 3
        assert near(outcome["fourth"], reference["fourth"], rtol=1e-5), layout
    if saved := next((layout for layout in layouts if "save" in layout), None):
        on_one = {**cases.sections(saved), "parallel": {}}
        trainer = Trainer(cases.config_of(workplace / cases.model_name(saved), workplace / saved, **on_one))
        assert trainer.load_checkpoint() == 3
        assert near(cases.steps(trainer, 1, cases.LR), alone(cases.kind(saved))["fourth"], rtol=1e-5)
        trainer.close()
