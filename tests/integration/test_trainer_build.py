"""A trainer whose construction fails leaves its process as it was: the next one is built, and trains the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from rlsys.trainer import setup
from rlsys.trainer import trainer as trainer_module
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

STAGES = {
    "layout": (setup.parallel_state, "initialize_model_parallel"),
    "seeds": (setup, "model_parallel_cuda_manual_seed"),
    "layers": (trainer_module, "build_model"),
    "gradient buffers": (setup, "data_parallel"),
    "optimizer": (trainer_module, "get_megatron_optimizer"),
    "passes": (trainer_module, "Passes"),
}
"""What a constructor calls, in its order: owner and name."""


def loss_of_an_update(model: Path, run: Path) -> float:
    trainer = Trainer(cases.config_of(model, run))
    try:
        return trainer.update(trainer.passes.pack(cases.samples()), cases.policy_loss, 1e-3).loss
    finally:
        trainer.close()


def test_a_trainer_that_fails_to_build_does_not_poison_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cases.write_model(tmp_path / "model")
    expected = loss_of_an_update(model, tmp_path / "first")
    groups = len(dist.distributed_c10d._world.pg_map)
    for stage, (owner, name) in STAGES.items():
        whole = getattr(owner, name)

        def then_raise(*args: object, whole: object = whole, stage: str = stage, **kwargs: object) -> None:
            whole(*args, **kwargs)  # type: ignore[operator]
            raise RuntimeError(f"{stage} fails")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, then_raise)
            with pytest.raises(RuntimeError, match=f"{stage} fails"):
                Trainer(cases.config_of(model, tmp_path / stage))
        assert not setup.parallel_state.is_initialized(), (
            f"after {stage}: megatron's parallel groups stay behind"
        )
        assert len(dist.distributed_c10d._world.pg_map) == groups, (
            f"after {stage}: a process group stays behind"
        )
    assert loss_of_an_update(model, tmp_path / "last") == expected


def test_a_second_trainer_is_rejected_and_leaves_the_first_running(tmp_path: Path) -> None:
    model = cases.write_model(tmp_path / "model")
    trainer = Trainer(cases.config_of(model, tmp_path / "run"))
    try:
        with pytest.raises((AssertionError, RuntimeError), match="already"):
            Trainer(cases.config_of(model, tmp_path / "other"))
        assert setup.parallel_state.is_initialized()
        assert trainer.update(trainer.passes.pack(cases.samples()), cases.policy_loss, 1e-3).grad_norm > 0
    finally:
        trainer.close()
