"""What a model and a layout need: parameters, memory of one GPU, bytes of a push. Estimates, from config.json alone.

Exact: parameter counts (tested against a model's files). By formula: weights, gradients, optimizer, KV pool.
Rough: activations, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"): about 34 bytes a token, layer
and hidden unit in bfloat16, with attention that stores no scores; layers that are computed again keep 2. Parts that
`trainer.recompute` names are not taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import stage_layers

GB = 1e9
_ACTIVATION_BYTES = 34
"""Of bfloat16; twice as much in float32."""
_EXPERT_ACTIVATION_BYTES = 8
"""Of bfloat16, a token, chosen expert and intermediate unit: gate, up, their product, and its gradient's input."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts. `experts`: routed ones, which expert parallelism divides; `dense`: all others."""

    layers: int
    hidden: int
    vocab: int
    dense: int
    experts: int
    chosen_width: int
    """Intermediate units of the experts that one token visits in a layer."""
    kv_values: int
    """Numbers that one token keeps in one layer's KV cache."""
    kv_heads: int | None
    """Heads that tensor parallelism divides the cache by; None: each rank keeps all (latent attention)."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


def model_size(hf: HFConfig) -> ModelSize:
    h, moe_layers = hf.hidden_size, sum(hf.moe_layers)
    attention, kv_values, kv_heads = _attention(hf)
    biases = hf.experts if hf.routing.kind == "sigmoid" else 0  # one a routed expert, for balance
    dense = hf.vocab_size * h * (1 if hf.tied else 2) + h
    dense += hf.layers * (attention + 2 * h)
    dense += (hf.layers - moe_layers) * 3 * h * hf.ffn_size
    dense += moe_layers * (hf.experts * h + biases + 3 * h * hf.shared_ffn_size)
    routed = moe_layers * hf.experts * 3 * h * hf.expert_ffn_size
    chosen = hf.experts_per_token * hf.expert_ffn_size if hf.experts else hf.ffn_size
    return ModelSize(hf.layers, h, hf.vocab_size, dense, routed, chosen, kv_values, kv_heads)


def _attention(hf: HFConfig) -> tuple[int, int, int | None]:
    """Parameters of one layer's attention, numbers cached for a token, heads that the cache is divided by."""
    h, heads, groups, size = hf.hidden_size, hf.heads, hf.kv_heads, hf.head_dim
    if (latent := hf.latent) is not None:
        query, rank = heads * (latent.plain + latent.rotary), latent.kv_rank
        queries = latent.q_rank * (h + query + 1) if latent.q_rank else h * query
        down, up = h * (rank + latent.rotary) + rank, rank * heads * (latent.plain + latent.value)
        return queries + down + up + heads * latent.value * h, rank + latent.rotary, None
    weights = 2 * h * size * (heads + groups) + (2 * size if hf.qk_norm else 0)
    return weights + (size * (heads + 2 * groups) if hf.qkv_bias else 0), 2 * groups * size, groups


@dataclass(frozen=True)
class Budget:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    engine_weights: float
    kv_pool: float
    host: float
    """Of the optimizer, in the host's memory instead."""

    @property
    def trainer(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def engine(self) -> float:
        return self.engine_weights + self.kv_pool


def budget(config: Config, size: ModelSize) -> Budget:
    """Of the fullest kind of rank, with embeddings and experts divided evenly."""
    p, width = config.parallel, value_bytes(config)
    held = stage_layers(size.layers, p.pp)[0] / size.layers
    dense = size.dense * held / p.tp
    experts = size.experts * held / (p.ep * p.expert_tp)
    expert_copies = max(1, p.world_size // (p.pp * p.ep * p.expert_tp))
    states = 8 if width == 4 else 12  # two moments, and float32 weights beside bfloat16 ones
    states_held = states * (dense / (p.data_parallel * p.cp) + experts / expert_copies)
    tokens = (
        config.trainer.token_budget / p.cp / p.tp
    )  # sequence parallelism divides what is not already divided
    scale = width / 2
    layer = _ACTIVATION_BYTES * size.hidden + _EXPERT_ACTIVATION_BYTES * size.chosen_width
    layers = size.layers * held
    # Recomputed layers keep their inputs, and one of them all that it needs.
    per_token = layers * 2 * size.hidden + layer if "layer" in config.trainer.recompute else layers * layer
    logits = 2 * 4 * size.vocab  # and their gradient, float32
    kv_share = 1 if size.kv_heads is None else min(config.engine.tp, size.kv_heads)
    return Budget(
        weights=width * (dense + experts),
        gradients=4.0 * (dense + experts),
        optimizer=(1 - config.trainer.offload_optimizer) * states_held,
        host=config.trainer.offload_optimizer * states_held,
        activations=tokens * (scale * per_token + logits),
        engine_weights=width * size.total / config.engine.tp,
        kv_pool=width * config.engine.max_total_tokens * size.layers * size.kv_values / kv_share,
    )


def value_bytes(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


RATES = {"tensor": 20.0, "broadcast": 10.0, "disk": 1.0, "disk_delta": 1.0}
"""GB/s assumed of a push: memory of one machine, a fast network, a shared folder (written, then read)."""


def describe_memory(config: Config, hf: HFConfig, gpu_gb: float) -> str:
    """Facts, one a line, then what will not fit a GPU of `gpu_gb` GB."""
    size = model_size(hf)
    b = budget(config, size)
    rate, pushed = RATES[config.weights.method], value_bytes(config) * size.total
    facts = [
        f"parameters           {_count(size.total)}, {_count(size.experts)} of them in routed experts",
        f"trainer, one rank    {b.trainer / GB:.3g} GB = weights {b.weights / GB:.3g} + "
        f"gradients {b.gradients / GB:.3g} + optimizer {b.optimizer / GB:.3g} + "
        f"activations about {b.activations / GB:.3g}"
        + (f"; and {_short(b.host / GB)} GB of the host's memory" if b.host else ""),
        f"engine, one rank     {b.engine / GB:.3g} GB = weights {b.engine_weights / GB:.3g} + "
        f"KV of {config.engine.max_total_tokens} tokens {b.kv_pool / GB:.3g}",
        f"a weight push        {_short(pushed / GB)} GB to each engine, about {_short(pushed / GB / rate, 2)} s "
        f"at {rate:g} GB/s ({config.weights.method})",
        f"expected staleness   {expected_staleness(config)}",
    ]
    return "\n".join([*facts, *(f"warning              {w}" for w in warnings(config, size, b, gpu_gb))])


def expected_staleness(config: Config) -> str:
    """Little's law: with k batches in flight and one leaving a step, a sample stays k steps."""
    r = config.rollout
    if r.max_staleness == 0:
        return "0: every token is of the current weights"
    overlap = config.launch.placement == "disaggregated"
    mean = min(config.over_provision - 1 + overlap, r.max_staleness)
    return f"about {mean:.2g} versions on average, at most {r.max_staleness}"


def warnings(config: Config, size: ModelSize, b: Budget, gpu_gb: float) -> list[str]:
    found = []
    for name, need in (("a trainer rank", b.trainer), ("an engine rank", b.engine)):
        if need > gpu_gb * GB:
            found.append(f"{name} needs {need / GB:.3g} GB, a GPU has {gpu_gb:g}")
    resting = b.weights + b.gradients + b.optimizer
    turns = config.launch.release_memory
    beside = 0.0 if turns else b.engine  # what an engine keeps while the trainer works
    both = max(b.trainer + beside, b.engine + resting)
    if config.launch.placement == "colocated" and both > gpu_gb * GB:
        hint = "" if turns else "; see launch.release_memory"
        found.append(f"trainer and engine on one GPU need {both / GB:.3g} GB of {gpu_gb:g}{hint}")
    if config.slots > (capacity := config.engine.count * config.engine.max_running_requests):
        found.append(f"{config.slots} samples are in flight, but the engines decode {capacity} at once")
    longest = config.rollout.max_response_tokens
    if (held := config.engine.max_total_tokens // longest) < config.engine.max_running_requests:
        found.append(
            f"the KV pool holds {held} responses of {longest} tokens, engine.max_running_requests are more"
        )
    return found


def _short(value: float, digits: int = 3) -> str:
    """Without an exponent."""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"


def _count(n: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
