"""What a forward pass of an engine, a train step and a push take, in seconds. From a machine's rates. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.flops import crossover_length, forward_flops, visited_parameters
from rlsys.core.machines import (
    DECODE_EFFICIENCY,
    PASS_OVERHEAD_SECONDS,
    PREFILL_EFFICIENCY,
    TRAIN_EFFICIENCY,
    Machine,
)
from rlsys.planner.memory import model_size, value_bytes
from rlsys.planner.weight_update_cost import GB, hashing, rate


@dataclass(frozen=True)
class Costs:
    """Seconds. A pass decodes one token of each running request, or reads prompts; both read weights from memory."""

    every_pass: float
    """Besides its work."""
    weights: float = 0.0
    """To read the weights that every token needs."""
    experts: float = 0.0
    """To read all experts."""
    chosen: float = 1.0
    """Share of a layer's experts that one token visits."""
    cached_token: float = 0.0
    """To read one token's keys and values."""
    decoded_token: float = 0.0
    """To compute with one decoded token."""
    prompt_token: float = 0.0
    """To compute with one token of a prompt."""
    trained_token: float = 0.0
    """Of a train step, all ranks together; attention comes on top (`crossover`)."""
    crossover: float = math.inf
    """Tokens of a sequence at which attention costs as much as all else."""
    train_step: float = 0.0
    """Of a train step, besides its tokens."""
    push: float = 0.0
    """Besides what engines do in it that the simulation has of its own: waiting for a pass to end, and canaries."""
    request: float = 0.0
    """Of an engine's server, to take one request in: one after another."""

    def decode(self, running: int, context: float) -> float:
        """One pass over `running` requests that have `context` tokens together."""
        touched = 1.0 - (1.0 - self.chosen) ** running
        memory = self.weights + touched * self.experts + context * self.cached_token
        return self.every_pass + max(memory, running * self.decoded_token)

    def prefill(self, tokens: float) -> float:
        """Passes that read so many tokens of prompts."""
        return self.every_pass + max(self.weights + self.experts, tokens * self.prompt_token)

    def train(self, lengths: Sequence[float]) -> float:
        """A train step on sequences of these lengths, prompts included."""
        work = sum(n + n * n / self.crossover for n in lengths)
        return self.train_step + work * self.trained_token


def costs_of(config: Config, hf: HFConfig, machine: Machine, tp: int | None = None) -> Costs:
    """Of a config's layout on such GPUs, from config.json alone. `tp`: of the engine; else engine.tp."""
    width, size, tp = value_bytes(config), model_size(hf), tp or config.engine.tp
    pushed = width * size.total
    read = tp * machine.bandwidth * 1e12 * DECODE_EFFICIENCY
    peak = machine.tflops[config.model.dtype] * 1e12
    flops = 2 * visited_parameters(hf)
    passes = 3 + ("layer" in config.trainer.recompute)
    cached = size.layers * size.kv_values * width
    return Costs(
        every_pass=PASS_OVERHEAD_SECONDS,
        weights=width * size.dense / read,
        experts=width * size.experts / read,
        chosen=size.chosen / hf.experts if hf.experts else 1.0,
        cached_token=cached / read,
        decoded_token=flops / (tp * peak * PREFILL_EFFICIENCY),
        prompt_token=forward_flops(hf, 1) / (tp * peak * PREFILL_EFFICIENCY),
        trained_token=passes
        * config.algo.epochs
        * flops
        / (config.parallel.world_size * peak * TRAIN_EFFICIENCY),
        crossover=crossover_length(hf),
        push=pushed / GB / rate(config) + hashing(config, pushed)[1],
    )
