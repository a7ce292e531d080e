"""What a model and a layout need: parameters, memory of one GPU, bytes of a push. Estimates, from config.json alone.

Exact: parameter counts (tested against a model's files). By formula: weights, gradients, optimizer, KV pool.
Rough: activations, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"), without recomputation:
about 34 bytes a token, layer and hidden unit in bfloat16, with attention that stores no scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.config import Config

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


def model_size(hf: dict[str, Any]) -> ModelSize:
    """Of a decoder with grouped-query or latent attention (MLA), dense or with experts; `hf` is its config.json."""
    h, layers, vocab = hf["hidden_size"], hf["num_hidden_layers"], hf["vocab_size"]
    experts = hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts") or 0
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    dense_layers = min(layers, hf.get("first_k_dense_replace") or len(hf.get("mlp_only_layers") or []))
    moe_layers = layers - dense_layers if experts else 0
    shared = hf.get("n_shared_experts") or 0
    biases = experts if hf.get("topk_method") == "noaux_tc" else 0  # one a routed expert, for balance
    attention, kv_values, kv_heads = _attention(hf)
    dense = vocab * h * (1 if hf.get("tie_word_embeddings") else 2) + h
    dense += layers * (attention + 2 * h)
    dense += (layers - moe_layers) * 3 * h * hf["intermediate_size"]
    dense += moe_layers * (experts * h + biases + 3 * h * width * shared)
    chosen = hf.get("num_experts_per_tok", 0) * width if experts else hf["intermediate_size"]
    routed = moe_layers * experts * 3 * h * width
    return ModelSize(layers, h, vocab, dense, routed, chosen, kv_values, kv_heads)


def _attention(hf: dict[str, Any]) -> tuple[int, int, int | None]:
    """Parameters of one layer's attention, numbers cached for a token, heads that the cache is divided by."""
    h, heads = hf["hidden_size"], hf["num_attention_heads"]
    if rank := hf.get("kv_lora_rank"):
        nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
        query = heads * (nope + rope)
        q_rank = hf.get("q_lora_rank")
        queries = q_rank * (h + query + 1) if q_rank else h * query
        return (
            queries + h * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * h,
            rank + rope,
            None,
        )
    groups = hf.get("num_key_value_heads") or heads
    size = hf.get("head_dim") or h // heads
    normed = hf.get("model_type") in ("qwen3", "qwen3_moe") or hf.get("use_qk_norm")
    biased = hf.get("attention_bias") or hf.get("model_type") in ("qwen2", "qwen2_moe")
    weights = 2 * h * size * (heads + groups) + (2 * size if normed else 0)
    return weights + (size * (heads + 2 * groups) if biased else 0), 2 * groups * size, groups


@dataclass(frozen=True)
class Budget:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    engine_weights: float
    kv_pool: float

    @property
    def trainer(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def engine(self) -> float:
        return self.engine_weights + self.kv_pool


def budget(config: Config, size: ModelSize) -> Budget:
    """Of the fullest kind of rank, with layers, embeddings and experts divided evenly."""
    p, width = config.parallel, value_bytes(config)
    dense = size.dense / (p.tp * p.pp)
    experts = size.experts / (p.ep * p.expert_tp * p.pp)
    expert_copies = max(1, p.world_size // (p.pp * p.ep * p.expert_tp))
    states = 8 if width == 4 else 12  # two moments, and float32 weights beside bfloat16 ones
    tokens = (
        config.trainer.token_budget / p.cp / p.tp
    )  # sequence parallelism divides what is not already divided
    scale = width / 2
    per_token = (
        size.layers / p.pp * (_ACTIVATION_BYTES * size.hidden + _EXPERT_ACTIVATION_BYTES * size.chosen_width)
    )
    logits = 2 * 4 * size.vocab  # and their gradient, float32
    kv_share = 1 if size.kv_heads is None else min(config.engine.tp, size.kv_heads)
    return Budget(
        weights=width * (dense + experts),
        gradients=4.0 * (dense + experts),
        optimizer=states * (dense / (p.data_parallel * p.cp) + experts / expert_copies),
        activations=tokens * (scale * per_token + logits),
        engine_weights=width * size.total / config.engine.tp,
        kv_pool=width * config.engine.max_total_tokens * size.layers * size.kv_values / kv_share,
    )


def value_bytes(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


RATES = {"tensor": 20.0, "broadcast": 10.0, "disk": 1.0, "disk_delta": 1.0}
"""GB/s assumed of a push: memory of one machine, a fast network, a shared folder (written, then read)."""


def describe_memory(config: Config, hf: dict[str, Any], gpu_gb: float) -> str:
    """Facts, one a line, then what will not fit a GPU of `gpu_gb` GB."""
    size = model_size(hf)
    b = budget(config, size)
    rate, pushed = RATES[config.weights.method], value_bytes(config) * size.total
    facts = [
        f"parameters           {_count(size.total)}, {_count(size.experts)} of them in routed experts",
        f"trainer, one rank    {b.trainer / GB:.3g} GB = weights {b.weights / GB:.3g} + "
        f"gradients {b.gradients / GB:.3g} + optimizer {b.optimizer / GB:.3g} + "
        f"activations about {b.activations / GB:.3g}",
        f"engine, one rank     {b.engine / GB:.3g} GB = weights {b.engine_weights / GB:.3g} + "
        f"KV of {config.engine.max_total_tokens} tokens {b.kv_pool / GB:.3g}",
        f"a weight push        {pushed / GB:.3g} GB to each engine, about {pushed / GB / rate:.2g} s "
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
    both = max(b.trainer + b.engine_weights, b.engine + resting)
    if config.launch.placement == "colocated" and both > gpu_gb * GB:
        found.append(
            f"trainer and engine on one GPU need {both / GB:.3g} GB of {gpu_gb:g}, unless they take turns"
        )
    if config.slots > (capacity := config.engine.count * config.engine.max_running_requests):
        found.append(f"{config.slots} samples are in flight, but the engines decode {capacity} at once")
    longest = config.rollout.max_response_tokens
    if (held := config.engine.max_total_tokens // longest) < config.engine.max_running_requests:
        found.append(
            f"the KV pool holds {held} responses of {longest} tokens, engine.max_running_requests are more"
        )
    return found


def _count(n: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
