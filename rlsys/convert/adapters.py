"""Adapters of a model (LoRA, Hu et al. 2021): the adapted matrices, and the names of their factors. No torch.

An adapter changes a matrix W `[out, in]` of a Hugging Face folder to W + alpha / rank * B A, with the factors
A `[rank, in]` and B `[out, rank]`. Factors are entries like those of the name table, so that ranks shard and gather
them like weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import Config
from rlsys.config.trainer import LoraConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Rule
from rlsys.convert.table import Entry, entries, is_matrix
from rlsys.core.errors import UserError

ADAPTERS = "adapters."
"""Prefix of the factors' names in Megatron, and of their keys in a checkpoint."""


_ADAPTER_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with which SGLang's adapters are tested."""


@dataclass(frozen=True)
class Pair:
    """Factors A and B of one Hugging Face matrix. `part`: index of the matrix in its Megatron parameter."""

    a: Entry
    b: Entry
    part: int


def adapted(hf: HFConfig, lora: LoraConfig) -> Iterator[tuple[Entry, list[Pair]]]:
    """Yield (entry, factors of its adapted matrices) of every parameter with an adapted matrix.

    The order is that of the name table.
    """
    for entry in entries(hf):
        if is_matrix(entry) and (pairs := _pairs(entry, lora)):
            yield entry, pairs


def factors(hf: HFConfig, lora: LoraConfig) -> Iterator[Entry]:
    """Yield the entries of A and B of every adapter. Their Hugging Face names are those in PEFT's files."""
    for _, pairs in adapted(hf, lora):
        for pair in pairs:
            yield from (pair.a, pair.b)


def matrices(hf: HFConfig) -> list[str]:
    """Return the names that `trainer.lora.targets` accepts."""
    return list(dict.fromkeys(_last(name) for e in entries(hf) if is_matrix(e) for name in e.hf))


def check_lora(config: Config, hf: HFConfig) -> None:
    """Check that the model, the parallel layout and the engines support trainer.lora.

    Raises:
        UserError: One of them does not.
    """
    lora, path = config.trainer.lora, config.model.path
    if lora is None:
        return
    if hf.delta is not None:
        raise UserError(
            f"trainer.lora: adapters are untested with the gated delta net of {path}; expected null"
        )
    _check_targets(lora, hf, path)
    adapts_experts = any(entry.expert is not None for entry, _ in adapted(hf, lora))
    if adapts_experts and hf.family.stacks:
        expert_targets = {
            _last(name) for entry in entries(hf) if entry.expert is not None for name in entry.hf
        }
        other_targets = [name for name in matrices(hf) if name not in expert_targets]
        raise UserError(
            f"trainer.lora.targets: the experts of {path} are stacked in one tensor, for which PEFT has no adapters; "
            f"expected targets among {', '.join(other_targets)}"
        )
    if config.weights.method == "adapter" and hf.family.architecture not in _ADAPTER_ARCHITECTURES:
        raise UserError(
            f"weights.method = adapter: {path} is {hf.family.architecture}; expected one of "
            f"{', '.join(_ADAPTER_ARCHITECTURES)}, with which SGLang's adapters are tested, or weights.method = auto"
        )
    if adapts_experts and config.parallel.expert_tp > config.parallel.tp:
        raise UserError(
            f"parallel.etp = {config.parallel.expert_tp} with adapters of experts: expected at most parallel.tp = "
            f"{config.parallel.tp}; megatron-core's gradient norm would count replicas of an adapter several times"
        )


def _check_targets(lora: LoraConfig, hf: HFConfig, path: Path) -> None:
    names = matrices(hf)
    for target in lora.targets or ():
        if target not in names:
            matches = difflib.get_close_matches(target, names, n=1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            raise UserError(
                f"trainer.lora.targets contains {target}; expected matrices of {path}: {', '.join(names)}{hint}"
            )


def _last(name: str) -> str:
    """Return the module of a weight's name: `q_proj` for `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2]


def _pairs(entry: Entry, lora: LoraConfig) -> list[Pair]:
    """Return the factors of the entry's adapted matrices."""
    pairs = []
    for part, (pattern, (name, (out, width))) in enumerate(zip(entry.rule.hf, entry.hf.items(), strict=True)):
        if lora.targets is None or _last(name) in lora.targets:
            a = _factor(entry, pattern, name, "A", (lora.rank, width))
            pairs.append(Pair(a, _factor(entry, pattern, name, "B", (out, lora.rank)), part))
    return pairs


def _factor(entry: Entry, pattern: str, name: str, letter: str, shape: tuple[int, ...]) -> Entry:
    """Return the entry of a factor of a matrix.

    Args:
        entry: The matrix's entry.
        pattern: Name of the matrix in the rule, with placeholders.
        name: Name of the matrix in the folder.
        letter: "A" or "B". A is sharded if the matrix's columns are, B if its rows are.
        shape: Shape of the factor.
    """
    axis = 1 if letter == "A" else 0

    def factor_name(name: str) -> str:
        return f"{name.removesuffix('weight')}lora_{letter}.weight"

    # Torch allows no dots in the names of parameters.
    megatron = ADAPTERS + factor_name(pattern).replace(".", "/")
    rule = Rule(
        megatron, {factor_name(pattern): ""}, shard_axis=axis if entry.rule.shard_axis == axis else None
    )
    shapes = {f"base_model.model.{factor_name(name)}": shape}
    return Entry(rule, megatron.format(l=entry.layer, e="{e}"), shapes, entry.layer, entry.expert)
