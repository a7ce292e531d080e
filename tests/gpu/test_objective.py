"""Every shipped recipe's loss, gradients and figures on a CUDA device, against the same on the CPU, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlsys.config import read_layers
from rlsys.config.algo import AlgoSection
from tests.helpers.algo_world import World, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs/algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_losses_metrics_and_gradients_match_between_cuda_and_cpu(path: Path) -> None:
    algo, graded = AlgoSection.model_validate(read_layers(path).get("algo", {})), path.stem == "grpo_passk"
    device_outcome = run(World(graded=graded, device="cuda"), algo, lambda rows: [rows])
    cpu_outcome = run(World(graded=graded), algo, lambda rows: [rows])
    assert device_outcome.loss == pytest.approx(cpu_outcome.loss, abs=1e-9)
    assert device_outcome.metrics == pytest.approx(cpu_outcome.metrics, abs=1e-9)
    for row, gradient in cpu_outcome.gradients.items():
        torch.testing.assert_close(device_outcome.gradients[row], gradient, atol=1e-9, rtol=0)
