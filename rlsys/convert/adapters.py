"""The adapters of a model (LoRA, Hu et al. 2021): which matrices have one, and how its factors are called. No torch.

A matrix W `[out, in]` of a Hugging Face folder acts as W + alpha / rank * B A: A `[rank, in]`, B `[out, rank]`.
The factors are entries as those of the name table, so that they are cut, gathered and numbered as weights are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from rlsys.config import Config
from rlsys.config.trainer import LoraConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Rule
from rlsys.convert.table import Entry, entries, is_matrix
from rlsys.core.errors import UserError

ADAPTERS = "adapters."
"""Begins megatron's names of the factors, and their keys in a checkpoint."""


_SERVED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Pair:
    """The factors A and B of one Hugging Face matrix. `part`: which of the matrices of its megatron parameter."""

    a: Entry
    b: Entry
    part: int


def adapted(hf: HFConfig, lora: LoraConfig) -> Iterator[tuple[Entry, list[Pair]]]:
    """Every parameter with an adapter for at least one of its matrices, in the name table's order."""
    for entry in entries(hf):
        if is_matrix(entry) and (pairs := _pairs(entry, lora)):
            yield entry, pairs


def factors(hf: HFConfig, lora: LoraConfig) -> Iterator[Entry]:
    """A and B of every adapter; their Hugging Face names are those of PEFT's files."""
    for _, pairs in adapted(hf, lora):
        for pair in pairs:
            yield from (pair.a, pair.b)


def matrices(hf: HFConfig) -> list[str]:
    """What `trainer.lora.targets` may name."""
    return list(dict.fromkeys(_last(name) for e in entries(hf) if is_matrix(e) for name in e.hf))


def check_lora(config: Config, hf: HFConfig) -> None:
    """Raises UserError for adapters that this model, or this layout of it, cannot have."""
    lora, path = config.trainer.lora, config.model.path
    if lora is None:
        return
    if hf.delta is not None:
        raise UserError(f"trainer.lora: adapters were never tried with a gated delta net, which {path} has")
    known = matrices(hf)
    for target in lora.targets or ():
        if target not in known:
            near = difflib.get_close_matches(target, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"trainer.lora.targets names {target}: expected some of {', '.join(known)}, which {path} has{hint}"
            )
    of_experts = any(entry.expert is not None for entry, _ in adapted(hf, lora))
    if of_experts and hf.family.stacks:
        stacked = {_last(name) for entry in entries(hf) if entry.expert is not None for name in entry.hf}
        of_attention = [name for name in known if name not in stacked]
        raise UserError(
            f"trainer.lora.targets: the experts of {path} are stacked in one tensor, which PEFT has no "
            f"adapters of this kind for; expected targets among {', '.join(of_attention)}"
        )
    if config.weights.method == "adapter" and hf.family.architecture not in _SERVED:
        raise UserError(
            f"weights.method = adapter: expected one of {', '.join(_SERVED)}, {path} is {hf.family.architecture}; "
            "SGLang's adapters were tried with these only. Use tensor"
        )
    if of_experts and config.parallel.expert_tp > config.parallel.tp:
        raise UserError(
            f"parallel.etp = {config.parallel.expert_tp} with adapters of experts: expected at most parallel.tp = "
            f"{config.parallel.tp}, for megatron-core would count the gradients of ranks that share one twice"
        )


def _last(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> q_proj"""
    return name.split(".")[-2]


def _pairs(entry: Entry, lora: LoraConfig) -> list[Pair]:
    found = []
    for part, (pattern, (name, (out, width))) in enumerate(zip(entry.rule.hf, entry.hf.items(), strict=True)):
        if lora.targets is None or _last(name) in lora.targets:
            a = _factor(entry, pattern, name, "A", (lora.rank, width))
            found.append(Pair(a, _factor(entry, pattern, name, "B", (out, lora.rank)), part))
    return found


def _factor(entry: Entry, pattern: str, name: str, which: str, shape: tuple[int, ...]) -> Entry:
    """A has the matrix's columns, B its rows: each is cut where the matrix is cut along these."""
    axis = 1 if which == "A" else 0

    def named(name: str) -> str:
        return f"{name.removesuffix('weight')}lora_{which}.weight"

    # torch takes no dots in the names of parameters.
    megatron = ADAPTERS + named(pattern).replace(".", "/")
    rule = Rule(megatron, {named(pattern): ""}, cut=axis if entry.rule.cut == axis else None)
    held = {f"base_model.model.{named(name)}": shape}
    return Entry(rule, megatron.format(l=entry.layer, e="{e}"), held, entry.layer, entry.expert)
