"""Optimizer state in host memory: Megatron's own checks of the settings, as on a GPU, and its own resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.trainer import setup
from tests.helpers import trainer_cases as cases
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.gate]


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_offloaded_state_can_be_loaded_again_or_is_refused(
    transformer_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's HybridDeviceOptimizer loads a checkpoint's state only with the precision-aware optimizer, and that
    asks for Transformer Engine's version."""
    model = {"path": Path("some/model"), "dtype": "bfloat16"}
    config = Config.model_validate({"model": model, "trainer": {"offload_optimizer": 0.5}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(setup, "have_transformer_engine", lambda: transformer_engine)
    if not transformer_engine:
        with pytest.raises(UserError, match=r"trainer\.offload_optimizer = 0\.5 needs Transformer Engine"):
            setup.optimizer_config(config)
        return
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda *_: True)
    optimizer_config = setup.optimizer_config(config)
    assert (optimizer_config.optimizer_cpu_offload, optimizer_config.optimizer_offload_fraction) == (
        True,
        0.5,
    )
    assert optimizer_config.use_precision_aware_optimizer, "a resume would end in a KeyError"


def test_a_run_with_offloaded_optimizer_state_resumes_exactly(tmp_path: Path) -> None:
    """Half of the parameters are stepped in host memory by torch's AdamW, half on the "GPU" by Transformer Engine's
    stub; moments, float32 weights and both counts of steps come back from the checkpoint. Upstream, no such
    checkpoint can be loaded, and the GPU's half counts its steps wrong behind it: the second step shows that."""
    model = cases.write_model(tmp_path / "model")
    command = [sys.executable, "tests/helpers/offload_cases.py", str(model), str(tmp_path / "run"), "0.5"]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }  # fmt: skip
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert min(report["halves"]["host"], report["halves"]["gpu"]) > 1e5
    assert report["halves"]["dtypes"] == ["torch.float32"], "what is stepped; the model is in bfloat16"
    assert report["loaded"] == 2
    assert report["resumed"] == report["unbroken"]
