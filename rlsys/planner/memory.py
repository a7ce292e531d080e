"""Estimates of a run's memory on GPUs and hosts, from the config and from config.json of the model.

- Parameter counts are exact.
- Weights, gradients, optimizer states and the KV pool follow from them.
- Activations are rough, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"): about 34 bytes per
  token, layer and hidden unit in bfloat16, for attention that stores no scores; 2 bytes for a recomputed layer. Other
  modules in `trainer.recompute` are not subtracted. `rlsys rehearse` measures the activations of the trainer's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import NamedTuple

from rlsys.config import Config
from rlsys.config.precision import logit_rows
from rlsys.convert.adapters import factors
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.planner.lengths import long_tail
from rlsys.planner.weight_update_cost import GB, describe_push, short

PROMPT_TOKENS = 2048
"""Assumed length of the longest prompt, in tokens."""
MEAN_PROMPT_TOKENS = 512
"""Assumed mean length of prompts, in tokens."""
_ACTIVATION_BYTES = 34
"""Bytes of a layer's activations per token and hidden unit in bfloat16; twice as many in float32."""
_NORM_BYTES = 8
"""Additional bytes of a layer per token and hidden unit in bfloat16 without GPUs, measured by `rlsys rehearse`: the
two norms keep their inputs in float32. If their weights are trained, they keep as many bytes of their outputs."""
_EXPERT_ACTIVATION_BYTES = 8
"""Bytes of an MoE layer per token, selected expert and intermediate unit in bfloat16: gate, up, their product, and
the input of its gradient."""
_DISPATCHED_BYTES = 18
"""Bytes of an MoE layer per token, selected expert and hidden unit in bfloat16 during recomputation and backward
pass, measured by `rlsys rehearse`: nine copies of dispatched and combined tokens and their gradients."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model. Routed experts are counted separately, because expert parallelism splits them.

    Attributes:
        hidden: Hidden size. vocab: Vocabulary size. tied: Whether embedding and head share their weights. moe_layers:
            Whether each layer is an MoE layer. attention: Parameters of each layer's attention that tensor
            parallelism splits. replicated: Parameters of each layer that tensor-parallel ranks replicate: norms, and
            down-projections of latent attention.
        ffn: Parameters of the feed-forward block of a dense layer. shared: Parameters of the shared experts of an MoE
            layer. router: Parameters of the router of an MoE layer, which tensor-parallel ranks replicate. routed:
            Parameters of all routed experts of an MoE layer. ffn_width: Number of intermediate units of a dense
            layer. active_width: Number of intermediate units of the routed experts that a token uses in an MoE layer.
            experts_per_token: Number of routed experts that a token uses. kv_values: Number of values per token in
            the KV cache of all layers. kv_heads: Number of heads over which tensor parallelism splits the KV cache;
            None if ranks replicate it (latent attention).
        delta_net: Whether layers with a gated delta net have states of requests instead of a KV cache.
        mtp: Dense and routed-expert parameters of the layer for multi-token prediction, if it is trained. All other
            fields exclude this layer.
    """

    hidden: int
    vocab: int
    tied: bool
    moe_layers: tuple[bool, ...]
    attention: tuple[int, ...]
    replicated: tuple[int, ...]
    ffn: int
    shared: int
    router: int
    routed: int
    ffn_width: int
    active_width: int
    experts_per_token: int
    kv_values: int
    kv_heads: int | None
    delta_net: bool = False
    mtp: tuple[int, int] = (0, 0)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.moe_layers)

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def experts(self) -> int:
        """Number of parameters of all routed experts."""
        return self.routed * sum(self.moe_layers)

    @property
    def dense(self) -> int:
        """Number of parameters outside of routed experts."""
        split, replicated = self.dense_of(range(self.layers))
        return split + replicated + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.experts

    def dense_of(self, layers: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of parameters of layers outside of routed experts, embedding and head.

        Args:
            layers: indices of the layers.

        Returns:
            Number of parameters that tensor parallelism splits, and number of those that its ranks replicate.
        """
        moe = sum(self.moe_layers[i] for i in layers)
        split = sum(self.attention[i] for i in layers) + moe * self.shared + (len(layers) - moe) * self.ffn
        return split, sum(self.replicated[i] for i in layers) + moe * self.router


def model_size(hf: HFConfig) -> ModelSize:
    """Count the parameters of a model from the shapes in its name table."""
    kinds = [(moe, bool(hf.linear_layers) and hf.linear_layers[i]) for i, moe in enumerate(hf.moe_layers)]
    counts = {kind: _layer(hf, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    moe_count, dense_count = (
        next((count for kind, count in counts.items() if kind[0] is moe), Counter[str]())
        for moe in (True, False)
    )
    kv_values, kv_heads = _kv_values(hf)
    return ModelSize(
        hidden=hf.hidden_size,
        vocab=hf.vocab_size,
        tied=hf.tied,
        moe_layers=hf.moe_layers,
        attention=tuple(counts[kind]["attention"] for kind in kinds),
        replicated=tuple(counts[kind]["replicated"] for kind in kinds),
        ffn=dense_count["ffn"],
        shared=moe_count["shared"],
        router=moe_count["router"],
        routed=moe_count["routed"] * hf.experts,
        ffn_width=hf.ffn_size,
        active_width=hf.experts_per_token * hf.expert_ffn_size,
        experts_per_token=hf.experts_per_token,
        kv_values=kv_values * (hf.layers - sum(hf.linear_layers)),
        kv_heads=kv_heads,
        delta_net=any(hf.linear_layers),
        mtp=_mtp_size(hf),
    )


def _mtp_size(hf: HFConfig) -> tuple[int, int]:
    """Return the numbers of dense and of routed-expert parameters of the multi-token-prediction layer.

    The layer consists of a copy of the last layer, three norms, and a projection of embedding and hidden state.
    """
    if not hf.mtp:
        return 0, 0
    layer = _layer(hf, hf.layers - 1)
    norms_and_projection = sum(
        prod(hf.shape(letters)) for rule in hf.family.mtp for letters in rule.hf.values()
    )
    routed = layer.pop("routed", 0) * hf.experts
    return norms_and_projection + sum(layer.values()), routed


def _layer(hf: HFConfig, layer: int) -> Counter[str]:
    """Count the parameters of a layer by field of ModelSize; `routed` counts a single routed expert."""
    count: Counter[str] = Counter()
    for rule in hf.rules(layer):
        if rule.per_expert:
            part = "routed"
        elif "mlp.router" in rule.megatron:
            part = "router"
        elif "shared_experts" in rule.megatron:
            part = "shared"
        elif ".mlp." in rule.megatron:
            part = "ffn"
        else:
            part = "replicated" if rule.shard_axis is None else "attention"
        count[part] += sum(prod(hf.shape(letters)) for letters in rule.hf.values())
    return count


def _kv_values(hf: HFConfig) -> tuple[int, int | None]:
    """Return the number of values per token and layer in the KV cache, and ModelSize.kv_heads."""
    if (latent := hf.latent) is not None:
        return latent.kv_rank + latent.rotary, None
    return 2 * hf.kv_heads * hf.head_dim, hf.kv_heads


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of a trainer rank and of an engine rank in bytes.

    Attributes:
        weights: Weights of the trainer rank.
        gradients: Gradients of the trainer rank.
        optimizer: Optimizer states of the trainer rank in GPU memory.
        activations: Activations of the trainer rank.
        engine_weights: Weights of the engine rank.
        pool_tokens: Number of tokens that the KV pool of an engine holds.
        token_bytes: Bytes of one token in the KV pool of the engine rank.
        graphs: Memory that SGLang reserves for the CUDA graphs of the engine rank.
        host: Optimizer states of the trainer rank in host memory.
        stage: Pipeline stage of the trainer rank.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    engine_weights: float
    pool_tokens: int
    token_bytes: float
    graphs: float
    host: float
    stage: int = 0

    @property
    def trainer(self) -> float:
        """Bytes of the trainer rank."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def idle_trainer(self) -> float:
        """Bytes of the trainer rank while engines generate."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kv_pool(self) -> float:
        """Bytes of the KV pool of the engine rank."""
        return self.pool_tokens * self.token_bytes

    @property
    def engine(self) -> float:
        """Bytes of the engine rank without CUDA graphs."""
        return self.engine_weights + self.kv_pool

    @property
    def engine_with_graphs(self) -> float:
        """Bytes of the engine rank."""
        return self.engine + self.graphs


def budget(config: Config, size: ModelSize) -> MemoryBudget:
    """Return the memory of a rank of the pipeline stage that needs most.

    Experts and tokens are assumed to be distributed evenly.
    """
    stages = [stage_budget(config, size, stage) for stage in range(config.parallel.pp)]
    largest = max(stages, key=lambda stage: stage.trainer)
    return replace(largest, pool_tokens=_pool_tokens(config, size, largest))


_DELTA_NET_POOL_SHARE = 1 / 1.9
"""Share of the KV pool in the memory of KV pool and states of gated delta nets (SGLang 0.5.23,
mamba_full_memory_ratio 0.9)."""


def _pool_tokens(config: Config, size: ModelSize, b: MemoryBudget) -> int:
    """Return the number of tokens that an engine's KV pool holds.

    The pool gets the engine's share of a GPU without the engine's weights and CUDA graphs and without the memory of a
    colocated trainer, but at most what the samples in flight need. A colocated trainer has weights, gradients and
    optimizer states in memory while engines generate. If engines do not release the pool while the trainer works, the
    activations are subtracted, too.
    """
    if (tokens := config.fixed_pool_tokens) is not None:
        return tokens
    available = config.engine.memory_fraction * config.launch.gpu_memory_gb * GB - b.engine_weights - b.graphs
    if config.launch.placement == "colocated":
        available -= b.idle_trainer if config.launch.release_memory else b.trainer
    if size.delta_net:
        available *= _DELTA_NET_POOL_SHARE
    longest = PROMPT_TOKENS + config.rollout.max_response_tokens
    tokens = min(int(max(0.0, available) / b.token_bytes), engine_samples(config) * longest)
    return tokens // 1024 * 1024


def engine_samples(config: Config) -> int:
    """Return the number of samples in flight that an engine may decode at once."""
    return min(config.max_running_requests, -(-config.slots // config.engine.writers))


def samples_held(config: Config, pool_tokens: int) -> int:
    """Return the number of an engine's samples in flight that a KV pool holds, by their mean length in flight."""
    return min(engine_samples(config), _pool_samples(config, pool_tokens))


def _pool_samples(config: Config, pool_tokens: int) -> int:
    """Return the number of samples with the mean length in flight that a KV pool holds."""
    longest = config.rollout.max_response_tokens
    prompt = min(MEAN_PROMPT_TOKENS, longest // 4)  # tasks with short responses have short prompts
    return int(pool_tokens / (prompt + long_tail(longest).in_flight))


def with_pool(config: Config) -> Config:
    """Return the config with the estimated tokens of its KV pool in engine.max_total_tokens.

    The config does not change if it sets the size, or if the model's folder does not exist.
    """
    if config.fixed_pool_tokens is not None or not (config.model.path / "config.json").is_file():
        return config
    tokens = budget(config, model_size(HFConfig.read(config.model.path))).pool_tokens
    engine = config.engine.model_copy(update={"max_total_tokens": tokens or None})
    return config.model_copy(update={"engine": engine})


def stage_budget(config: Config, size: ModelSize, stage: int) -> MemoryBudget:
    """Return the memory of a rank of a pipeline stage, without the size of the KV pool.

    The first stage has the embedding and most micro-batches in flight; the last stage has the head and the logits.
    """
    width = value_bytes(config)
    layers = _layers_of(config, size, stage)
    moe = sum(size.moe_layers[i] for i in layers)
    dense, experts = _rank_parameters(config, size, stage)
    trained_dense, trained_experts, adapters = dense, experts, 0.0
    if config.trainer.lora is not None:
        all_sizes = _adapter_sizes(config)
        adapter_sizes = [all_sizes[i] for i in layers]
        trained_dense = sum(layer.dense for layer in adapter_sizes)
        trained_experts = sum(layer.experts for layer in adapter_sizes) / config.parallel.ep
        adapters = trained_dense + trained_experts
    optimizer = _optimizer_bytes(config, size, layers, trained_dense, trained_experts)
    engine_tp = config.engine.tps[0]  # the smallest engines have most per GPU
    kv_share = 1 if size.kv_heads is None else min(engine_tp, size.kv_heads)
    return MemoryBudget(
        weights=width * (dense + experts + adapters + _teacher_parameters(config, stage)),
        gradients=4.0 * (trained_dense + trained_experts),
        optimizer=(1 - config.trainer.offload_optimizer) * optimizer,
        host=config.trainer.offload_optimizer * optimizer,
        activations=_activations(config, size, stage, len(layers), moe),
        engine_weights=width * size.total / engine_tp,
        pool_tokens=0,
        token_bytes=width * size.kv_values / kv_share,
        graphs=_graphs(config, size, engine_tp) if config.launch.gpus_per_node else 0.0,
        stage=stage,
    )


def _optimizer_bytes(
    config: Config, size: ModelSize, layers: Sequence[int], dense: float, experts: float
) -> float:
    """Return the bytes of a rank's optimizer states.

    Args:
        config: config of the run.
        size: the model.
        layers: layers of the rank.
        dense: number of trained parameters of the rank outside of routed experts.
        experts: number of trained parameters of the rank in routed experts.
    """
    p = config.parallel
    copies = p.data_parallel * p.cp
    expert_copies = max(1, p.world_size // (p.pp * p.ep * p.expert_tp))
    per_parameter = 8 if value_bytes(config) == 4 else 12  # two moments; for bfloat16 also float32 weights
    per_matrix = per_parameter - 4 * (config.trainer.optimizer == "muon")  # Muon has one moment
    matrices = 0.0 if config.trainer.lora is not None else size.dense_of(layers)[0] / p.tp
    return per_parameter * (dense - matrices) / copies + per_matrix * (
        matrices / copies + experts / expert_copies
    )


def _teacher_parameters(config: Config, stage: int) -> float:
    """Return the number of parameters of the teachers that a rank of a pipeline stage holds."""
    teacher = config.algo.teacher
    if teacher is None or teacher.engine is not None:
        return 0.0
    folders = set(teacher.folders.values())
    return sum(sum(_rank_parameters(config, model_size(HFConfig.read(folder)), stage)) for folder in folders)


_DECODE_GRAPH_BYTES = 2 * 2**20
"""Bytes of the decode graphs per sequence of the largest batch (SGLang 0.5.23, arg_groups/memory_hook.py)."""
_PREFILL_GRAPH_BYTES = 8 * 2**20
"""Bytes of a prefill graph (same source)."""
_LATENT_GRAPH_BYTES = 1.5 * 2**30
"""Bytes of all prefill graphs with latent attention (same source)."""
_PREFILL_SHAPES = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (8192, 512))
"""(number of tokens, step): up to this number of tokens, SGLang captures a prefill graph for each multiple of
step."""


def _graphs(config: Config, size: ModelSize, tp: int) -> float:
    """Return the bytes of the CUDA graphs of a rank of an engine with tensor-parallel size `tp`."""
    decoded = min(config.max_running_requests, 256 if tp < 4 else 512)
    if size.kv_heads is None:
        return decoded * _DECODE_GRAPH_BYTES + _LATENT_GRAPH_BYTES
    shapes = 0
    start = 0
    for end, step in _PREFILL_SHAPES:
        shapes += max(0, min(end, config.prefill_graph_tokens) - start) // step
        start = end
    return decoded * _DECODE_GRAPH_BYTES + shapes * _PREFILL_GRAPH_BYTES


class AdapterSize(NamedTuple):
    """Numbers of a layer's adapter parameters outside of and in routed experts, without tensor parallelism."""

    dense: int
    experts: int


def _adapter_sizes(config: Config) -> list[AdapterSize]:
    """Return the size of each layer's adapters."""
    assert config.trainer.lora is not None
    hf = HFConfig.read(config.model.path)
    counts = [[0, 0] for _ in range(hf.layers)]
    for entry in factors(hf, config.trainer.lora):
        assert entry.layer is not None
        counts[entry.layer][entry.expert is not None] += entry.elements
    return [AdapterSize(*layer_counts) for layer_counts in counts]


def _rank_parameters(config: Config, size: ModelSize, stage: int) -> tuple[float, float]:
    """Return the numbers of parameters of a rank outside of and in routed experts."""
    p, layers = config.parallel, _layers_of(config, size, stage)
    embedding_and_head = size.embedding * ((stage == 0) + (stage == p.pp - 1))
    if p.pp == 1 and size.tied:
        embedding_and_head = size.embedding
    split, replicated = size.dense_of(layers)
    dense = (split + embedding_and_head) / p.tp + replicated + (size.hidden if stage == p.pp - 1 else 0)
    routed = size.routed * sum(size.moe_layers[i] for i in layers)
    if stage == p.pp - 1 and any(size.mtp):  # with a copy of the embedding if the first stage has it
        dense += (size.mtp[0] + size.embedding * (p.pp > 1)) / p.tp
        routed += size.mtp[1]
    return dense, routed / (p.ep * p.expert_tp)


def _layers_of(config: Config, size: ModelSize, stage: int) -> list[int]:
    """Return the indices of the layers of a pipeline stage."""
    p = config.parallel
    return [i for i, s in enumerate(layer_stages(size.layers, p.pp, p.vpp)) if s == stage]


def _activations(config: Config, size: ModelSize, stage: int, layers: int, moe: int) -> float:
    """Return the bytes of a rank's activations, which are those of the micro-batches in flight.

    Stage s has pp - s micro-batches in flight, and more chunks of layers with an interleaved schedule.

    Args:
        config: config of the run.
        size: the model.
        stage: pipeline stage.
        layers: number of layers of the stage.
        moe: number of MoE layers among them.
    """
    p = config.parallel
    tokens = config.trainer.token_budget / p.cp / p.tp  # sequence parallelism splits all other activations
    chunks = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    in_flight = chunks * layers / p.vpp if p.vpp > 1 else (p.pp - stage) * layers
    widest = max(size.active_width if moe else 0, size.ffn_width if moe < layers else 0)
    layer = _ACTIVATION_BYTES * size.hidden + _EXPERT_ACTIVATION_BYTES * widest
    if value_bytes(config) == 2 and not config.launch.gpus_per_node:
        layer += _NORM_BYTES * size.hidden * (1 if config.trainer.lora else 2)
    dispatched = _DISPATCHED_BYTES * size.experts_per_token * size.hidden if moe else 0
    if "layer" in config.trainer.recompute:  # layers store their inputs, and one layer at a time everything
        stored_units, working = in_flight * 2 * size.hidden, layer + dispatched
    else:
        stored_units, working = in_flight * layer, dispatched
    scale = value_bytes(config) / 2
    if stage < p.pp - 1:
        return tokens * scale * (stored_units + working)
    # Logits are freed before the last layer is recomputed. A scoring pass stores no layers.
    training, scoring = _output_layer(config, size)
    return max(tokens * scale * stored_units + max(tokens * scale * working, training), scoring)


def _output_layer(config: Config, size: ModelSize) -> tuple[float, float]:
    """Return the peak bytes of the output layer in a training pass and in a scoring pass.

    A training pass has the logits in float32 and in the model's dtype, a scoring pass has two copies in float32. If
    logits are computed for some rows at a time (rlsys.trainer.model.output_layer), the hidden states, their gradient
    and the gradient of the weight are in memory, too. Fused accumulation of this gradient, which depends on installed
    packages, would need less.
    """
    p, width = config.parallel, value_bytes(config)
    rows, columns = config.trainer.token_budget / p.cp, size.vocab / p.tp
    elements = min(rows, logit_rows(ceil(columns))) * columns
    training, scoring = (width + 4) * elements, 8 * elements
    if elements < rows * columns:
        states = width * rows * size.hidden
        weight = (width + 4) * columns * size.hidden
        training += 2 * states + weight * (config.trainer.lora is None)
        scoring += states
    return training, scoring


_CHECKPOINT_BYTES = 2 * 12
"""Host memory per parameter while a checkpoint is written: float32 weight and two moments, gathered on the first
data-parallel rank (Megatron's fully_reshardable, mem_efficient), and a copy of them for the writing thread."""


def checkpoint_host(config: Config, size: ModelSize) -> float:
    """Return the bytes of host memory that writing a checkpoint takes on the node that needs most.

    Megatron numbers ranks by pipeline stage. The first tp ranks of a stage gather its dense parameters, and the first
    ep * etp ranks gather its experts.
    """
    p = config.parallel
    ranks_per_stage, ranks_per_node = p.world_size // p.pp, config.launch.gpus_per_node or p.world_size
    bytes_per_parameter = _CHECKPOINT_BYTES + value_bytes(config)
    dense, experts = size.dense + size.mtp[0], size.experts + size.mtp[1]
    if config.trainer.lora is not None:
        adapter_sizes = _adapter_sizes(config)
        dense = sum(layer.dense for layer in adapter_sizes)
        experts = sum(layer.experts for layer in adapter_sizes)
    node_bytes: dict[int, float] = {}
    for stage in range(p.pp):
        for gathering_ranks, parameters in ((p.tp, dense), (p.ep * p.expert_tp, experts)):
            first = stage * ranks_per_stage
            for rank in range(first, first + gathering_ranks):
                share = bytes_per_parameter * parameters / p.pp / gathering_ranks
                node = rank // ranks_per_node
                node_bytes[node] = node_bytes.get(node, 0.0) + share
    return max(node_bytes.values())


def value_bytes(config: Config) -> int:
    """Return the bytes of a parameter in the model's dtype."""
    return 4 if config.model.dtype == "float32" else 2


Fact = tuple[str, str]
"""Name and description of a property of a run, for `rlsys explain`."""


def describe_memory(config: Config, hf: HFConfig) -> list[Fact]:
    """Describe the memory of a run for `rlsys explain`."""
    size = model_size(hf)
    b = budget(config, size)
    on_host = (config.launch.gpus_per_node or config.parallel.world_size) * b.host
    return [
        ("parameters", f"{_count(size.total)}, {_count(size.experts)} of them in routed experts"),
        *_describe_adapters(config),
        *_describe_mtp(config, size),
        (
            "trainer, one rank",
            f"{b.trainer / GB:.3g} GB = weights {b.weights / GB:.3g} + "
            f"gradients {b.gradients / GB:.3g} + optimizer {b.optimizer / GB:.3g} + "
            f"activations about {b.activations / GB:.3g}"
            + (f"; and {short(b.host / GB)} GB of the host's memory" if b.host else ""),
        ),
        (
            "engine, one rank",
            f"{b.engine_with_graphs / GB:.3g} GB = weights {b.engine_weights / GB:.3g} + "
            f"KV of {b.pool_tokens} tokens {b.kv_pool / GB:.3g}"
            + (f" + CUDA graphs about {b.graphs / GB:.2g}" if b.graphs else ""),
        ),
        *describe_push(config, hf, value_bytes(config) * _pushed(config, size)),
        (
            "a checkpoint",
            f"about {short(checkpoint_host(config, size) / GB)} GB of a node's host memory while "
            "it is written" + (f", beside {short(on_host / GB)} GB of the optimizer" if on_host else ""),
        ),
        ("expected staleness", expected_staleness(config)),
    ]


def _describe_mtp(config: Config, size: ModelSize) -> list[Fact]:
    """Describe the layer for multi-token prediction; no fact if it is not trained."""
    if not any(size.mtp):
        return []
    usage = (
        "pushed to engines, which draft with it" if config.engine.drafts_with_model else "not in the engines"
    )
    return [("multi-token prediction", f"{_count(sum(size.mtp))} more parameters, trained, {usage}")]


def _pushed(config: Config, size: ModelSize) -> int:
    """Return the number of parameters that an engine receives in a push."""
    if config.weights.method != "adapter":
        return size.total
    return sum(f.dense + f.experts for f in _adapter_sizes(config))


def _describe_adapters(config: Config) -> list[Fact]:
    """Describe the adapters; no fact without them."""
    if (lora := config.trainer.lora) is None:
        return []
    trained = sum(f.dense + f.experts for f in _adapter_sizes(config))
    return [("trained", f"{_count(trained)}, adapters of rank {lora.rank}; the model stays as it is")]


def expected_staleness(config: Config) -> str:
    """Describe the expected staleness of tokens by Little's law.

    With k batches in flight, of which each step trains one, a sample is in flight for k steps.
    """
    r = config.rollout
    if r.max_staleness == 0:
        return "0: the current weights sample every token"
    overlap = config.launch.placement == "disaggregated"
    mean = min(config.over_provision - 1 + overlap, r.max_staleness)
    return f"about {mean:.2g} train steps on average, at most {r.max_staleness}"


TRAINER_FACTS = ("parameters", "trainer, one rank", "a checkpoint")
"""Names of the facts of `describe_memory` that apply to runs without engines."""


def trainer_memory_problems(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """Return a line if a trainer rank needs more memory than a GPU of `gpu_gb` GB has, else no line."""
    need = budget(config, model_size(hf)).trainer
    if need <= gpu_gb * GB:
        return []
    return [f"a trainer rank needs {need / GB:.3g} GB, a GPU has {gpu_gb:g} GB"]


def memory_problems(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """Return a line for each part of a run that needs more memory than a GPU of `gpu_gb` GB has."""
    b = budget(config, model_size(hf))
    problems = []
    for name, need in (("a trainer rank", b.trainer), ("an engine rank", b.engine_with_graphs)):
        if need > gpu_gb * GB:
            problems.append(f"{name} needs {need / GB:.3g} GB, a GPU has {gpu_gb:g} GB")
    releases_memory = config.launch.release_memory
    idle_engine = 0.0 if releases_memory else b.engine_with_graphs
    both = max(b.trainer + idle_engine, b.engine_with_graphs + b.idle_trainer)
    if config.launch.placement == "colocated" and both > gpu_gb * GB:
        hint = "" if releases_memory else "; see launch.release_memory"
        problems.append(f"trainer and engine on one GPU need {both / GB:.3g} GB, it has {gpu_gb:g} GB{hint}")
    if not problems and b.pool_tokens < config.rollout.max_response_tokens:
        problems.append(
            f"beside weights and trainer, the KV pool of an engine holds {b.pool_tokens} tokens; expected at least "
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens}"
        )
    return problems


def size_warnings(config: Config, hf: HFConfig) -> list[str]:
    """Return a line for each limit due to which samples in flight wait instead of being decoded.

    The limits are engine.max_running_requests and the KV pool.
    """
    warnings = []
    pool_tokens = budget(config, model_size(hf)).pool_tokens
    held_samples, in_flight = samples_held(config, pool_tokens), engine_samples(config)
    limit, capacity = config.max_running_requests, _pool_samples(config, pool_tokens)
    if config.slots > config.engine.writers * limit and capacity > limit:
        warnings.append(
            f"{config.slots} samples are in flight, but the engines decode {config.engine.writers * limit} at once; "
            f"the KV pool of an engine would hold {capacity}"
        )
    if held_samples < in_flight:
        warnings.append(
            f"the KV pool of an engine holds about {held_samples} responses of a long-tailed length distribution; "
            f"expected {in_flight}, the number of its samples in flight"
        )
    return warnings


def _count(n: int) -> str:
    """Format a number with three digits and the unit k, M or B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
