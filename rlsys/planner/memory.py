"""Memory of a model and a layout: parameters, memory of one GPU, bytes of a push. Estimates, from config.json only.

Exact: parameter counts (tested against a model's files). By formula: weights, gradients, optimizer, KV pool.
Rough: activations, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"): about 34 bytes per
token, layer and hidden unit in bfloat16, with attention that stores no scores; recomputed layers keep 2.
Modules in `trainer.recompute` are not subtracted. `rlsys rehearse` counts what the trainer's code keeps.
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

PROMPT_TOKENS, MEAN_PROMPT_TOKENS = 2048, 512
"""Assumed length of the longest prompt, and of all prompts on average."""
_ACTIVATION_BYTES = 34
"""Bytes of activations per token and hidden unit of a layer in bfloat16; twice as many in float32."""
_NORM_BYTES = 8
"""Bytes per token and hidden unit of a layer in bfloat16 without GPUs: its two norms keep their input in float32, and
as much of their output if their weights are trained; counted by `rlsys rehearse`."""
_EXPERT_ACTIVATION_BYTES = 8
"""Bytes per token, selected expert and intermediate unit in bfloat16: gate, up, their product, and its gradient's
input."""
_SENT_BYTES = 18
"""Bytes per token, selected expert and hidden unit in bfloat16: nine copies of dispatched and combined tokens, and
their gradients, during recomputation and backward of one layer; counted by `rlsys rehearse`."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model. Experts are routed ones, which expert parallelism splits; dense is all else."""

    hidden: int
    vocab: int
    tied: bool
    moe_layers: tuple[bool, ...]
    attention: tuple[int, ...]
    """Parameters of each layer's attention that tensor parallelism splits."""
    replicated: tuple[int, ...]
    """Parameters of each layer that tensor-parallel ranks replicate: norms, down-projections of latent attention."""
    ffn: int
    """Parameters of the feed-forward block of a dense layer."""
    shared: int
    """Shared experts of an MoE layer."""
    router: int
    """Router of an MoE layer; tensor-parallel ranks replicate it."""
    routed: int
    """All routed experts of an MoE layer."""
    ffn_width: int
    active_width: int
    """Intermediate units that a token uses in a dense layer, and in the routed experts of an MoE layer."""
    experts_per_token: int
    """Experts that a token is routed to."""
    kv_values: int
    """Values per token in the KV cache of all layers."""
    kv_heads: int | None
    """Heads over which tensor parallelism splits the cache; None: replicated (latent attention)."""
    delta_net: bool = False
    """Whether layers with a gated delta net keep states of requests in place of a KV cache."""
    mtp: tuple[int, int] = (0, 0)
    """Dense and routed-expert parameters of the layer for multi-token prediction, if it is trained; not included
    above."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.moe_layers)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return self.routed * sum(self.moe_layers)

    @property
    def dense(self) -> int:
        """Number of parameters outside routed experts."""
        split, replicated = self.dense_of(range(self.layers))
        return split + replicated + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.experts

    def dense_of(self, layers: Sequence[int]) -> tuple[int, int]:
        """Return the dense parameters of layers, without embedding and head.

        Returns:
            Parameters that tensor parallelism splits, and those that it replicates.
        """
        moe = sum(self.moe_layers[i] for i in layers)
        split = sum(self.attention[i] for i in layers) + moe * self.shared + (len(layers) - moe) * self.ffn
        return split, sum(self.replicated[i] for i in layers) + moe * self.router


def model_size(hf: HFConfig) -> ModelSize:
    """Count parameters from the name table, with one layer of each kind."""
    kinds = [(moe, bool(hf.linear_layers) and hf.linear_layers[i]) for i, moe in enumerate(hf.moe_layers)]
    counts = {kind: _layer(hf, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    of_moe, of_dense = (
        next((count for kind, count in counts.items() if kind[0] is moe), Counter[str]())
        for moe in (True, False)
    )
    kv_values, kv_heads = _cache(hf)
    return ModelSize(
        hidden=hf.hidden_size,
        vocab=hf.vocab_size,
        tied=hf.tied,
        moe_layers=hf.moe_layers,
        attention=tuple(counts[kind]["attention"] for kind in kinds),
        replicated=tuple(counts[kind]["replicated"] for kind in kinds),
        ffn=of_dense["ffn"],
        shared=of_moe["shared"],
        router=of_moe["router"],
        routed=of_moe["routed"] * hf.experts,
        ffn_width=hf.ffn_size,
        active_width=hf.experts_per_token * hf.expert_ffn_size,
        experts_per_token=hf.experts_per_token,
        kv_values=kv_values * (hf.layers - sum(hf.linear_layers)),
        kv_heads=kv_heads,
        delta_net=any(hf.linear_layers),
        mtp=_mtp_size(hf),
    )


def _mtp_size(hf: HFConfig) -> tuple[int, int]:
    """Return the size of the multi-token-prediction layer: dense parameters, and those of routed experts.

    It consists of a layer like the last one, three norms, and the projection of embedding and hidden state.
    """
    if not hf.mtp:
        return 0, 0
    layer = _layer(hf, hf.layers - 1)
    others_count = sum(prod(hf.shape(letters)) for rule in hf.family.mtp for letters in rule.hf.values())
    routed = layer.pop("routed", 0) * hf.experts
    return others_count + sum(layer.values()), routed


def _layer(hf: HFConfig, layer: int) -> Counter[str]:
    """Count the parameters of one layer by the fields of ModelSize; of one routed expert."""
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


def _cache(hf: HFConfig) -> tuple[int, int | None]:
    """Return the cached values per token and layer, and the number of heads that split them."""
    if (latent := hf.latent) is not None:
        return latent.kv_rank + latent.rotary, None
    return 2 * hf.kv_heads * hf.head_dim, hf.kv_heads


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    engine_weights: float
    pool_tokens: int
    """Tokens in the KV pool of an engine."""
    token_bytes: float
    """Bytes of one token in the pool of an engine rank."""
    graphs: float
    """An engine's CUDA graphs, as SGLang reserves memory for them."""
    host: float
    """Optimizer states in host memory."""
    stage: int = 0
    """The pipeline stage of the rank."""

    @property
    def trainer(self) -> float:
        """Bytes of a trainer rank."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def idle_trainer(self) -> float:
        """Bytes of a trainer rank while engines generate."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kv_pool(self) -> float:
        """Bytes of the KV pool of an engine rank."""
        return self.pool_tokens * self.token_bytes

    @property
    def engine(self) -> float:
        """Bytes of an engine rank without CUDA graphs."""
        return self.engine_weights + self.kv_pool

    @property
    def engine_with_graphs(self) -> float:
        """Bytes of an engine rank."""
        return self.engine + self.graphs


def budget(config: Config, size: ModelSize) -> MemoryBudget:
    """Return the memory of a rank of the largest pipeline stage, with experts and tokens evenly distributed."""
    stages = [stage_budget(config, size, s) for s in range(config.parallel.pp)]
    b = max(stages, key=lambda b: b.trainer)
    return replace(b, pool_tokens=_pool_tokens(config, size, b))


_POOL_OF_DELTA_NET = 1 / 1.9
"""Share of the KV pool beside the states of gated delta nets (SGLang 0.5.23, mamba_full_memory_ratio 0.9)."""


def _pool_tokens(config: Config, size: ModelSize, b: MemoryBudget) -> int:
    """Return the tokens in an engine's KV pool: a share of what remains, and at most what the samples in flight need.

    While engines generate, a colocated trainer keeps its weights, gradients and optimizer; activations, too, if
    engines do not release the pool while it works.
    """
    if (tokens := config.fixed_pool_tokens) is not None:
        return tokens
    available = config.engine.memory_fraction * config.launch.gpu_memory_gb * GB - b.engine_weights - b.graphs
    if config.launch.placement == "colocated":
        available -= b.idle_trainer if config.launch.release_memory else b.trainer
    if size.delta_net:
        available *= _POOL_OF_DELTA_NET
    longest = PROMPT_TOKENS + config.rollout.max_response_tokens
    tokens = min(int(max(0.0, available) / b.token_bytes), engine_samples(config) * longest)
    return tokens // 1024 * 1024


def engine_samples(config: Config) -> int:
    """Return the samples that one engine has in flight and may decode at once."""
    return min(config.max_running_requests, -(-config.slots // config.engine.writers))


def samples_held(config: Config, pool_tokens: int) -> int:
    """Return the samples of an engine that a KV pool holds, with the lengths that they have on average in flight."""
    return min(engine_samples(config), _pool_samples(config, pool_tokens))


def _pool_samples(config: Config, pool_tokens: int) -> int:
    longest = config.rollout.max_response_tokens
    prompt = min(MEAN_PROMPT_TOKENS, longest // 4)  # tasks with short responses have short prompts
    return int(pool_tokens / (prompt + long_tail(longest).in_flight))


def with_pool(config: Config) -> Config:
    """Return the config with the tokens of its KV pool, if the model's folder exists and memory suffices for a
    pool."""
    if config.fixed_pool_tokens is not None or not (config.model.path / "config.json").is_file():
        return config
    tokens = budget(config, model_size(HFConfig.read(config.model.path))).pool_tokens
    engine = config.engine.model_copy(update={"max_total_tokens": tokens or None})
    return config.model_copy(update={"engine": engine})


def stage_budget(config: Config, size: ModelSize, stage: int) -> MemoryBudget:
    """Return the memory of a rank of a stage.

    The first stage has the embedding and most micro-batches in flight, the last one the head and its logits.
    """
    p, width = config.parallel, value_bytes(config)
    layers = _layers_of(config, size, stage)
    moe = sum(size.moe_layers[i] for i in layers)
    dense, experts = _rank_parameters(config, size, stage)
    expert_copies = max(1, p.world_size // (p.pp * p.ep * p.expert_tp))
    states = 8 if width == 4 else 12  # two moments, and float32 weights in addition to bfloat16 ones
    per_matrix = states - 4 * (config.trainer.optimizer == "muon")  # Muon has one moment
    copies = p.data_parallel * p.cp
    matrices = size.dense_of(layers)[0] / p.tp
    trained, of_experts, adapters = dense, experts, 0.0
    if config.trainer.lora is not None:
        layer_factors = _adapter_sizes(config)
        stage_factors = [layer_factors[i] for i in layers]
        trained, of_experts = (
            sum(f.dense for f in stage_factors),
            sum(f.experts for f in stage_factors) / p.ep,
        )
        adapters = trained + of_experts
        matrices = 0.0
    states_held = states * (trained - matrices) / copies + per_matrix * (
        matrices / copies + of_experts / expert_copies
    )
    engine_tp = config.engine.tps[0]  # the smallest engines have most per GPU
    kv_share = 1 if size.kv_heads is None else min(engine_tp, size.kv_heads)
    teacher_parameters = 0.0
    if config.algo.teacher is not None and config.algo.teacher.engine is None:
        folders = set(config.algo.teacher.folders.values())
        teacher_parameters = sum(
            sum(_rank_parameters(config, model_size(HFConfig.read(folder)), stage)) for folder in folders
        )
    return MemoryBudget(
        weights=width * (dense + experts + adapters + teacher_parameters),
        gradients=4.0 * (trained + of_experts),
        optimizer=(1 - config.trainer.offload_optimizer) * states_held,
        host=config.trainer.offload_optimizer * states_held,
        activations=_activations(config, size, stage, len(layers), moe),
        engine_weights=width * size.total / engine_tp,
        pool_tokens=0,
        token_bytes=width * size.kv_values / kv_share,
        graphs=_graphs(config, size, engine_tp) if config.launch.gpus_per_node else 0.0,
        stage=stage,
    )


_DECODE_GRAPH, _PREFILL_GRAPH, _LATENT_GRAPHS = 2 * 2**20, 8 * 2**20, 1.5 * 2**30
"""Bytes per decoded sequence, per prefill graph, and of all prefill graphs with latent attention (SGLang 0.5.23,
arg_groups/memory_hook.py)."""
_PREFILL_SHAPES = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (8192, 512))
"""SGLang captures prefill graphs up to this number of tokens -> in steps of this size."""


def _graphs(config: Config, size: ModelSize, tp: int) -> float:
    decoded = min(config.max_running_requests, 256 if tp < 4 else 512)
    shapes, start = 0, 0
    for end, step in _PREFILL_SHAPES:
        shapes += max(0, min(end, config.prefill_graph_tokens) - start) // step
        start = end
    return decoded * _DECODE_GRAPH + (_LATENT_GRAPHS if size.kv_heads is None else shapes * _PREFILL_GRAPH)


class AdapterSize(NamedTuple):
    """Adapter parameters of a layer, without tensor parallelism."""

    dense: int
    experts: int


def _adapter_sizes(config: Config) -> list[AdapterSize]:
    """Return the adapter parameters of each layer."""
    assert config.trainer.lora is not None
    hf = HFConfig.read(config.model.path)
    counts = [[0, 0] for _ in range(hf.layers)]
    for entry in factors(hf, config.trainer.lora):
        assert entry.layer is not None
        counts[entry.layer][entry.expert is not None] += entry.elements
    return [AdapterSize(*layer_counts) for layer_counts in counts]


def _rank_parameters(config: Config, size: ModelSize, stage: int) -> tuple[float, float]:
    """Return the number of parameters of one rank: dense ones, and those of routed experts."""
    p, layers = config.parallel, _layers_of(config, size, stage)
    ends = size.embedding * ((stage == 0) + (stage == p.pp - 1))
    if p.pp == 1 and size.tied:
        ends = size.embedding
    split, replicated = size.dense_of(layers)
    dense = (split + ends) / p.tp + replicated + (size.hidden if stage == p.pp - 1 else 0)
    routed = size.routed * sum(size.moe_layers[i] for i in layers)
    if stage == p.pp - 1 and any(size.mtp):  # with a copy of the embedding if the first stage has it
        dense += (size.mtp[0] + size.embedding * (p.pp > 1)) / p.tp
        routed += size.mtp[1]
    return dense, routed / (p.ep * p.expert_tp)


def _layers_of(config: Config, size: ModelSize, stage: int) -> list[int]:
    """Return the layers of a stage."""
    p = config.parallel
    return [i for i, at in enumerate(layer_stages(size.layers, p.pp, p.vpp)) if at == stage]


def _activations(config: Config, size: ModelSize, stage: int, layers: int, moe: int) -> float:
    """Return the activations of the micro-batches in flight: pp - s on stage s, and more chunks if interleaved."""
    p = config.parallel
    tokens = config.trainer.token_budget / p.cp / p.tp  # sequence parallelism splits all other activations
    chunks = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    in_flight = chunks * layers / p.vpp if p.vpp > 1 else (p.pp - stage) * layers
    widest = max(size.active_width if moe else 0, size.ffn_width if moe < layers else 0)
    layer = _ACTIVATION_BYTES * size.hidden + _EXPERT_ACTIVATION_BYTES * widest
    if value_bytes(config) == 2 and not config.launch.gpus_per_node:
        layer += _NORM_BYTES * size.hidden * (1 if config.trainer.lora else 2)
    dispatched = _SENT_BYTES * size.experts_per_token * size.hidden if moe else 0
    # Recomputed layers store their inputs; one layer at a time stores everything.
    recomputes = "layer" in config.trainer.recompute
    stored_units, working = (
        (in_flight * 2 * size.hidden, layer + dispatched) if recomputes else (in_flight * layer, dispatched)
    )
    scale = value_bytes(config) / 2
    if stage < p.pp - 1:
        return tokens * scale * (stored_units + working)
    # Logits are freed before the last layer is recomputed. A scoring pass stores no layers.
    training, scoring = _output_layer(config, size)
    return max(tokens * scale * stored_units + max(tokens * scale * working, training), scoring)


def _output_layer(config: Config, size: ModelSize) -> tuple[float, float]:
    """Return the largest memory of the output layer in a training and a scoring pass.

    Logits exist in float32 and in the model's dtype, in a scoring pass as two copies in float32. If they are computed
    for some rows at a time (rlsys.trainer.model.output_layer), the hidden states, their gradient and that of the
    weight exist in addition. With fused accumulation, which depends on installed packages, the latter takes less.
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


_SAVED_BYTES = 2 * 12
"""Bytes per parameter while a checkpoint is written: float32 weight and two moments, gathered on the first
data-parallel rank (Megatron's fully_reshardable, mem_efficient), and copied for the writing thread."""


def checkpoint_host(config: Config, size: ModelSize) -> float:
    """Return the host memory of a checkpoint on the node that needs most.

    Megatron numbers ranks by stage; of a stage the first tp ranks hold all dense parameters, the first ep *
    etp ranks all experts.
    """
    p = config.parallel
    lanes, per_node = p.world_size // p.pp, config.launch.gpus_per_node or p.world_size
    bytes_per_parameter = _SAVED_BYTES + value_bytes(config)
    parameter_counts = (size.dense + size.mtp[0], size.experts + size.mtp[1])
    if config.trainer.lora is not None:
        adapter_sizes = _adapter_sizes(config)
        parameter_counts = (sum(f.dense for f in adapter_sizes), sum(f.experts for f in adapter_sizes))
    nodes: dict[int, float] = {}
    for stage in range(p.pp):
        for owners, parameters in ((p.tp, parameter_counts[0]), (p.ep * p.expert_tp, parameter_counts[1])):
            for rank in range(stage * lanes, stage * lanes + owners):
                share = bytes_per_parameter * parameters / p.pp / owners
                nodes[rank // per_node] = nodes.get(rank // per_node, 0.0) + share
    return max(nodes.values())


def value_bytes(config: Config) -> int:
    """Return the bytes per parameter."""
    return 4 if config.model.dtype == "float32" else 2


Fact = tuple[str, str]
"""Name and description."""


def describe_memory(config: Config, hf: HFConfig) -> list[Fact]:
    """Describe the memory of a run, for `explain`."""
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
    if not any(size.mtp):
        return []
    usage = (
        "pushed to engines, which draft with it" if config.engine.drafts_with_model else "not in the engines"
    )
    return [("multi-token prediction", f"{_count(sum(size.mtp))} more parameters, trained, {usage}")]


def _pushed(config: Config, size: ModelSize) -> int:
    """Return the number of parameters that each engine receives in a push."""
    if config.weights.method != "adapter":
        return size.total
    return sum(f.dense + f.experts for f in _adapter_sizes(config))


def _describe_adapters(config: Config) -> list[Fact]:
    if (lora := config.trainer.lora) is None:
        return []
    trained = sum(f.dense + f.experts for f in _adapter_sizes(config))
    return [("trained", f"{_count(trained)}, adapters of rank {lora.rank}; the model stays as it is")]


def expected_staleness(config: Config) -> str:
    """Describe the expected staleness by Little's law.

    With k batches in flight and one leaving per step, a sample stays for k steps.
    """
    r = config.rollout
    if r.max_staleness == 0:
        return "0: the current weights sample every token"
    overlap = config.launch.placement == "disaggregated"
    mean = min(config.over_provision - 1 + overlap, r.max_staleness)
    return f"about {mean:.2g} train steps on average, at most {r.max_staleness}"


TRAINER_FACTS = ("parameters", "trainer, one rank", "a checkpoint")
"""Facts of `describe_memory` that hold without engines."""


def trainer_memory_problems(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """Return one line if a trainer rank needs more memory than a GPU with `gpu_gb` GB has."""
    need = budget(config, model_size(hf)).trainer
    if need <= gpu_gb * GB:
        return []
    return [f"a trainer rank needs {need / GB:.3g} GB, a GPU has {gpu_gb:g} GB"]


def memory_problems(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """Return one line for each part of a run that needs more memory than a GPU with `gpu_gb` GB has."""
    size = model_size(hf)
    b, problems = budget(config, size), []
    for name, need in (("a trainer rank", b.trainer), ("an engine rank", b.engine_with_graphs)):
        if need > gpu_gb * GB:
            problems.append(f"{name} needs {need / GB:.3g} GB, a GPU has {gpu_gb:g} GB")
    releases_memory = config.launch.release_memory
    idle_engine = (
        0.0 if releases_memory else b.engine_with_graphs
    )  # memory of an engine while the trainer works
    both = max(b.trainer + idle_engine, b.engine_with_graphs + b.idle_trainer)
    if config.launch.placement == "colocated" and both > gpu_gb * GB:
        hint = "" if releases_memory else "; see launch.release_memory"
        problems.append(f"trainer and engine on one GPU need {both / GB:.3g} GB, it has {gpu_gb:g} GB{hint}")
    if not problems and b.pool_tokens < config.rollout.max_response_tokens:
        problems.append(
            f"in addition to weights and trainer the KV pool of an engine holds {b.pool_tokens} tokens, but a "
            f"response has up to rollout.max_response_tokens = {config.rollout.max_response_tokens}"
        )
    return problems


def size_warnings(config: Config, hf: HFConfig) -> list[str]:
    """Return warnings about sizes that do not match.

    Engines may decode fewer samples than are in flight if their KV pools hold no more; the others wait.
    """
    warnings = []
    pool_tokens = budget(config, model_size(hf)).pool_tokens
    responses, samples = samples_held(config, pool_tokens), engine_samples(config)
    limit = config.max_running_requests
    if config.slots > config.engine.writers * limit and (room := _pool_samples(config, pool_tokens)) > limit:
        warnings.append(
            f"{config.slots} samples are in flight, but the engines decode {config.engine.writers * limit} at once; "
            f"the KV pool of an engine would hold {room}"
        )
    if responses < samples:
        warnings.append(
            f"the KV pool holds about {responses} responses with lengths of a long tail, of {samples} that an "
            "engine has in flight"
        )
    return warnings


def _count(n: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
