"""Search for a layout of trainer and engines that fits a model and a number of GPUs.

The trainer gets the first layout that fits, in the order of communication cost: fewer tensor- and pipeline-parallel
ranks first, an optimizer on the GPU before one in host memory. Engines get the size with the shortest forecast of a
train step. Estimates are those of `rlsys.planner.memory`, which `rlsys explain` shows and `rlsys rehearse` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.core.errors import UserError
from rlsys.core.machines import Machine
from rlsys.planner.capacity import forecast_step
from rlsys.planner.layout import lay_out, push_plan
from rlsys.planner.memory import budget, engine_samples, memory_problems, model_size, samples_held
from rlsys.planner.weight_update_cost import GB

GPUS_PER_NODE = 8
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a layout may use; the remainder is for NCCL, cuBLAS and fragmentation."""
_MIN_RUNNING_REQUESTS = 16
"""Minimum number of samples in flight per engine that the KV pool of a layout must hold."""
_BYTES_PER_PARAMETER = 8
"""Least bytes of GPU memory per parameter: weights of trainer and engine in bfloat16, gradients in float32."""


@dataclass(frozen=True)
class Candidate:
    """A layout of a trainer, and of engines on the same GPUs."""

    tp: int
    pp: int
    ep: int
    engine_tp: int
    offload: float


def first_fit(
    hf: HFConfig, gpus: int, machine: Machine, config_of: Callable[[Candidate], Config]
) -> tuple[Candidate, Config] | None:
    """Return the first trainer layout that fits, with the best engine size, and its config; None if no layout fits.

    Args:
        hf: the model.
        gpus: number of GPUs; 0 for a host without GPUs.
        machine: the GPU.
        config_of: returns the config of a layout, or raises UserError.
    """
    size, limit = model_size(hf), MEMORY_SHARE * machine.memory
    if gpus and _BYTES_PER_PARAMETER * size.total > gpus * limit * GB:
        return None

    def checked(candidate: Candidate) -> Config | None:
        try:
            config = config_of(candidate)
            check_layout(config, hf)
        except UserError:
            return None
        return config

    def trainer_fits(candidate: Candidate) -> bool:
        config = checked(candidate)
        return config is not None and (gpus == 0 or budget(config, size).trainer <= limit * GB)

    def engines_fit(config: Config) -> bool:
        try:
            push_plan(config, lay_out(config))
        except UserError:
            return False
        capacity = samples_held(config, budget(config, size).pool_tokens)
        enough = capacity >= min(engine_samples(config), _MIN_RUNNING_REQUESTS)
        return gpus == 0 or (enough and not memory_problems(config, hf, limit))

    trainers = [candidate for candidate in _trainer_layouts(hf, gpus) if trainer_fits(candidate)]
    for sizes in _engine_sizes(gpus):
        for trainer in trainers:
            candidates = [replace(trainer, engine_tp=tp) for tp in sizes]
            configs = [(c, config) for c in candidates if (config := checked(c)) and engines_fit(config)]
            if configs:
                return min(configs, key=lambda fit: forecast_step(fit[1], hf, machine).step)
    return None


def _trainer_layouts(hf: HFConfig, gpus: int) -> Iterator[Candidate]:
    """Yield all layouts of the trainer, those with less communication first."""
    if gpus == 0:
        yield Candidate(1, 1, 1, 1, 0.0)
        return
    per_node = min(gpus, GPUS_PER_NODE)
    powers = [2**i for i in range(17) if 2**i <= gpus]
    within = [n for n in powers if n <= per_node]
    eps = (
        [n for n in [*reversed(within), *powers[len(within) :]] if hf.experts % n == 0] if hf.experts else [1]
    )
    for offload in (0.0, 1.0):
        for product in [n for n in powers if gpus % n == 0]:
            for tp in reversed([n for n in within if n <= product]):
                for ep in eps:
                    if product // tp <= hf.layers and gpus % (product // tp * ep) == 0:
                        yield Candidate(tp, product // tp, ep, 1, offload)


def _engine_sizes(gpus: int) -> list[list[int]]:
    """Return the sizes of engines within a node, then each larger one."""
    powers = [2**i for i in range(17) if 2**i <= max(gpus, 1)]
    within = [n for n in powers if n <= GPUS_PER_NODE]
    return [within, *([n] for n in powers[len(within) :])]
