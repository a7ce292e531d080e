"""Megatron's own optimizer offload without a GPU: `offload_cases.py MODEL FOLDER FRACTION` prints what it saw (JSON).

Transformer Engine's stub is its GPU's half, torch's AdamW its host's half. Only where a tensor lives is stood in for,
and only while Megatron shares out the parameters: there each tensor seems to be on a GPU until `.cpu()` is called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


class OnHost(Tensor):
    """A tensor that was copied from the "GPU"; so is what is made of it."""

    is_cuda = property(lambda self: False)  # type: ignore[assignment]


def moved(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().as_subclass(OnHost)


def on_a_gpu(share_out: Callable[..., Any]) -> Callable[..., Any]:
    """HybridDeviceOptimizer's choice of what it offloads, for parameters that seem to be on a GPU."""

    def sharing_out(*args: Any) -> Any:
        with (
            patch.object(Tensor, "is_cuda", property(lambda self: True)),
            patch.object(Tensor, "cpu", moved),
            patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return share_out(*args)

    return sharing_out


def kinds(trainer: Any) -> dict[str, Any]:
    """Of the optimizers' parameters: how many elements each half steps, and in which precision."""
    halves: dict[str, Any] = {"host": 0, "gpu": 0, "dtypes": set()}
    for chained in trainer.optimizer.chained_optimizers:
        for optimizer in chained.optimizer.sub_optimizers:
            half = "gpu" if optimizer is chained.optimizer.gpu_optimizer else "host"
            params = [p for group in optimizer.param_groups for p in group["params"]]
            halves[half] += sum(p.numel() for p in params)
            halves["dtypes"] |= {str(p.dtype) for p in params}
    return {**halves, "dtypes": sorted(halves["dtypes"])}


def main(model: Path, folder: Path, fraction: float) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/te_stub")]
    import megatron_patches

    megatron_patches.have_transformer_engine = lambda: True
    megatron_patches.apply()
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    from rlsys.trainer import setup
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    settings = setup.optimizer_config
    setup.offloads = lambda config: config.trainer.offload_optimizer > 0
    setup.optimizer_config = lambda config: replace(
        settings(config), pin_cpu_grads=False, pin_cpu_params=False
    )
    name = "_get_sub_optimizer_param_groups"
    setattr(HybridDeviceOptimizer, name, on_a_gpu(getattr(HybridDeviceOptimizer, name)))
    sections = {"model": {"dtype": "bfloat16"}, "trainer": {"offload_optimizer": fraction}}
    config = cases.config_of(model, folder, **sections)
    trainer = Trainer(config)
    results: dict[str, Any] = {"halves": kinds(trainer), "steps": cases.steps(trainer, 2, cases.LR)}
    cases.save(trainer, 2)
    results["unbroken"] = [*cases.steps(trainer, 2, cases.LR), cases.canary_logps(trainer)]
    trainer.close()
    again = Trainer(config)
    results["loaded"] = again.load_checkpoint()
    results["resumed"] = [*cases.steps(again, 2, cases.LR), cases.canary_logps(again)]
    again.close()
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
