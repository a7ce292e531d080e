"""A config for a model and a number of GPUs: layout, engines, KV pool and lengths, with the reason of each value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlsys.config import Config
from rlsys.config.mistakes import explain_error
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_quantised
from rlsys.core.errors import UserError
from rlsys.core.machines import Machine, machines
from rlsys.core.model_folder import read_fields
from rlsys.planner.layout_search import GPUS_PER_NODE, Candidate, first_fit
from rlsys.planner.memory import (
    GB,
    PROMPT_TOKENS,
    ModelSize,
    budget,
    engine_samples,
    model_size,
    samples_held,
)

RESPONSE_TOKENS = 8192
GROUP_SIZE = 16
GROUPS_PER_STEP = 64
OVER_PROVISION = 1.5
_MAX_GPUS = 65536


@dataclass(frozen=True)
class Value:
    """A config value and the reason for it."""

    value: Any
    reason: str


Sections = dict[str, dict[str, Value]]


@dataclass(frozen=True)
class Recommendation:
    """Config sections with reasons, and the validated config."""

    sections: Sections
    config: Config


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
    check_quantised(model, hf)
    if machine not in machines():
        raise UserError(f"--gpu {machine}: expected one of {', '.join(sorted(machines()))}")
    kind = machines()[machine]
    if (recommendation := _first_fit(model, hf, gpus, kind, data or {})) is not None:
        return recommendation
    enough = _enough(model, hf, gpus, kind)
    hint = f"{enough} GPUs ({enough // GPUS_PER_NODE} nodes) are enough" if enough else "no number is enough"
    raise UserError(
        f"{model}: full training does not fit {gpus} GPUs of {kind.memory:g} GB ({machine}); {hint}"
    )


def _enough(model: Path, hf: HFConfig, gpus: int, machine: Machine) -> int | None:
    """Return the smallest number of GPUs above `gpus`, in whole nodes, on which the model fits; None if none does."""
    least = gpus // GPUS_PER_NODE + 1
    nodes = 1 << (least - 1).bit_length()
    while not _first_fit(model, hf, nodes * GPUS_PER_NODE, machine, {}):
        nodes *= 2
        if nodes * GPUS_PER_NODE > _MAX_GPUS:
            return None
    smaller = range(max(nodes // 2 + 1, least), nodes)
    fits = (n for n in smaller if _first_fit(model, hf, n * GPUS_PER_NODE, machine, {}))
    return GPUS_PER_NODE * next(fits, nodes)


def _first_fit(
    model: Path, hf: HFConfig, gpus: int, machine: Machine, data: dict[str, Any]
) -> Recommendation | None:
    size = model_size(hf)

    def sections_of(candidate: Candidate) -> Sections:
        return _sections(model, hf, size, candidate, gpus, machine.memory)

    fit = first_fit(hf, gpus, machine, lambda candidate: _config(sections_of(candidate), data))
    if fit is None:
        return None
    candidate, config = fit
    sections = sections_of(candidate)
    _add_pool(sections, config, size)
    return Recommendation(sections, _config(sections, data))


def _sections(model: Path, hf: HFConfig, size: ModelSize, c: Candidate, gpus: int, memory: float) -> Sections:
    """Return all values of a candidate except for the KV pool."""
    longest = _context(model)
    response = min(RESPONSE_TOKENS, longest * 3 // 4)
    prompt = min(PROMPT_TOKENS, longest - response)
    tokens = max(16384 if gpus else 2048, prompt + response)
    nodes, per_node = max(1, -(-gpus // GPUS_PER_NODE)), min(gpus, GPUS_PER_NODE)
    dp = max(1, gpus // (c.tp * c.pp))
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
            "group_size": Value(
                group_size, "responses per prompt; their mean reward is the baseline of GRPO"
            ),
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
                "optimizer state beside the weights"
                if not c.offload
                else "optimizer state in host memory: it does not fit the GPU",
            ),
            "checkpoint_every": Value(20, "train steps"),
        },
        "eval": {
            "interval": Value(20, "train steps"),
            "prompts": Value(512 if gpus else 64, "held-out prompts"),
        },
        "parallel": {
            "tp": Value(c.tp, "tensor parallelism, within a node"),
            "pp": Value(c.pp, "pipeline stages"),
            "dp": Value(dp, "data parallelism: the remaining GPUs" if gpus else "data parallelism"),
        },
        "engine": {
            "count": Value(engines, "as many as the GPUs hold" if gpus else "beside the trainer"),
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
            "placement": Value(
                "colocated", f"trainer and engines take turns on {'the same GPUs' if gpus else 'this host'}"
            ),
        },
    }
    if hf.experts:
        sections["parallel"]["ep"] = Value(c.ep, f"{hf.experts // c.ep} of {hf.experts} experts per rank")
        sections["parallel"]["etp"] = Value(1, "experts are not divided by tensor parallelism")
        sections["trainer"]["replay"] = Value("engine", "the trainer takes the experts that the engine chose")
        sections["engine"]["return_routes"] = Value(True, "needed by trainer.replay")
    if gpus:
        sections["launch"]["gpu_memory_gb"] = Value(
            memory, "memory of one GPU, by which the KV pool is sized"
        )
        sections["launch"]["release_memory"] = Value(
            True, "engines free their memory while the trainer works"
        )
    if nodes > 1:
        sections["launch"]["backend"] = Value("slurm", "several nodes; `ray` works as well")
    return sections


def _add_pool(sections: Sections, config: Config, size: ModelSize) -> None:
    """Add the share of memory that sizes the KV pool, and the requests that the pool holds."""
    samples = engine_samples(config)
    responses = max(1, samples_held(config, budget(config, size).pool_tokens))
    if config.launch.gpus_per_node:
        engine = config.engine.model_copy(update={"max_running_requests": responses})  # fewer CUDA graphs
        b = budget(config.model_copy(update={"engine": engine}), size)
        sections["engine"]["memory_fraction"] = Value(
            config.engine.memory_fraction,
            f"leaves {b.kv_pool / GB:.3g} GB per GPU, {b.pool_tokens} tokens, to the KV pool",
        )
    sections["engine"]["max_running_requests"] = Value(
        responses,
        f"of {samples} samples in flight, as many as the pool holds with responses of a long tail"
        if responses < samples
        else "all samples in flight",
    )


def _context(model: Path) -> int:
    """Return the context length of the model in tokens."""
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
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def as_yaml(sections: Sections) -> str:
    """Return the sections as YAML, with the reason of each value as a comment."""
    lines = []
    for name, fields in sections.items():
        lines.append(f"{name}:")
        for field, v in fields.items():
            entry = f"  {field}: {_scalar_or_flow(v.value)}"
            lines.append(f"{entry:<46}  # {v.reason}" if v.reason else entry)
    return "\n".join(lines) + "\n"
