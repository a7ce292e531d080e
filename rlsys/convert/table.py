"""All parameters of a whole model in a fixed order, from the name table and a config. No tensors, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlsys.convert.config import HFConfig
from rlsys.convert.rows import M, P
from rlsys.convert.rules import Rule, Stack
from rlsys.core.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One parameter of a whole model: its Megatron name, and the HF tensors (name -> shape) that it consists of.

    `megatron` has a placeholder `{e}` for the expert's number, because each expert-parallel rank counts its own.
    """

    rule: Rule
    megatron: str
    hf: dict[str, tuple[int, ...]]
    layer: int | None = None
    expert: int | None = None

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.hf.values())


def entries(config: HFConfig) -> Iterator[Entry]:
    """Yield all parameters of a whole model in a fixed order: embedding, layer by layer, head, trained MTP layers."""
    rules = config.family.rules
    first = next(i for i, rule in enumerate(rules) if rule.per_layer)
    last = max(i for i, rule in enumerate(rules) if rule.per_layer)
    for rule in rules[:first]:
        yield _entry(rule, config)
    for layer in range(config.layers):
        for rule in config.rules(layer):
            for expert in range(config.experts) if rule.per_expert else [None]:
                yield _entry(rule, config, layer, expert)
    for layer in prediction_layers(config) if config.mtp else ():
        yield from _prediction_entries(config, layer)
    for rule in rules[last + 1 :]:
        if not (config.tied and rule.megatron == "output_layer.weight"):
            yield _entry(rule, config)


def _entry(rule: Rule, config: HFConfig, layer: int | None = None, expert: int | None = None) -> Entry:
    shapes = {
        config.in_folder(name).format(l=layer, e=expert): config.shape(letters)
        for name, letters in rule.hf.items()
    }
    return Entry(rule, rule.megatron.format(l=layer, e="{e}"), shapes, layer, expert)


def prediction_layers(config: HFConfig) -> range:
    """Return the layer numbers of the layers for multi-token prediction in folders."""
    return range(config.layers, config.layers + config.prediction_layers)


def _prediction_entries(config: HFConfig, layer: int) -> Iterator[Entry]:
    """Yield the entries of one layer for multi-token prediction, which megatron counts from 0."""
    layer_rules = [
        replace(r, megatron=r.megatron.replace(M, P + "transformer_layer.")) for r in config.rules(layer)
    ]
    for rule in (*config.family.mtp, *layer_rules):
        for expert in range(config.experts) if rule.per_expert else [None]:
            entry = _entry(rule, config, layer, expert)
            name = rule.megatron.format(l=layer - config.layers, e="{e}")
            yield replace(entry, megatron=name)


def is_matrix(entry: Entry) -> bool:
    """Return whether an entry consists of a layer's matrices, for Muon and adapters. A router is none."""
    of_layer = entry.layer is not None and "router" not in entry.rule.megatron
    return of_layer and all(len(shape) == 2 and min(shape) > 1 for shape in entry.hf.values())


def engine_name_of(entry: Entry, hf: HFConfig) -> str:
    """Return SGLang's name of the tensor that holds this parameter. Stacked experts have other names (`slots`)."""
    if entry.rule.engine_name:
        return entry.rule.engine_name.format(l=entry.layer)
    first = hf.in_table(next(iter(entry.hf)))
    if entry.expert is not None:
        kernel = "w13" if entry.rule.layout == "gate_up" else "w2"
        return f"{first[: first.index('.experts.')]}.experts.{kernel}_weight"
    compressed = (
        hf.latent is not None and hf.latent.q_rank is not None
    )  # then it holds both first projections
    if ".q_a_proj." in first or (compressed and ".kv_a_proj_with_mqa." in first):
        return re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa.", first)
    if entry.rule.layout == "qkv":
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if entry.rule.layout == "gate_up" else first


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def carried_names(config: HFConfig, present: frozenset[str]) -> frozenset[str]:
    """Return the tensors that are carried along (rlsys.convert.carried).

    They are those of the family, and layers for multi-token prediction; where these are trained, only the copies
    that they share with the model.
    """
    layers, copies = prediction_layers(config), shared_names(config)

    def in_prediction_layer(name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) in layers and (not config.mtp or name in copies)

    return frozenset(
        name
        for name in present
        if name.startswith(config.family.carried) or in_prediction_layer(config.in_table(name))
    )


def shared_names(config: HFConfig) -> dict[str, str]:
    """Return the copies that folders may hold in layers for multi-token prediction -> the model's tensor."""
    return {
        f"model.layers.{layer}.{copy}.weight": f"{original}.weight"
        for layer in prediction_layers(config)
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head"))
    }


def check_names(config: HFConfig, present: frozenset[str], source: str) -> None:
    """Check that `present` has exactly the model's tensors.

    Raises:
        UserError: a tensor is missing or unknown; the message has the first one.
    """
    expected = {name for entry in entries(config) for name in entry.hf}
    present -= carried_names(config, present)
    if config.tied:
        present -= {"lm_head.weight"}
    if missing := sorted(expected - present):
        raise UserError(f"{source}: {len(missing)} tensor(s) are missing, first: {missing[0]}")
    if extra := sorted(present - expected):
        raise UserError(f"{source}: {len(extra)} tensor(s) do not belong to the model, first: {extra[0]}")


@dataclass(frozen=True)
class Slot:
    """Slot of an expert's tensor: part `part` of expert `expert` in the tensor `name`."""

    name: str
    stack: Stack
    expert: int
    part: int


def stacked_names(hf: HFConfig) -> dict[str, Stack]:
    """Return the stack of every layer with experts, with that layer's names; empty if the family stacks none."""

    def in_layer(name: str, layer: int) -> str:
        return hf.in_folder(name).replace("{l}", str(layer))

    return {
        in_layer(name, layer): replace(stack, parts=tuple(in_layer(p, layer) for p in stack.parts))
        for layer, moe in enumerate(hf.moe_layers)
        if moe
        for name, stack in hf.family.stacks.items()
    }


def slots(hf: HFConfig) -> dict[str, Slot]:
    """Return the slots by the table's name of an expert's tensor."""
    return {
        part.format(e=expert): Slot(name, stack, expert, i)
        for name, stack in stacked_names(hf).items()
        for expert in range(hf.experts)
        for i, part in enumerate(stack.parts)
    }
