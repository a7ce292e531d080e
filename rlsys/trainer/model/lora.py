"""Low-rank adapters of the layers of this rank's part of the model (LoRA, Hu et al. 2021).

    y = W x + alpha / rank * B A x      W is frozen; A is initialised at random, B with zeros

Each matrix of the Hugging Face folder has a separate pair of factors: query, key and value, gate and up, and the
matrices of each expert. Ranks shard B if they shard the rows of the matrix, and A if they shard its columns.

Shapes: T tokens of this rank, T' tokens after the exchange between ranks under sequence parallelism, r LoRA rank. A
Megatron parameter `[out, in]` consists of one or more matrices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear, pad

from rlsys.config.trainer import LoraConfig
from rlsys.convert.adapters import ADAPTERS, adapted
from rlsys.convert.config import HFConfig
from rlsys.convert.layout import to_megatron
from rlsys.convert.rules import Rule
from rlsys.convert.table import Entry, entries
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.model.weights import LocalWeights, shard, shard_group


class Factors(Module):
    """Module with the factors of one model chunk, which describes them for checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = {}
        """Entry of the name table for each parameter, by the parameter's name."""

    def add(self, name: str, entry: Entry, value: Tensor) -> Parameter:
        """Register a factor and return its parameter.

        Args:
            name: Megatron's name of the factor. An expert has its index on this rank.
            entry: Entry of the name table.
            value: Initial value of this rank's part.
        """
        short_name = name.removeprefix(ADAPTERS)
        parameter = Parameter(value)
        self.register_parameter(short_name, parameter)
        self.entries[short_name] = entry
        return parameter

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """Describe the factors for a checkpoint.

        Keys contain the expert's index in the whole model, so that any layout can load them.
        """
        return {
            prefix + name: self._shard(f"{prefix}{next(iter(entry.hf))}", entry, self.get_parameter(name))
            for name, entry in self.entries.items()
        }

    @staticmethod
    def _shard(key: str, entry: Entry, parameter: Parameter) -> ShardedTensor:
        group, copy = shard_group(entry.rule), _copy_number(entry)
        if entry.rule.shard_axis is None:
            return ShardedTensor.from_rank_offsets(key, parameter, replica_id=(0, group.rank(), copy))
        rank_offset = (entry.rule.shard_axis, group.rank(), group.size())
        return ShardedTensor.from_rank_offsets(key, parameter, rank_offset, replica_id=(0, 0, copy))


def _copy_number(entry: Entry) -> int:
    """Return the index of this rank among the data-parallel copies of a parameter."""
    if entry.expert is not None:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


@dataclass(frozen=True)
class Adapter:
    """Adapter of one Megatron parameter.

    Attributes:
        rule: The parameter's rule in the name table.
        hf: The model's configuration, with the number of key-value heads of this rank.
        factors: A `[r, in]` and B `[rows, r]` of each matrix of the parameter; None for a matrix without an adapter.
        rows: Number of rows of each matrix on this rank.
        scale: alpha / rank.
        exchanges: Whether tensor-parallel ranks exchange their tokens in the layer (sequence parallelism).
    """

    rule: Rule
    hf: HFConfig
    factors: Sequence[tuple[Parameter, ...] | None]
    rows: Sequence[int]
    scale: float
    exchanges: bool

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return the factors of the whole parameter: A `[n r, in]` and B `[out, n r]` of n adapted matrices.

        Each row of B has zeros in the columns of other matrices.
        """
        pairs = [pair for pair in self.factors if pair is not None]
        rank = pairs[0][0].shape[0]
        position = 0
        parts = []
        for pair, rows in zip(self.factors, self.rows, strict=True):
            if pair is None:
                parts.append(pairs[0][1].new_zeros(rows, rank * len(pairs)))
            else:
                parts.append(pad(pair[1], (position * rank, (len(pairs) - 1 - position) * rank)))
                position += 1
        return torch.cat([a for a, _ in pairs]), to_megatron(self.rule, parts, self.hf)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the term that is added to the layer's output: `[T, ..., in]` -> `[T', ..., out]`."""
        a, b = self.blocks()
        low = linear(x, a)
        if self.exchanges and self.rule.shard_axis == 0:
            low = gather_from_sequence_parallel_region(low)
        elif self.exchanges and self.rule.shard_axis == 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        return linear(low, b) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        """Return the parameter's weight `[out, in]` with the adapter added, in the dtype of `weight`."""
        a, b = (block.detach().float() for block in self.blocks())
        return torch.addmm(weight.float(), b, a, alpha=self.scale).to(weight.dtype)


class Lora:
    """Owner of the adapters of a rank's model."""

    def __init__(self, chunks: Chunks, hf: HFConfig, config: LoraConfig, seed: int) -> None:
        """Freeze the model and add adapters to its layers. Collective; must precede the wrap in Megatron's DDP.

        Args:
            chunks: This rank's model chunks.
            hf: The model's configuration.
            config: Rank, alpha and adapted layers.
            seed: Seed of the initial values.
        """
        self.chunk_factors = [Factors() for _ in chunks.modules]
        self._adapters: dict[str, Adapter] = {}
        self._shared: list[Parameter] = []
        """Factors of experts that are not sharded, so that all ranks of the expert's matrix hold them."""
        for _, parameter in chunks.named_parameters():
            parameter.requires_grad_(False)
        self.base = fingerprint(chunks, hf)
        """Fingerprint of the frozen base model."""
        local = LocalWeights(chunks, hf)
        layers = dict(_layers(chunks))
        for entry, pairs in adapted(hf, config):
            for name in local.local_names(entry):
                chunk, layer = layers[name]
                weight = local[name]
                factor_pairs: dict[int, tuple[Parameter, ...]] = {}
                for pair in pairs:
                    a = shard(first_a(pair.a, seed), pair.a.rule)
                    b = shard(torch.zeros(_shape(pair.b)), pair.b.rule)
                    factor_pairs[pair.part] = tuple(
                        self._add_factor(
                            chunk, local.candidates(factor_entry)[0], factor_entry, value.to(weight)
                        )
                        for factor_entry, value in ((pair.a, a), (pair.b, b))
                    )
                self._adapters[name] = adapter = _adapter(entry, hf, factor_pairs, config)
                layer.register_forward_hook(_adapter_hook(adapter))
        for module, factors in zip(chunks.modules, self.chunk_factors, strict=True):
            module.adapters = factors
            if module.pre_process:
                module.embedding.register_forward_hook(_require_input_gradients)

    def _add_factor(self, chunk: int, name: str, entry: Entry, value: Tensor) -> Parameter:
        """Register a factor in chunk `chunk`, with the attributes that Megatron requires of its parameter."""
        parameter: Any = self.chunk_factors[chunk].add(name, entry, value)
        axis, group = entry.rule.shard_axis, shard_group(entry.rule)
        if entry.expert is not None:
            parameter.allreduce = False
            if axis is None and group.size() > 1:
                self._shared.append(parameter)
        # A rank's gradient covers only its own tokens, or its own part of the other factor: Megatron sums these.
        parameter.sequence_parallel = entry.expert is None and axis is None and group.size() > 1
        # In the gradient norm, Megatron counts a marked parameter on every rank, and an unmarked one only on the
        # first tensor-parallel rank. An expert's factor that is not sharded must count on the first rank of its
        # group.
        if axis is not None or (entry.expert is not None and group.rank() == 0):
            set_tensor_model_parallel_attributes(parameter, True, axis or 0, 1)
        return parameter

    def named_factors(self) -> Iterator[tuple[str, Entry, Parameter]]:
        """Iterate over (PEFT name, entry, parameter) of this rank's factors."""
        for factors in self.chunk_factors:
            for short_name, entry in factors.entries.items():
                yield next(iter(entry.hf)), entry, factors.get_parameter(short_name)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter merged, or the weight itself if it has no adapter."""
        adapter = self._adapters.get(name)
        return weight if adapter is None else adapter.merged(weight)

    def sum_shared_gradients(self) -> None:
        """Sum the partial gradients of the experts' factors that are not sharded. Collective.

        Call it once per update, after Megatron has reduced gradients over data-parallel ranks.
        """
        if not self._shared:
            return
        gradients: list[Tensor] = [parameter.main_grad for parameter in self._shared]  # type: ignore[attr-defined]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def first_a(entry: Entry, seed: int) -> Tensor:
    """Return the initial A `[r, in]`, uniform between -1 / sqrt(in) and 1 / sqrt(in) as in PEFT.

    It depends only on the factor's name and the seed, not on the layout.
    """
    name = hashlib.sha256(f"{seed} {next(iter(entry.hf))}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name[:7]))
    shape = _shape(entry)
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def _shape(entry: Entry) -> tuple[int, ...]:
    """Return the full shape of a factor."""
    return next(iter(entry.hf.values()))


def _adapter(
    entry: Entry, hf: HFConfig, factor_pairs: dict[int, tuple[Parameter, ...]], config: LoraConfig
) -> Adapter:
    """Return the adapter of a parameter. `factor_pairs`: its factors, by index of the matrix in the parameter."""
    ranks = shard_group(entry.rule).size() if entry.rule.shard_axis == 0 else 1
    return Adapter(
        entry.rule,
        replace(hf, kv_heads=hf.kv_heads // ranks),
        [factor_pairs.get(part) for part in range(len(entry.hf))],
        [shape[0] // ranks for shape in entry.hf.values()],
        config.alpha / config.rank,
        exchanges=entry.expert is None and parallel_state.get_tensor_model_parallel_world_size() > 1,
    )


def _layers(chunks: Chunks) -> Iterator[tuple[str, tuple[int, Module]]]:
    """Iterate over (weight name, (chunk index, layer that has the weight))."""
    for i, module in enumerate(chunks.modules):
        for name, layer in module.named_modules():
            yield chunks.global_name(module, f"{name}.weight"), (i, layer)


def _adapter_hook(
    adapter: Adapter,
) -> Callable[[Module, tuple[Tensor, ...], tuple[Tensor, Any]], tuple[Tensor, Any]]:
    """Return a forward hook that adds the adapter's term to a layer's output."""

    def hook(_: Module, args: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        y, bias = output
        return y + adapter(args[0]), bias

    return hook


def _require_input_gradients(_: Module, __: Any, output: Tensor) -> Tensor:
    """Make the embeddings require gradients: Megatron recomputes layers only in a backward pass through them."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


# -- fingerprint of the base model ----------------------------------------------------------------------------

_CHUNK_ELEMENTS = 2**22
"""Number of elements that are hashed at a time; temporary copies take 8 bytes per element."""


def fingerprint(chunks: Chunks, hf: HFConfig) -> int:
    """Return a 64-bit hash of all weights of the model, which is equal in every layout. Collective.

    It is a sum of hashes of the elements, so that ranks can add their parts. It does not detect that two elements of
    a tensor were swapped.
    """
    local = LocalWeights(chunks, hf)
    total = torch.zeros(1, dtype=torch.int64)
    for number, entry in enumerate(entries(hf)):
        _, name, _ = local.locate(entry)
        is_first = entry.rule.shard_axis is not None or shard_group(entry.rule).rank() == 0
        if name in local.local_names(entry) and is_first and _copy_number(entry) == 0:
            total += _hash_sum(local[name].detach(), number)
    dist.all_reduce(total)
    return int(total)


def _hash_sum(weight: Tensor, number: int) -> int:
    """Return the sum of the elements' hashes, as a signed 64-bit integer. `number`: number of the entry."""
    bits = weight.reshape(-1).view(torch.int32 if weight.element_size() == 4 else torch.int16)
    total = 0
    for part in bits.split(_CHUNK_ELEMENTS):
        x = (part.to(torch.int64) + (number << 33)) * 0x9E3779B97F4A7C1
        x = (x ^ (x >> 29)) * 0x3F58476D1CE4E5B9
        total += int((x ^ (x >> 32)).sum())
    return (total + 2**63) % 2**64 - 2**63
