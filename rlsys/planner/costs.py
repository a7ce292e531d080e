"""Costs in seconds of an engine's forward pass, a train step and a push, from the rates of a machine."""

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
    """Costs in seconds. A pass of an engine decodes one token of each running request, or prefills prompts.

    Attributes:
        pass_overhead: Overhead of a pass.
        weights: Time to read the weights outside of routed experts, in each pass.
        experts: Time to read all routed experts.
        expert_fraction: Fraction of a layer's experts that one token uses.
        cached_token: Time to read the keys and values of one token.
        decoded_token: Time to compute one decoded token.
        prompt_token: Time to compute one prompt token.
        trained_token: Time in which all ranks together train one token, without attention.
        crossover: Sequence length in tokens at which attention takes as long as the rest of training.
        shared_prompts: Whether a train step computes the prompt of a group once (rlsys.convert.prefixes).
        train_step: Overhead of a train step.
        push: Time of a push, without waiting for the end of a pass and without canaries, which are simulated.
        request: Time in which an engine's server receives one request; it receives requests one after the other.
    """

    pass_overhead: float
    weights: float = 0.0
    experts: float = 0.0
    expert_fraction: float = 1.0
    cached_token: float = 0.0
    decoded_token: float = 0.0
    prompt_token: float = 0.0
    trained_token: float = 0.0
    crossover: float = math.inf
    shared_prompts: bool = False
    train_step: float = 0.0
    push: float = 0.0
    request: float = 0.0

    def decode(self, running: int, context: float) -> float:
        """Return the seconds of a decode pass over `running` requests with `context` tokens in total."""
        used_fraction = 1.0 - (1.0 - self.expert_fraction) ** running
        memory = self.weights + used_fraction * self.experts + context * self.cached_token
        return self.pass_overhead + max(memory, running * self.decoded_token)

    def prefill(self, tokens: float) -> float:
        """Return the seconds of a pass that prefills this number of prompt tokens."""
        return self.pass_overhead + max(self.weights + self.experts, tokens * self.prompt_token)

    def train(self, sequences: Sequence[Sharing]) -> float:
        """Return the seconds of a train step on these sequences, which include their prompts."""
        return self.train_step + cost(sequences, self.crossover) * self.trained_token


def estimate_costs(config: Config, hf: HFConfig, machine: Machine, tp: int | None = None) -> Costs:
    """Estimate the costs of a config from config.json of the model.

    Args:
        config: config of the run.
        hf: the model.
        machine: rates of a GPU.
        tp: tensor-parallel size of an engine; None: engine.tp.
    """
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
