"""Parameters of a model in a fixed order, from the name table and config.json. No torch."""

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
    """A parameter of the model.

    Attributes:
        rule: The parameter's rule in the name table.
        megatron: Name in Megatron. It contains `{e}` in place of the expert's index, which differs between
            expert-parallel ranks.
        hf: Shapes of the Hugging Face tensors of which the parameter consists, by name.
        layer: Index of the layer in Hugging Face folders; None: the parameter belongs to no layer.
        expert: Index of the expert; None: the parameter belongs to no expert.
    """

    rule: Rule
    megatron: str
    hf: dict[str, tuple[int, ...]]
    layer: int | None = None
    expert: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(math.prod(shape) for shape in self.hf.values())


def entries(config: HFConfig) -> Iterator[Entry]:
    """Yield all parameters of a model in a fixed order: embedding, layers, trained MTP layers, final norm, head."""
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
    """Return the entry of a rule for a layer and an expert."""
    shapes = {
        config.in_folder(name).format(l=layer, e=expert): config.shape(letters)
        for name, letters in rule.hf.items()
    }
    return Entry(rule, rule.megatron.format(l=layer, e="{e}"), shapes, layer, expert)


def prediction_layers(config: HFConfig) -> range:
    """Return the indices of the MTP layers in folders, which follow those of the model's layers."""
    return range(config.layers, config.layers + config.prediction_layers)


def _prediction_entries(config: HFConfig, layer: int) -> Iterator[Entry]:
    """Yield the entries of an MTP layer. `layer`: its index in folders; Megatron counts MTP layers from 0."""
    layer_rules = [
        replace(r, megatron=r.megatron.replace(M, P + "transformer_layer.")) for r in config.rules(layer)
    ]
    for rule in (*config.family.mtp, *layer_rules):
        for expert in range(config.experts) if rule.per_expert else [None]:
            entry = _entry(rule, config, layer, expert)
            name = rule.megatron.format(l=layer - config.layers, e="{e}")
            yield replace(entry, megatron=name)


def is_matrix(entry: Entry) -> bool:
    """Return whether an entry consists of matrices of a layer that Muon and adapters support.

    Routers, vectors and matrices with one row or column are excluded.
    """
    is_candidate = entry.layer is not None and "router" not in entry.rule.megatron
    return is_candidate and all(len(shape) == 2 and min(shape) > 1 for shape in entry.hf.values())


def engine_name_of(entry: Entry, hf: HFConfig) -> str:
    """Return the name in SGLang of the tensor that contains a parameter, except for stacked experts (see `slots`)."""
    if entry.rule.engine_name:
        return entry.rule.engine_name.format(l=entry.layer)
    first = hf.in_table(next(iter(entry.hf)))
    if entry.expert is not None:
        kernel = "w13" if entry.rule.layout == "gate_up" else "w2"
        return f"{first[: first.index('.experts.')]}.experts.{kernel}_weight"
    # With compressed queries, one tensor contains the first projections of queries and of keys and values.
    has_query_rank = hf.latent is not None and hf.latent.q_rank is not None
    if ".q_a_proj." in first or (has_query_rank and ".kv_a_proj_with_mqa." in first):
        return re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa.", first)
    if entry.rule.layout == "qkv":
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if entry.rule.layout == "gate_up" else first


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def carried_names(config: HFConfig, present: frozenset[str]) -> frozenset[str]:
    """Return the names of carried tensors (rlsys.convert.carried) among the names `present`.

    They are the family's carried tensors, and all tensors of untrained MTP layers. Of trained MTP layers, they are
    only the copies of the model's embedding and head.
    """
    layers = prediction_layers(config)
    copies = shared_names(config)

    def in_prediction_layer(name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) in layers and (not config.mtp or name in copies)

    return frozenset(
        name
        for name in present
        if name.startswith(config.family.carried) or in_prediction_layer(config.in_table(name))
    )


def shared_names(config: HFConfig) -> dict[str, str]:
    """Return the names of the model's embedding and head, by the names of their copies in MTP layers of folders."""
    return {
        f"model.layers.{layer}.{copy}.weight": f"{original}.weight"
        for layer in prediction_layers(config)
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head"))
    }


def check_names(config: HFConfig, present: frozenset[str], source: str) -> None:
    """Check that a folder contains exactly the model's tensors.

    Args:
        config: The model's configuration.
        present: Names of the folder's tensors in the name table.
        source: Path of the folder, for errors.

    Raises:
        UserError: A tensor is missing or unknown.
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
    """Location of an expert's tensor in a stack: part `part` of expert `expert` in the tensor `name`."""

    name: str
    stack: Stack
    expert: int
    part: int


def stacked_names(hf: HFConfig) -> dict[str, Stack]:
    """Return the stacks of all layers with experts, by name. Empty if the family does not stack experts.

    The names of their parts contain the layer and still {e}.
    """

    def in_layer(name: str, layer: int) -> str:
        return hf.in_folder(name).replace("{l}", str(layer))

    return {
        in_layer(name, layer): replace(stack, parts=tuple(in_layer(p, layer) for p in stack.parts))
        for layer, moe in enumerate(hf.moe_layers)
        if moe
        for name, stack in hf.family.stacks.items()
    }


def slots(hf: HFConfig) -> dict[str, Slot]:
    """Return the slot of each expert's tensor, by its name in the name table. Empty without stacks."""
    return {
        part.format(e=expert): Slot(name, stack, expert, i)
        for name, stack in stacked_names(hf).items()
        for expert in range(hf.experts)
        for i, part in enumerate(stack.parts)
    }
