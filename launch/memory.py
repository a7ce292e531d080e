"""What a model and a layout need: parameters, memory of one GPU, bytes of a push. Estimates, from config.json alone.

Exact: parameter counts (tested against a model's files). By formula: weights, gradients, optimizer, KV pool.
Rough: activations, after Korthikanti et al. 2022 ("Reducing Activation Recomputation"): about 34 bytes a token, layer
and hidden unit in bfloat16, with attention that stores no scores; layers that are computed again keep 2. Parts that
`trainer.recompute` names are not taken off. `rlsys rehearse` counts what the trainer's own code keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from launch.push import GB, describe_push, short
from rlsys.config import Config
from rlsys.convert.adapters import factors
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages

_ACTIVATION_BYTES = 34
"""Of bfloat16; twice as much in float32."""
_EXPERT_ACTIVATION_BYTES = 8
"""Of bfloat16, a token, chosen expert and intermediate unit: gate, up, their product, and its gradient's input."""
_SENT_BYTES = 18
"""Of bfloat16, a token, chosen expert and hidden unit: nine copies of what is sorted, sent and sent back, and of its
gradient, while one layer is computed again and goes backward; counted by `rlsys rehearse`."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts. Experts are routed ones, which expert parallelism divides; dense is all else."""

    hidden: int
    vocab: int
    tied: bool
    moe_layers: tuple[bool, ...]
    attention: int
    """Of one layer, what tensor parallelism divides."""
    whole: int
    """Of one layer, what each tensor-parallel rank has whole: norms, and latent attention's way down."""
    ffn: int
    """Of the feed-forward part of a layer without experts."""
    shared: int
    """Of a layer with experts: the shared ones."""
    router: int
    """Of a layer with experts; each tensor-parallel rank has it whole."""
    routed: int
    """Of a layer with experts: all of them."""
    ffn_width: int
    chosen_width: int
    """Intermediate units that a token visits in a layer without experts, and of routed experts in one with them."""
    chosen: int
    """Experts that a token is sent to."""
    kv_values: int
    """Numbers that one token keeps in one layer's KV cache."""
    kv_heads: int | None
    """Heads that tensor parallelism divides the cache by; None: each rank keeps all (latent attention)."""
    ahead: tuple[int, int] = (0, 0)
    """Of the layer for multi-token prediction, if it is trained: dense ones, and routed experts. Not above."""

    @property
    def layers(self) -> int:
        return len(self.moe_layers)

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def experts(self) -> int:
        return self.routed * sum(self.moe_layers)

    @property
    def dense(self) -> int:
        divided, whole = self.dense_of(range(self.layers))
        return divided + whole + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def dense_of(self, layers: Sequence[int]) -> tuple[int, int]:
        """Of these layers, without embedding and head: what tensor parallelism divides, and what it does not."""
        moe = sum(self.moe_layers[i] for i in layers)
        divided = len(layers) * self.attention + moe * self.shared + (len(layers) - moe) * self.ffn
        return divided, len(layers) * self.whole + moe * self.router


def model_size(hf: HFConfig) -> ModelSize:
    """Counted from the name table: one layer with experts and one without stand for all of their kind."""
    kv_values, kv_heads = _cache(hf)
    of_moe, of_dense = (_layer(hf, moe) for moe in (True, False))
    of_any = of_moe if any(hf.moe_layers) else of_dense
    return ModelSize(
        hidden=hf.hidden_size,
        vocab=hf.vocab_size,
        tied=hf.tied,
        moe_layers=hf.moe_layers,
        attention=of_any["attention"],
        whole=of_any["whole"],
        ffn=of_dense["ffn"],
        shared=of_moe["shared"],
        router=of_moe["router"],
        routed=of_moe["routed"] * hf.experts,
        ffn_width=hf.ffn_size,
        chosen_width=hf.experts_per_token * hf.expert_ffn_size,
        chosen=hf.experts_per_token,
        kv_values=kv_values,
        kv_heads=kv_heads,
        ahead=_ahead(hf),
    )


def _ahead(hf: HFConfig) -> tuple[int, int]:
    """Beside a layer of the last one's kind: three norms, and what joins embedding and hidden state."""
    if not hf.mtp:
        return 0, 0
    layer = _layer(hf, hf.moe_layers[-1])
    around = sum(prod(hf.shape(letters)) for rule in hf.family.mtp for letters in rule.hf.values())
    routed = layer.pop("routed", 0) * hf.experts
    return around + sum(layer.values()), routed


def _layer(hf: HFConfig, moe: bool) -> Counter[str]:
    """Parameters of one layer, by the part of ModelSize; of one routed expert. None when no layer is of this kind."""
    count: Counter[str] = Counter()
    if moe not in hf.moe_layers:
        return count
    for rule in hf.rules(hf.moe_layers.index(moe)):
        if rule.per_expert:
            part = "routed"
        elif "mlp.router" in rule.megatron:
            part = "router"
        elif "shared_experts" in rule.megatron:
            part = "shared"
        elif ".mlp." in rule.megatron:
            part = "ffn"
        else:
            part = "whole" if rule.cut is None else "attention"
        count[part] += sum(prod(hf.shape(letters)) for letters in rule.hf.values())
    return count


def _cache(hf: HFConfig) -> tuple[int, int | None]:
    """Numbers that a layer's cache holds of a token, heads that it is divided by."""
    if (latent := hf.latent) is not None:
        return latent.kv_rank + latent.rotary, None
    return 2 * hf.kv_heads * hf.head_dim, hf.kv_heads


@dataclass(frozen=True)
class Budget:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    engine_weights: float
    kv_pool: float
    graphs: float
    """Of an engine's CUDA graphs, as SGLang reserves for them."""
    host: float
    """Of the optimizer, in the host's memory instead."""
    stage: int = 0
    """The pipeline stage whose ranks need so much."""

    @property
    def trainer(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def engine(self) -> float:
        """What lasts; see `graphs`."""
        return self.engine_weights + self.kv_pool

    @property
    def engine_with_graphs(self) -> float:
        return self.engine + self.graphs


def budget(config: Config, size: ModelSize) -> Budget:
    """Of a rank of the fullest pipeline stage, with experts and tokens divided evenly."""
    stages = [stage_budget(config, size, s) for s in range(config.parallel.pp)]
    return max(stages, key=lambda b: b.trainer)


def stage_budget(config: Config, size: ModelSize, stage: int) -> Budget:
    """The first stage has the embedding and most micro-batches in flight, the last one the head and its logits."""
    p, width = config.parallel, value_bytes(config)
    layers = _layers_of(config, size, stage)
    moe = sum(size.moe_layers[i] for i in layers)
    dense, experts = _held(config, size, stage)
    expert_copies = max(1, p.world_size // (p.pp * p.ep * p.expert_tp))
    states = 8 if width == 4 else 12  # two moments, and float32 weights beside bfloat16 ones
    per_matrix = states - 4 * (config.trainer.optimizer == "muon")  # which has one moment
    copies = p.data_parallel * p.cp
    matrices = size.dense_of(layers)[0] / p.tp
    trained, of_experts = dense, experts
    if config.trainer.lora is not None:
        every = _factors(config)
        found = [every[i] for i in layers]
        trained, of_experts = sum(f.dense for f in found), sum(f.experts for f in found) / p.ep
        matrices = 0.0
    states_held = states * (trained - matrices) / copies + per_matrix * (
        matrices / copies + of_experts / expert_copies
    )
    engine_tp = config.engine.tps[0]  # the smallest engines have most on a GPU
    kv_share = 1 if size.kv_heads is None else min(engine_tp, size.kv_heads)
    beside = 0.0
    if config.algo.teacher is not None and config.algo.teacher.engine is None:
        folders = set(config.algo.teacher.folders.values())
        beside = sum(sum(_held(config, model_size(HFConfig.read(folder)), stage)) for folder in folders)
    return Budget(
        weights=width * (dense + experts + beside),
        gradients=4.0 * (trained + of_experts),
        optimizer=(1 - config.trainer.offload_optimizer) * states_held,
        host=config.trainer.offload_optimizer * states_held,
        activations=_activations(config, size, stage, len(layers), moe),
        engine_weights=width * size.total / engine_tp,
        kv_pool=width * config.engine.max_total_tokens * size.layers * size.kv_values / kv_share,
        graphs=_graphs(config, size, engine_tp) if config.launch.gpus_per_node else 0.0,
        stage=stage,
    )


_DECODE_GRAPH, _PREFILL_GRAPH, _LATENT_GRAPHS = 2 * 2**20, 8 * 2**20, 1.5 * 2**30
"""Bytes of a decoded sequence, of a graph for prompts, and of all those for prompts with latent attention (SGLang
0.5.23, arg_groups/memory_hook.py)."""
_PREFILL_SHAPES = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (8192, 512))
"""Tokens up to which SGLang makes a graph for prompts -> in steps of so many."""


def _graphs(config: Config, size: ModelSize, tp: int) -> float:
    decoded = min(config.max_running_requests, 256 if tp < 4 else 512)
    shapes, start = 0, 0
    for end, step in _PREFILL_SHAPES:
        shapes += max(0, min(end, config.prefill_graph_tokens) - start) // step
        start = end
    return decoded * _DECODE_GRAPH + (_LATENT_GRAPHS if size.kv_heads is None else shapes * _PREFILL_GRAPH)


class Factors(NamedTuple):
    """Parameters of the adapters of a layer, as if tensor parallelism divided none of them."""

    dense: int
    experts: int


def _factors(config: Config) -> list[Factors]:
    """Of each layer of the model."""
    assert config.trainer.lora is not None
    hf = HFConfig.read(config.model.path)
    found = [[0, 0] for _ in range(hf.layers)]
    for entry in factors(hf, config.trainer.lora):
        assert entry.layer is not None
        found[entry.layer][entry.expert is not None] += entry.elements
    return [Factors(*each) for each in found]


def _held(config: Config, size: ModelSize, stage: int) -> tuple[float, float]:
    """Parameters of one rank: what is no routed expert's, and what is."""
    p, layers = config.parallel, _layers_of(config, size, stage)
    ends = size.embedding * ((stage == 0) + (stage == p.pp - 1))
    if p.pp == 1 and size.tied:
        ends = size.embedding
    divided, whole = size.dense_of(layers)
    dense = (divided + ends) / p.tp + whole + (size.hidden if stage == p.pp - 1 else 0)
    routed = size.routed * sum(size.moe_layers[i] for i in layers)
    if stage == p.pp - 1 and any(size.ahead):  # with a copy of the embedding where the first stage has it
        dense += (size.ahead[0] + size.embedding * (p.pp > 1)) / p.tp
        routed += size.ahead[1]
    return dense, routed / (p.ep * p.expert_tp)


def _layers_of(config: Config, size: ModelSize, stage: int) -> list[int]:
    """Of one rank."""
    p = config.parallel
    return [i for i, at in enumerate(layer_stages(size.layers, p.pp, p.vpp)) if at == stage]


def _activations(config: Config, size: ModelSize, stage: int, layers: int, moe: int) -> float:
    """Of the micro-batches in flight: pp - s on stage s, and more chunks of them where stages are interleaved."""
    p = config.parallel
    tokens = (
        config.trainer.token_budget / p.cp / p.tp
    )  # sequence parallelism divides what is not divided already
    chunks = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    in_flight = chunks * layers / p.vpp if p.vpp > 1 else (p.pp - stage) * layers
    widest = max(size.chosen_width if moe else 0, size.ffn_width if moe < layers else 0)
    layer = _ACTIVATION_BYTES * size.hidden + _EXPERT_ACTIVATION_BYTES * widest
    sent = _SENT_BYTES * size.chosen * size.hidden if moe else 0
    # Recomputed layers keep their inputs, and one of them all that it needs.
    again = "layer" in config.trainer.recompute
    kept, working = (in_flight * 2 * size.hidden, layer + sent) if again else (in_flight * layer, sent)
    scale = value_bytes(config) / 2
    logits = (
        (value_bytes(config) + 4) * size.vocab if stage == p.pp - 1 else 0
    )  # float32 ones beside the model's
    # The logits are gone before the last layer is computed again.
    return tokens * (scale * kept + max(scale * working, logits))


_SAVED_BYTES = 2 * 12
"""Of a parameter, while a checkpoint is written: float32 weight and two moments, once gathered on the first
data-parallel rank (megatron's fully_reshardable, mem_efficient), once copied for the thread that writes."""


def checkpoint_host(config: Config, size: ModelSize) -> float:
    """Bytes of host memory that a checkpoint takes on the node that takes most. Megatron numbers ranks by stage;
    of a stage the first tp ranks hold all that is not an expert, the first ep * etp ranks all experts.
    """
    p = config.parallel
    lanes, per_node = p.world_size // p.pp, config.launch.gpus_per_node or p.world_size
    each = _SAVED_BYTES + value_bytes(config)
    saved = (size.dense + size.ahead[0], size.experts + size.ahead[1])
    if config.trainer.lora is not None:
        found = _factors(config)
        saved = (sum(f.dense for f in found), sum(f.experts for f in found))
    nodes: dict[int, float] = {}
    for stage in range(p.pp):
        for owners, parameters in ((p.tp, saved[0]), (p.ep * p.expert_tp, saved[1])):
            for rank in range(stage * lanes, stage * lanes + owners):
                share = each * parameters / p.pp / owners
                nodes[rank // per_node] = nodes.get(rank // per_node, 0.0) + share
    return max(nodes.values())


def value_bytes(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


Fact = tuple[str, str]
"""A name and what is said of it."""


def describe_memory(config: Config, hf: HFConfig) -> list[Fact]:
    size = model_size(hf)
    b = budget(config, size)
    on_host = (config.launch.gpus_per_node or config.parallel.world_size) * b.host
    return [
        ("parameters", f"{_count(size.total)}, {_count(size.experts)} of them in routed experts"),
        *_describe_adapters(config),
        *_describe_ahead(config, size),
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
            f"KV of {config.engine.max_total_tokens} tokens {b.kv_pool / GB:.3g}"
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


def _describe_ahead(config: Config, size: ModelSize) -> list[Fact]:
    if not any(size.ahead):
        return []
    held = (
        "pushed to engines, which draft with it" if config.engine.drafts_with_model else "not in the engines"
    )
    return [("multi-token prediction", f"{_count(sum(size.ahead))} more parameters, trained, {held}")]


def _pushed(config: Config, size: ModelSize) -> int:
    """Parameters that each engine gets in a push."""
    if config.weights.method != "adapter":
        return size.total
    return sum(f.dense + f.experts for f in _factors(config))


def _describe_adapters(config: Config) -> list[Fact]:
    if (lora := config.trainer.lora) is None:
        return []
    trained = sum(f.dense + f.experts for f in _factors(config))
    return [("trained", f"{_count(trained)}, adapters of rank {lora.rank}; the model stays as it is")]


def expected_staleness(config: Config) -> str:
    """Little's law: with k batches in flight and one leaving a step, a sample stays k steps."""
    r = config.rollout
    if r.max_staleness == 0:
        return "0: every token is of the current weights"
    overlap = config.launch.placement == "disaggregated"
    mean = min(config.over_provision - 1 + overlap, r.max_staleness)
    return f"about {mean:.2g} train steps on average, at most {r.max_staleness}"


def does_not_fit(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """What needs more memory than a GPU of `gpu_gb` GB has."""
    size = model_size(hf)
    b, found = budget(config, size), []
    for name, need in (("a trainer rank", b.trainer), ("an engine rank", b.engine_with_graphs)):
        if need > gpu_gb * GB:
            found.append(f"{name} needs {need / GB:.3g} GB, a GPU has {gpu_gb:g}")
    resting = b.weights + b.gradients + b.optimizer
    turns = config.launch.release_memory
    beside = 0.0 if turns else b.engine_with_graphs  # what an engine keeps while the trainer works
    both = max(b.trainer + beside, b.engine_with_graphs + resting)
    if config.launch.placement == "colocated" and both > gpu_gb * GB:
        hint = "" if turns else "; see launch.release_memory"
        found.append(f"trainer and engine on one GPU need {both / GB:.3g} GB of {gpu_gb:g}{hint}")
    return found


def odd_sizes(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """What will not fit a GPU of `gpu_gb` GB, and sizes that do not suit each other."""
    found = does_not_fit(config, hf, gpu_gb)
    if config.slots > (capacity := config.engine.writers * config.max_running_requests):
        found.append(f"{config.slots} samples are in flight, but the engines decode {capacity} at once")
    longest = config.rollout.max_response_tokens
    if (held := config.engine.max_total_tokens // longest) < config.max_running_requests:
        found.append(
            f"the KV pool holds {held} responses of {longest} tokens, an engine may decode "
            f"{config.max_running_requests} at once"
        )
    return found


def _count(n: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
