"""A config for a model and a number of GPUs: layout, engines, KV pool and lengths, with the reason of each value.

The search takes the first layout that fits, in the order of its communication cost: fewer tensor- and pipeline-
parallel ranks first, an optimizer on the GPU before one in host memory. All estimates are those of
`rlsys.planner.memory`, which `rlsys explain` shows and `rlsys rehearse` checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlsys.config import Config
from rlsys.config.mistakes import explain_error
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.core.errors import UserError
from rlsys.core.machines import machines
from rlsys.core.model_folder import read_fields
from rlsys.planner.layout import lay_out, push_plan
from rlsys.planner.memory import ModelSize, budget, memory_problems, model_size, value_bytes
from rlsys.planner.weight_update_cost import GB

GPUS_PER_NODE = 8
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a layout may use; the remainder is for NCCL, cuBLAS and fragmentation."""
POOL_SHARE = 0.85
"""Share of the memory beside an engine's weights and a trainer's resting state that the KV pool gets."""
RESPONSE_TOKENS = 8192
PROMPT_TOKENS = 2048
"""Assumed length of the longest prompt."""
GROUP_SIZE = 16
GROUPS_PER_STEP = 64
OVER_PROVISION = 1.5
MAX_RUNNING_REQUESTS = 256
"""Per engine; decoding is bound by memory bandwidth below some hundred sequences."""
MIN_RUNNING_REQUESTS = 16
"""Per engine, at half their full length; a layout that leaves no pool for them is not taken."""
_MAX_GPUS = 65536
_BYTES_PER_PARAMETER = 8
"""Least bytes of GPU memory per parameter: weights of trainer and engine in bfloat16, gradients in float32."""


@dataclass(frozen=True)
class Value:
    """A config value and why it has been chosen."""

    value: Any
    reason: str


Sections = dict[str, dict[str, Value]]


@dataclass(frozen=True)
class Recommendation:
    """Config sections with reasons, and the validated config that they make."""

    sections: Sections
    config: Config


@dataclass(frozen=True)
class _Candidate:
    """A layout of trainer and engines."""

    tp: int
    pp: int
    ep: int
    engine_tp: int
    offload: float
    cp: int = 1


def recommend(
    model: Path, gpus: int, machine: str = "h100", data: dict[str, Any] | None = None
) -> Recommendation:
    """Choose a config that trains all parameters of a model on GPUs that trainer and engines share.

    Args:
        model: Hugging Face folder; its config.json is enough.
        gpus: Number of GPUs; 0 for a host without GPUs.
        machine: Kind of GPU, a name of rlsys/core/machines.yaml.
        data: The config section `data`, checked together with the rest.

    Raises:
        UserError: The model is not supported, or does not fit; the message has the smallest number of GPUs that
            suffices.
    """
    hf = HFConfig.read(model)
    if machine not in machines():
        raise UserError(f"--gpu {machine}: expected one of {', '.join(sorted(machines()))}")
    memory = machines()[machine].memory
    if (recommendation := _first_fit(model, hf, gpus, memory, data or {})) is not None:
        return recommendation
    enough = _enough(model, hf, gpus, memory)
    hint = f"{enough} GPUs ({enough // GPUS_PER_NODE} nodes) are enough" if enough else "no number is enough"
    raise UserError(f"{model}: full training does not fit {gpus} GPUs of {memory:g} GB ({machine}); {hint}")


def _enough(model: Path, hf: HFConfig, gpus: int, memory: float) -> int | None:
    """Return the smallest number of GPUs above `gpus`, in whole nodes, that holds the model."""
    least = gpus // GPUS_PER_NODE + 1
    nodes = 1 << (least - 1).bit_length()
    while not _first_fit(model, hf, nodes * GPUS_PER_NODE, memory, {}):
        nodes *= 2
        if nodes * GPUS_PER_NODE > _MAX_GPUS:
            return None
    smaller = range(max(nodes // 2 + 1, least), nodes)
    fits = (n for n in smaller if _first_fit(model, hf, n * GPUS_PER_NODE, memory, {}))
    return GPUS_PER_NODE * next(fits, nodes)


def _first_fit(
    model: Path, hf: HFConfig, gpus: int, memory: float, data: dict[str, Any]
) -> Recommendation | None:
    size = model_size(hf)
    limit = MEMORY_SHARE * memory
    if gpus and _BYTES_PER_PARAMETER * size.total > gpus * limit * GB:
        return None
    trainers = [c for c in _trainer_layouts(hf, gpus) if _trainer_fits(model, hf, size, c, gpus, limit)]
    for candidate in _with_engines(trainers, gpus):
        try:
            sections = _sections(model, hf, size, candidate, gpus)
            config = _config(sections, data)
            check_layout(config, hf)
            push_plan(config, lay_out(config))
            _add_pool(sections, config, size, memory)
            config = _config(sections, data)
        except UserError:
            continue
        if gpus == 0 or not memory_problems(config, hf, limit):
            return Recommendation(sections, config)
    return None


def _trainer_fits(model: Path, hf: HFConfig, size: ModelSize, c: _Candidate, gpus: int, limit: float) -> bool:
    """Whether the layout divides the model, and a rank of it fits a GPU without an engine beside it."""
    try:
        config = _config(_sections(model, hf, size, c, gpus), {})
        check_layout(config, hf)
    except UserError:
        return False
    return gpus == 0 or budget(config, size).trainer <= limit * GB


def _trainer_layouts(hf: HFConfig, gpus: int) -> Iterator[_Candidate]:
    """All layouts of the trainer, those with less communication first."""
    if gpus == 0:
        yield _Candidate(1, 1, 1, 1, 0.0)
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
                        yield _Candidate(tp, product // tp, ep, 1, offload)


def _with_engines(trainers: Sequence[_Candidate], gpus: int) -> Iterator[_Candidate]:
    """Each trainer layout with engines of at most one node, then with engines of several."""
    powers = [2**i for i in range(17) if 2**i <= max(gpus, 1)]
    within = [n for n in powers if n <= GPUS_PER_NODE]
    for sizes in (within, *([n] for n in powers[len(within) :])):
        for candidate in trainers:
            for engine_tp in sizes:
                yield replace(candidate, engine_tp=engine_tp)


def _sections(model: Path, hf: HFConfig, size: ModelSize, c: _Candidate, gpus: int) -> Sections:
    """All values of a candidate except for the KV pool."""
    longest = _context(model)
    response = min(RESPONSE_TOKENS, longest * 3 // 4)
    prompt = min(PROMPT_TOKENS, longest - response)
    tokens = max(16384 if gpus else 2048, prompt + response)
    nodes, per_node = max(1, -(-gpus // GPUS_PER_NODE)), min(gpus, GPUS_PER_NODE)
    dp = max(1, gpus // (c.tp * c.pp * c.cp))
    engines = max(1, gpus // c.engine_tp)
    group_size = GROUP_SIZE if gpus else 8
    divisor = dp // math.gcd(dp, group_size)
    groups = max(1, round((GROUPS_PER_STEP if gpus else 4) / divisor)) * divisor
    billions = f"{size.total / 1e9:.3g} B parameters"
    sections: Sections = {
        "model": {
            "path": Value(str(model), f"{billions}, {size.experts / 1e9:.3g} B of them in routed experts"),
            "dtype": Value(
                *(
                    ("bfloat16", "what the model was trained in; masters are float32")
                    if gpus
                    else ("float32", "a CPU computes bfloat16 no faster")
                )
            ),
        },
        "rollout": {
            "groups_per_step": Value(groups, "prompts per train step"),
            "group_size": Value(group_size, "responses per prompt; their spread is the baseline of GRPO"),
            "over_provision": Value(
                OVER_PROVISION, "APRIL: start more groups, interrupt and resume the rest"
            ),
            "max_staleness": Value(4, "train steps after which an interrupted response is dropped"),
            "max_response_tokens": Value(response, f"the model's context has {longest} tokens"),
        },
        "algo": {
            "advantage": Value(
                "grpo", "the method with most published recipes; docs/algorithms.md has the others"
            ),
            "loss": Value([{"name": "clip", "clip_low": 0.2, "clip_high": 0.28}], "clip-higher, as DAPO"),
            "corrections": Value([{"name": "tis", "cap": 2.0}], "engine and trainer round differently"),
            "anchor": Value(
                "behaviour", "the policy that sampled each token, exact for interrupted responses"
            ),
        },
        "trainer": {
            "lr": Value(
                1e-6, "usual for full training of a pretrained model; above 1e-5 runs lose what was learned"
            ),
            "warmup_steps": Value(10, "Adam's second moments are unknown at the start"),
            "token_budget": Value(
                tokens, f"tokens per micro-batch: one sample has up to {prompt + response}"
            ),
            "recompute": Value(["layer"], "activations of a layer are computed again in the backward pass"),
            "offload_optimizer": Value(
                c.offload,
                "optimizer state on the GPU"
                if not c.offload
                else "optimizer state in host memory: it does not fit the GPU",
            ),
            "checkpoint_every": Value(20, "train steps"),
        },
        "eval": {
            "every": Value(20, "train steps"),
            "prompts": Value(512 if gpus else 64, "held-out prompts"),
        },
        "parallel": {
            "tp": Value(c.tp, "tensor parallelism, within a node"),
            "pp": Value(c.pp, "pipeline stages"),
            "dp": Value(dp, "data parallelism: the remaining GPUs"),
        },
        "engine": {
            "count": Value(engines, "as many as the GPUs hold"),
            "tp": Value(c.engine_tp, f"holds {2 * size.total / 1e9:.3g} GB of weights and a KV pool"),
            "deterministic": Value(
                not gpus,
                "faster kernels; tokens then depend on the batch"
                if gpus
                else "the same seed gives the same tokens",
            ),
        },
        "launch": {
            "nodes": Value(nodes, f"of {per_node} GPUs" if gpus else "this host"),
            "gpus_per_node": Value(per_node, ""),
            "placement": Value("colocated", "trainer and engines take turns on the same GPUs"),
        },
    }
    if hf.experts:
        sections["parallel"]["ep"] = Value(c.ep, f"{hf.experts // c.ep} of {hf.experts} experts per rank")
        sections["parallel"]["etp"] = Value(1, "experts are not divided by tensor parallelism")
        sections["trainer"]["replay"] = Value("engine", "the trainer takes the experts that the engine chose")
        sections["engine"]["return_routes"] = Value(True, "needed by trainer.replay")
    if gpus:
        sections["launch"]["release_memory"] = Value(
            True, "engines free their memory while the trainer works"
        )
    if nodes > 1:
        sections["launch"]["backend"] = Value("slurm", "several nodes; `ray` works as well")
    return sections


def _add_pool(sections: Sections, config: Config, size: ModelSize, memory: float) -> None:
    """Size the KV pool by what remains, and at most by what the samples in flight need."""
    need, tp = budget(config, size), config.engine.tp
    longest = config.rollout.max_response_tokens + PROMPT_TOKENS
    in_flight = -(-config.slots // config.engine.count)
    tokens = min(in_flight, MAX_RUNNING_REQUESTS) * longest
    kv_share = 1 if size.kv_heads is None else min(tp, size.kv_heads)
    per_token = value_bytes(config) * size.layers * size.kv_values / kv_share
    if config.launch.gpus_per_node:
        resting = need.weights + need.gradients + need.optimizer
        available = MEMORY_SHARE * memory * GB - need.engine_weights - need.graphs - resting
        tokens = min(tokens, int(POOL_SHARE * max(available, 0.0) / per_token))
        if tokens < min(in_flight, MIN_RUNNING_REQUESTS) * longest // 2:
            raise UserError(f"the KV pool holds {tokens} tokens")
    tokens = tokens // 1024 * 1024 + 1024
    running = max(1, min(in_flight, MAX_RUNNING_REQUESTS, tokens // (longest // 2)))
    sections["engine"]["max_total_tokens"] = Value(
        tokens,
        f"KV pool of {per_token * tokens / GB:.3g} GB per GPU; {in_flight} samples in flight per engine",
    )
    sections["engine"]["max_running_requests"] = Value(
        running, "as many as the pool holds at half their full length"
    )


def _context(model: Path) -> int:
    """Positions of the model."""
    fields = read_fields(model)
    length = fields.get("max_position_embeddings")
    if length is None and isinstance(text := fields.get("text_config"), dict):
        length = text.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 1 else RESPONSE_TOKENS + PROMPT_TOKENS


def _config(sections: Sections, data: dict[str, Any]) -> Config:
    values = {name: {field: v.value for field, v in fields.items()} for name, fields in sections.items()}
    try:
        return Config.model_validate(values | ({"data": data} if data else {}))
    except ValidationError as e:
        raise UserError(explain_error(e, Config)) from None


def _scalar_or_flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def as_yaml(sections: Sections) -> str:
    """Write the sections as YAML with the reason of each value behind it."""
    lines = []
    for name, fields in sections.items():
        lines.append(f"{name}:")
        for field, v in fields.items():
            entry = f"  {field}: {_scalar_or_flow(v.value)}"
            lines.append(f"{entry:<46}  # {v.reason}" if v.reason else entry)
    return "\n".join(lines) + "\n"
