"""Recommendation of a config for a model and a number of GPUs, with the reason for each value."""

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
"""Recommended rollout.max_response_tokens for models with a sufficient context."""
GROUP_SIZE = 16
GROUPS_PER_STEP = 64
OVER_PROVISION = 1.5
_MAX_GPUS = 65536
"""Largest number of GPUs in the search for a sufficient number."""


@dataclass(frozen=True)
class Value:
    """A config value and the reason for it."""

    value: Any
    reason: str


Sections = dict[str, dict[str, Value]]
"""Section of the config -> field -> value."""


@dataclass(frozen=True)
class Recommendation:
    """A recommended config: its values with reasons, and the validated config."""

    sections: Sections
    config: Config


def recommend(
    model: Path, gpus: int, machine: str = "h100", data: dict[str, Any] | None = None
) -> Recommendation:
    """Choose a config for full training of a model on GPUs that trainer and engines share.

    Args:
        model: Hugging Face model folder, of which only config.json is read.
        gpus: number of GPUs; 0 for a host without GPUs.
        machine: name of the GPU in rlsys/core/machines.yaml.
        data: config section `data`, which is validated with the other sections; None or empty for its defaults.

    Raises:
        UserError: the model is not supported, or does not fit the GPUs; the message has the smallest sufficient
            number of GPUs.
    """
    hf = HFConfig.read(model)
    check_quantised(model, hf)
    if machine not in machines():
        raise UserError(f"--gpu {machine}: expected one of {', '.join(sorted(machines()))}")
    gpu = machines()[machine]
    if (recommendation := _first_fit(model, hf, gpus, gpu, data or {})) is not None:
        return recommendation
    sufficient = _sufficient_gpus(model, hf, gpus, gpu)
    hint = "no number of GPUs is enough"
    if sufficient is not None:
        hint = f"{sufficient} GPUs ({sufficient // GPUS_PER_NODE} nodes) are enough"
    raise UserError(
        f"{model}: full training does not fit {gpus} GPUs of {gpu.memory:g} GB ({machine}); {hint}"
    )


def _sufficient_gpus(model: Path, hf: HFConfig, gpus: int, machine: Machine) -> int | None:
    """Return the smallest number of GPUs above `gpus`, in whole nodes, that fits the model.

    Return None if no number up to twice _MAX_GPUS fits.
    """
    fewest = gpus // GPUS_PER_NODE + 1
    nodes = 1 << (fewest - 1).bit_length()
    while not _first_fit(model, hf, nodes * GPUS_PER_NODE, machine, {}):
        nodes *= 2
        if nodes * GPUS_PER_NODE > _MAX_GPUS:
            return None
    smaller = range(max(nodes // 2 + 1, fewest), nodes)
    fits = (n for n in smaller if _first_fit(model, hf, n * GPUS_PER_NODE, machine, {}))
    return GPUS_PER_NODE * next(fits, nodes)


def _first_fit(
    model: Path, hf: HFConfig, gpus: int, machine: Machine, data: dict[str, Any]
) -> Recommendation | None:
    """Return the recommendation with the first layout that fits; None if none fits. Args: see `recommend`."""
    size = model_size(hf)

    def sections_of(candidate: Candidate) -> Sections:
        """Return the values of a layout without the KV pool."""
        return _sections(model, hf, size, candidate, gpus, machine.memory)

    fit = first_fit(hf, gpus, machine, lambda candidate: _config(sections_of(candidate), data))
    if fit is None:
        return None
    candidate, config = fit
    sections = sections_of(candidate)
    _add_pool(sections, config, size)
    return Recommendation(sections, _config(sections, data))


def _sections(model: Path, hf: HFConfig, size: ModelSize, c: Candidate, gpus: int, memory: float) -> Sections:
    """Return all values of a layout except for those of the KV pool.

    Args:
        model: Hugging Face model folder.
        hf: the model.
        size: its parameter counts.
        c: the layout.
        gpus: number of GPUs; 0 for a host without GPUs.
        memory: memory of a GPU in GB.
    """
    context = _context(model)
    response = min(RESPONSE_TOKENS, context * 3 // 4)
    sample = min(PROMPT_TOKENS, context - response) + response
    dp = max(1, gpus // (c.tp * c.pp))
    sections: Sections = {
        "model": _model_values(model, size, gpus),
        "rollout": _rollout_values(response, context, dp, gpus),
        "algo": _algo_values(),
        "trainer": _trainer_values(c, sample, gpus),
        "eval": {
            "interval": Value(20, "train steps"),
            "prompts": Value(512 if gpus else 64, "held-out prompts"),
        },
        "parallel": {
            "tp": Value(c.tp, "tensor parallelism, within a node"),
            "pp": Value(c.pp, "pipeline stages"),
            "dp": Value(dp, "data parallelism: the remaining GPUs" if gpus else "data parallelism"),
        },
        "engine": _engine_values(c, size, gpus),
        "launch": _launch_values(gpus, memory),
    }
    if hf.experts:
        sections["parallel"]["ep"] = Value(c.ep, f"{hf.experts // c.ep} of {hf.experts} experts per rank")
        sections["parallel"]["etp"] = Value(1, "experts are not divided by tensor parallelism")
        sections["trainer"]["replay"] = Value("engine", "the trainer uses the experts that the engine chose")
        sections["engine"]["return_routes"] = Value(True, "needed by trainer.replay")
    return sections


def _model_values(model: Path, size: ModelSize, gpus: int) -> dict[str, Value]:
    """Return the values of the section `model`."""
    parameters = f"{size.total / 1e9:.3g} B parameters, {size.experts / 1e9:.3g} B of them in routed experts"
    if gpus:
        dtype = Value("bfloat16", "dtype of the model's pretraining; the optimizer has float32 weights")
    else:
        dtype = Value("float32", "a CPU computes bfloat16 no faster")
    return {"path": Value(str(model), parameters), "dtype": dtype}


def _rollout_values(response: int, context: int, dp: int, gpus: int) -> dict[str, Value]:
    """Return the values of the section `rollout`, with a number of groups that is divisible over the ranks.

    Args:
        response: largest response length in tokens.
        context: context length of the model in tokens.
        dp: data-parallel size.
        gpus: number of GPUs.
    """
    group_size = GROUP_SIZE if gpus else 8
    divisor = dp // math.gcd(dp, group_size)
    groups = max(1, round((GROUPS_PER_STEP if gpus else 4) / divisor)) * divisor
    return {
        "groups_per_step": Value(groups, "prompts per train step"),
        "group_size": Value(group_size, "responses per prompt; their mean reward is the baseline of GRPO"),
        "over_provision": Value(OVER_PROVISION, "APRIL: start more groups, interrupt and resume the rest"),
        "max_staleness": Value(4, "train steps after which an interrupted response is dropped"),
        "max_response_tokens": Value(response, f"the model's context has {context} tokens"),
    }


def _algo_values() -> dict[str, Value]:
    """Return the values of the section `algo`."""
    return {
        "advantage": Value(
            "grpo", "the method with most published recipes; docs/algorithms.md has the others"
        ),
        "loss": Value([{"name": "clip", "clip_low": 0.2, "clip_high": 0.28}], "clip-higher, as in DAPO"),
        "corrections": Value([{"name": "tis", "cap": 2.0}], "engine and trainer round differently"),
        "anchor": Value("behaviour", "the policy that sampled each token, exact for interrupted responses"),
    }


def _trainer_values(c: Candidate, sample: int, gpus: int) -> dict[str, Value]:
    """Return the values of the section `trainer`.

    Args:
        c: the layout.
        sample: largest number of tokens of a sample, with its prompt.
        gpus: number of GPUs.
    """
    if c.offload:
        offload_reason = "optimizer states in host memory, because they do not fit the GPU"
    else:
        offload_reason = "optimizer states beside the weights"
    return {
        "lr": Value(
            1e-6, "usual for full training of a pretrained model; above 1e-5 runs lose what was learned"
        ),
        "warmup_steps": Value(10, "Adam's second moments are unknown at the start"),
        "token_budget": Value(
            max(16384 if gpus else 2048, sample), f"tokens per micro-batch: one sample has up to {sample}"
        ),
        "recompute": Value(["layer"], "activations of a layer are computed again in the backward pass"),
        "offload_optimizer": Value(c.offload, offload_reason),
        "checkpoint_every": Value(20, "train steps"),
    }


def _engine_values(c: Candidate, size: ModelSize, gpus: int) -> dict[str, Value]:
    """Return the values of the section `engine`, without the KV pool."""
    if gpus:
        deterministic = Value(False, "faster kernels; tokens then depend on the batch")
    else:
        deterministic = Value(True, "the same seed gives the same tokens")
    return {
        "count": Value(
            max(1, gpus // c.engine_tp), "as many as the GPUs hold" if gpus else "beside the trainer"
        ),
        "tp": Value(c.engine_tp, f"holds {2 * size.total / 1e9:.3g} GB of weights and a KV pool"),
        "deterministic": deterministic,
    }


def _launch_values(gpus: int, memory: float) -> dict[str, Value]:
    """Return the values of the section `launch`. `memory`: memory of a GPU in GB."""
    nodes, per_node = max(1, -(-gpus // GPUS_PER_NODE)), min(gpus, GPUS_PER_NODE)
    shared = "the same GPUs" if gpus else "this host"
    values = {
        "nodes": Value(nodes, f"of {per_node} GPUs" if gpus else "this host"),
        "gpus_per_node": Value(per_node, ""),
        "placement": Value("colocated", f"trainer and engines take turns on {shared}"),
    }
    if gpus:
        values["gpu_memory_gb"] = Value(memory, "memory of one GPU, by which the KV pool is sized")
        values["release_memory"] = Value(True, "engines free their memory while the trainer works")
    if nodes > 1:
        values["backend"] = Value("slurm", "several nodes; `ray` works as well")
    return values


def _add_pool(sections: Sections, config: Config, size: ModelSize) -> None:
    """Add the values of the KV pool to `sections`: the share of memory for it, and the number of requests it holds.

    Args:
        sections: all other values.
        config: config with these values.
        size: the model.
    """
    in_flight = engine_samples(config)
    held_samples = max(1, samples_held(config, budget(config, size).pool_tokens))
    if config.launch.gpus_per_node:
        engine = config.engine.model_copy(update={"max_running_requests": held_samples})  # fewer CUDA graphs
        b = budget(config.model_copy(update={"engine": engine}), size)
        sections["engine"]["memory_fraction"] = Value(
            config.engine.memory_fraction,
            f"leaves {b.kv_pool / GB:.3g} GB per GPU, {b.pool_tokens} tokens, to the KV pool",
        )
    sections["engine"]["max_running_requests"] = Value(
        held_samples,
        f"of {in_flight} samples in flight, as many as the pool holds with long-tailed response lengths"
        if held_samples < in_flight
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
    """Return the validated config with these values and this section `data`.

    Raises:
        UserError: a value is invalid.
    """
    values = {name: {field: v.value for field, v in fields.items()} for name, fields in sections.items()}
    try:
        return Config.model_validate(values | ({"data": data} if data else {}))
    except ValidationError as e:
        raise UserError(explain_error(e, Config)) from None


def _scalar_or_flow(value: Any) -> str:
    """Return a value as YAML on one line: a scalar, or a list or mapping in flow style."""
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
