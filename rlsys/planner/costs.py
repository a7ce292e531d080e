"""Seconds of an engine's forward pass, of a train step and of a push, from a machine's rates. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.flops import crossover_length, visited_by_kind
from rlsys.convert.prefixes import Sharing, cost, why_not_shared
from rlsys.core.machines import (
    PASS_OVERHEAD_SECONDS,
    TRAIN_EFFICIENCY,
    Machine,
)
from rlsys.planner.memory import model_size, value_bytes
from rlsys.planner.weight_update_cost import GB, hashing, rate


@dataclass(frozen=True)
class Costs:
    """Costs in seconds. A pass decodes one token of each running request, or reads prompts; both read the weights."""

    pass_overhead: float
    """Overhead of a pass."""
    weights: float = 0.0
    """Reading the weights that every token needs."""
    experts: float = 0.0
    """Reading all experts."""
    expert_fraction: float = 1.0
    """Fraction of a layer's experts that one token visits."""
    cached_token: float = 0.0
    """Reading one token's keys and values."""
    decoded_token: float = 0.0
    """Computing one decoded token."""
    prompt_token: float = 0.0
    """Computing one prompt token."""
    trained_token: float = 0.0
    """Training one token on all ranks together; attention is added (`crossover`)."""
    crossover: float = math.inf
    """Sequence length at which attention costs as much as everything else."""
    shared_prompts: bool = False
    """Whether a train step computes the prompt of a group once (rlsys.convert.prefixes)."""
    train_step: float = 0.0
    """Overhead of a train step."""
    push: float = 0.0
    """A push without the parts that the simulation includes: waiting for the end of a pass, and canaries."""
    request: float = 0.0
    """Overhead of an engine's server per request, sequentially."""

    def decode(self, running: int, context: float) -> float:
        """Return the seconds of one pass over `running` requests with `context` tokens in total."""
        touched = 1.0 - (1.0 - self.expert_fraction) ** running
        memory = self.weights + touched * self.experts + context * self.cached_token
        return self.pass_overhead + max(memory, running * self.decoded_token)

    def prefill(self, tokens: float) -> float:
        """Return the seconds of passes that read this number of prompt tokens."""
        return self.pass_overhead + max(self.weights + self.experts, tokens * self.prompt_token)

    def train(self, sequences: Sequence[Sharing]) -> float:
        """Return the seconds of a train step on sequences, prompts included."""
        return self.train_step + cost(sequences, self.crossover) * self.trained_token


def estimate_costs(config: Config, hf: HFConfig, machine: Machine, tp: int | None = None) -> Costs:
    """Estimate the costs of a config's layout on such GPUs, from config.json only. `tp`: default engine.tp."""
    width, size, tp = value_bytes(config), model_size(hf), tp or config.engine.tp
    pushed = width * size.total
    efficiency, bandwidth = machine.efficiency, tp * machine.bandwidth * 1e12
    peak = machine.tflops[config.model.dtype] * 1e12
    dense, experts = visited_by_kind(hf)
    prompt_token = 2 * (dense / efficiency.dense_prefill + experts / efficiency.expert_prefill) / (tp * peak)
    passes = 3 + ("layer" in config.trainer.recompute)
    cached = size.kv_values * width
    return Costs(
        pass_overhead=PASS_OVERHEAD_SECONDS,
        weights=width * size.dense / (bandwidth * efficiency.dense_decode),
        experts=width * size.experts / (bandwidth * efficiency.expert_decode),
        expert_fraction=size.experts_per_token / hf.experts if hf.experts else 1.0,
        cached_token=cached / (bandwidth * efficiency.cache),
        decoded_token=prompt_token,
        prompt_token=prompt_token,
        trained_token=passes
        * config.algo.epochs
        * 2
        * (dense + experts)
        / (config.parallel.world_size * peak * TRAIN_EFFICIENCY),
        crossover=crossover_length(hf),
        # Machines with rates are GPUs, whose hosts have Transformer Engine.
        shared_prompts=why_not_shared(config, hf, transformer_engine=True) is None,
        push=pushed / GB / rate(config) + hashing(config, pushed)[1],
    )
