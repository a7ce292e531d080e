"""Fine-tuning on traces with the real trainer, as `rlsys sft` does it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlsys.config import Config
from rlsys.config.trainer import Schedule, TrainerConfig
from rlsys.data.quickstart_model import write_model
from rlsys.obs.metrics import read_metrics
from rlsys.trainer import setup
from rlsys.trainer import sft as sft_module
from rlsys.trainer.learning_rate import learning_rate
from rlsys.trainer.sft import sft

pytestmark = pytest.mark.integration


def config_of(tmp_path: Path, run: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": tmp_path / "empty"},
            "run": {"dir": tmp_path / run},
            "trainer": {
                "steps": 4,
                "lr": 4e-3,
                "warmup_steps": 2,
                "checkpoint_every": 2,
                "token_budget": 1024,
            },
            "rollout": {"temperature": 0.5},  # must not matter
            "sft": {"params": {"worked": 8}, "lr_end": 0.5},
        }
    )


def losses(config: Config) -> list[float]:
    return [entry["loss"] for entry in read_metrics(config.run.dir).steps]


def test_an_interrupted_warm_start_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "empty")
    unbroken = config_of(tmp_path, "unbroken")
    sft(unbroken)

    class Killed(Exception): ...

    def killed_in_step_4(t: TrainerConfig, step: int, schedule: Schedule, end: float) -> float:
        if step == 4:
            raise Killed
        return learning_rate(t, step, schedule, end)

    broken = config_of(tmp_path, "broken")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sft_module, "learning_rate", killed_in_step_4)
        sft(broken)
    setup.leave_layout()
    sft(broken)

    assert losses(broken) == losses(unbroken)
    assert losses(unbroken)[0] == pytest.approx(math.log(128), abs=0.2)  # random weights guess evenly
    assert losses(unbroken)[-1] < losses(unbroken)[0] - 0.2
    one, other, start = (
        load_file(folder / "model.safetensors")
        for folder in (unbroken.run.dir / "model", broken.run.dir / "model", tmp_path / "empty")
    )
    assert one.keys() == other.keys() == start.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (unbroken.run.dir / "model/tokenizer.json").read_bytes() == (
        tmp_path / "empty/tokenizer.json"
    ).read_bytes()
