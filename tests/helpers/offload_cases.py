"""Megatron's optimizer offload without a GPU: `offload_cases.py MODEL FOLDER FRACTION` prints its results as JSON.

The stub of Transformer Engine is the GPU optimizer, and torch's AdamW is the host optimizer. Only the device of
tensors is faked, and only while Megatron partitions the parameters: a tensor appears to be on a GPU until its copy by
`.cpu()`.
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


class HostTensor(Tensor):
    """A tensor that was copied from the fake GPU, or a result of one."""

    is_cuda = property(lambda self: False)  # type: ignore[assignment]


def copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().as_subclass(HostTensor)


def with_fake_gpu(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap HybridDeviceOptimizer's partition of parameters such that they appear to be on a GPU."""

    def partition_on_fake_gpu(*args: Any) -> Any:
        with (
            patch.object(Tensor, "is_cuda", property(lambda self: True)),
            patch.object(Tensor, "cpu", copy_to_host),
            patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return partition(*args)

    return partition_on_fake_gpu


def parameter_halves(trainer: Any) -> dict[str, Any]:
    """Return the number of parameter elements of the host and the GPU optimizers, and their dtypes."""
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
    setattr(HybridDeviceOptimizer, name, with_fake_gpu(getattr(HybridDeviceOptimizer, name)))
    sections = {"model": {"dtype": "bfloat16"}, "trainer": {"offload_optimizer": fraction}}
    config = cases.config_of(model, folder, **sections)
    trainer = Trainer(config)
    results: dict[str, Any] = {
        "halves": parameter_halves(trainer),
        "steps": cases.steps(trainer, 2, cases.LR),
    }
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
