"""Search for a layout of trainer and engines that fits a model and a number of GPUs.

The trainer gets the first layout that fits, in the order of communication cost: first layouts with the optimizer in
GPU memory, then with the optimizer in host memory, and in each case those with fewer tensor- and pipeline-parallel
ranks first. Engines get the size with the shortest forecast of a train step. `rlsys.planner.memory` estimates the
memory; `rlsys explain` prints these estimates, and `rlsys rehearse` checks them.
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
"""Assumed number of GPUs per node."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a layout may use; the remainder is for NCCL, cuBLAS and fragmentation."""
_MIN_RUNNING_REQUESTS = 16
"""Smallest number of samples in flight that an engine's KV pool must hold, if the engine has that many."""
_BYTES_PER_PARAMETER = 8
"""Smallest GPU memory per parameter: weights of trainer and engine in bfloat16, gradients in float32."""


@dataclass(frozen=True)
class Candidate:
    """A layout of the trainer, and of engines on the same GPUs.

    Attributes:
        tp: Tensor-parallel size of the trainer.
        pp: Number of pipeline stages.
        ep: Expert-parallel size.
        engine_tp: Tensor-parallel size of an engine.
        offload: Share of the optimizer states in host memory (trainer.offload_optimizer).
    """

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

    def valid_config(candidate: Candidate) -> Config | None:
        """Return the config of a layout; None if it is invalid or does not fit the model."""
        try:
            config = config_of(candidate)
            check_layout(config, hf)
        except UserError:
            return None
        return config

    def trainer_fits(candidate: Candidate) -> bool:
        """Return whether the layout is valid, and a trainer rank fits the memory."""
        config = valid_config(candidate)
        return config is not None and (gpus == 0 or budget(config, size).trainer <= limit * GB)

    def engines_fit(config: Config) -> bool:
        """Return whether engines get the weights, and fit the memory with a sufficient KV pool."""
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
            configs = [(c, config) for c in candidates if (config := valid_config(c)) and engines_fit(config)]
            if configs:
                return min(configs, key=lambda fit: forecast_step(fit[1], hf, machine).step)
    return None


def _trainer_layouts(hf: HFConfig, gpus: int) -> Iterator[Candidate]:
    """Yield the possible layouts of the trainer, in ascending order of communication cost.

    Args:
        hf: the model.
        gpus: number of GPUs; 0 for a host without GPUs.
    """
    if gpus == 0:
        yield Candidate(1, 1, 1, 1, 0.0)
        return
    per_node = min(gpus, GPUS_PER_NODE)
    powers = [2**i for i in range(17) if 2**i <= gpus]
    within_node = [n for n in powers if n <= per_node]
    ep_sizes = [1]
    if hf.experts:
        all_sizes = [*reversed(within_node), *powers[len(within_node) :]]
        ep_sizes = [n for n in all_sizes if hf.experts % n == 0]
    for offload in (0.0, 1.0):
        for product in [n for n in powers if gpus % n == 0]:
            for tp in reversed([n for n in within_node if n <= product]):
                for ep in ep_sizes:
                    if product // tp <= hf.layers and gpus % (product // tp * ep) == 0:
                        yield Candidate(tp, product // tp, ep, 1, offload)


def _engine_sizes(gpus: int) -> list[list[int]]:
    """Return lists of engine sizes to compare: first all sizes within a node, then each larger size alone."""
    powers = [2**i for i in range(17) if 2**i <= max(gpus, 1)]
    within_node = [n for n in powers if n <= GPUS_PER_NODE]
    return [within_node, *([n] for n in powers[len(within_node) :])]
