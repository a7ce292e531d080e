"""Optimizer state in host memory: Megatron's own checks of the settings, as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlsys.config import Config
from rlsys.errors import UserError
from rlsys.trainer import setup

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
    made = setup.optimizer_config(config)
    assert (made.optimizer_cpu_offload, made.optimizer_offload_fraction) == (True, 0.5)
    assert made.use_precision_aware_optimizer, "a resume would end in a KeyError"
