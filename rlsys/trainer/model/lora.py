"""Low-rank adapters beside the layers of this rank's part of the model (LoRA, Hu et al. 2021).

    y = W x + alpha / rank * B A x      W stays as it is; A begins random, B with zeros

Each matrix of the Hugging Face folder has factors of its own: query, key and value three pairs, gate and up two, each
expert its own. They are cut over ranks as the matrix is: where its rows are cut, so is B; where its columns are, A.

Shapes: T tokens of this rank, and of T' after ranks have exchanged theirs (sequence parallelism); r rank; a megatron
parameter `[out, in]` of k matrices.
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
from rlsys.trainer.model.weights import LocalWeights, cutting_group, shard


class Factors(Module):
    """All factors of one chunk of the model: its adapters' parameters, and what a checkpoint says of them."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = {}
        """By the names of the parameters."""

    def add(self, name: str, entry: Entry, value: Tensor) -> Parameter:
        """`name`: megatron's, with this rank's number of an expert."""
        own = name.removeprefix(ADAPTERS)
        parameter = Parameter(value)
        self.register_parameter(own, parameter)
        self.entries[own] = entry
        return parameter

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """Keys have the expert's number in the whole model, so that any layout can load them."""
        return {
            prefix + name: self._shard(f"{prefix}{next(iter(entry.hf))}", entry, self.get_parameter(name))
            for name, entry in self.entries.items()
        }

    @staticmethod
    def _shard(key: str, entry: Entry, parameter: Parameter) -> ShardedTensor:
        group, copy = cutting_group(entry.rule), _copy_number(entry)
        if entry.rule.cut is None:
            return ShardedTensor.from_rank_offsets(key, parameter, replica_id=(0, group.rank(), copy))
        place = (entry.rule.cut, group.rank(), group.size())
        return ShardedTensor.from_rank_offsets(key, parameter, place, replica_id=(0, 0, copy))


def _copy_number(entry: Entry) -> int:
    """Of the data-parallel copies of a parameter, this rank's."""
    if entry.expert is not None:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


@dataclass(frozen=True)
class Adapter:
    """Of one megatron parameter. `factors`: A `[r, in]` and B `[rows, r]` of each of its matrices, None without an
    adapter; `rows`: of each matrix on this rank. `hf`: with the heads of this rank."""

    rule: Rule
    hf: HFConfig
    factors: Sequence[tuple[Parameter, ...] | None]
    rows: Sequence[int]
    scale: float
    exchanges: bool

    def blocks(self) -> tuple[Tensor, Tensor]:
        """A of all matrices `[n r, in]`, and B `[out, n r]`, in which each row has zeros for the other matrices."""
        held = [pair for pair in self.factors if pair is not None]
        rank, place, parts = held[0][0].shape[0], 0, []
        for pair, rows in zip(self.factors, self.rows, strict=True):
            if pair is None:
                parts.append(held[0][1].new_zeros(rows, rank * len(held)))
            else:
                parts.append(pad(pair[1], (place * rank, (len(held) - 1 - place) * rank)))
                place += 1
        return torch.cat([a for a, _ in held]), to_megatron(self.rule, parts, self.hf)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, ..., in]` -> `[T', ..., out]`, what is added to the layer's output."""
        a, b = self.blocks()
        low = linear(x, a)
        if self.exchanges and self.rule.cut == 0:
            low = gather_from_sequence_parallel_region(low)
        elif self.exchanges and self.rule.cut == 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        return linear(low, b) * self.scale

    def merged(self, weight: Tensor) -> Tensor:
        a, b = (each.detach().float() for each in self.blocks())
        return torch.addmm(weight.float(), b, a, alpha=self.scale).to(weight.dtype)


class Lora:
    """Owns the adapters of a rank's model."""

    def __init__(self, chunks: Chunks, hf: HFConfig, config: LoraConfig, seed: int) -> None:
        """Freezes the model and puts adapters beside its layers. Must precede DDP. Collective."""
        self.of_chunks = [Factors() for _ in chunks.modules]
        self._adapters: dict[str, Adapter] = {}
        self._shared: list[Parameter] = []
        """Factors of experts that are whole on all ranks of an expert's matrix."""
        for _, parameter in chunks.named_parameters():
            parameter.requires_grad_(False)
        self.base = fingerprint(chunks, hf)
        """Of the model under the adapters, see fingerprint."""
        local, layers = LocalWeights(chunks, hf), dict(_layers(chunks))
        for entry, pairs in adapted(hf, config):
            for name in local.here(entry):
                chunk, layer = layers[name]
                weight, made = local[name], {}
                for pair in pairs:
                    a = shard(first_a(pair.a, seed), pair.a.rule)
                    b = shard(torch.zeros(_shape(pair.b)), pair.b.rule)
                    made[pair.part] = tuple(
                        self._added(chunk, local.candidates(of)[0], of, value.to(weight))
                        for of, value in ((pair.a, a), (pair.b, b))
                    )
                self._adapters[name] = adapter = _adapter(entry, hf, made, config)
                layer.register_forward_hook(_adding(adapter))
        for module, factors in zip(chunks.modules, self.of_chunks, strict=True):
            module.adapters = factors
            if module.pre_process:
                module.embedding.register_forward_hook(_ask_for_gradients)

    def _added(self, chunk: int, name: str, entry: Entry, value: Tensor) -> Parameter:
        """A new parameter, with what megatron has to know of it."""
        parameter: Any = self.of_chunks[chunk].add(name, entry, value)
        cut, group = entry.rule.cut, cutting_group(entry.rule)
        if entry.expert is not None:
            parameter.allreduce = False
            if cut is None and group.size() > 1:
                self._shared.append(parameter)
        # Each rank's gradient is that of its own tokens, or of its own part of the other factor.
        parameter.sequence_parallel = entry.expert is None and cut is None and group.size() > 1
        # In the norm, a factor that ranks share counts once. Those of experts are on all ranks of other groups.
        if cut is not None or (entry.expert is not None and group.rank() == 0):
            set_tensor_model_parallel_attributes(parameter, True, cut or 0, 1)
        return parameter

    def named_factors(self) -> Iterator[tuple[str, Entry, Parameter]]:
        """Of this rank: PEFT's name, entry and parameter of each factor."""
        for factors in self.of_chunks:
            for own, entry in factors.entries.items():
                yield next(iter(entry.hf)), entry, factors.get_parameter(own)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight with its adapter; the weight itself where there is none."""
        adapter = self._adapters.get(name)
        return weight if adapter is None else adapter.merged(weight)

    def sum_shared_gradients(self) -> None:
        """Ranks that share an expert's matrix each have a part of the gradient of the factor that is not cut. Once an
        update, after megatron has reduced gradients over copies of the model. Collective."""
        if not self._shared:
            return
        gradients: list[Tensor] = [parameter.main_grad for parameter in self._shared]  # type: ignore[attr-defined]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def first_a(entry: Entry, seed: int) -> Tensor:
    """As PEFT begins: uniform up to 1 / sqrt(in). `[r, in]`, in any layout the same."""
    name = hashlib.sha256(f"{seed} {next(iter(entry.hf))}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name[:7]))
    shape = _shape(entry)
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def _shape(entry: Entry) -> tuple[int, ...]:
    return next(iter(entry.hf.values()))


def _adapter(
    entry: Entry, hf: HFConfig, made: dict[int, tuple[Parameter, ...]], config: LoraConfig
) -> Adapter:
    ranks = cutting_group(entry.rule).size() if entry.rule.cut == 0 else 1
    return Adapter(
        entry.rule,
        replace(hf, kv_heads=hf.kv_heads // ranks),
        [made.get(part) for part in range(len(entry.hf))],
        [shape[0] // ranks for shape in entry.hf.values()],
        config.alpha / config.rank,
        exchanges=entry.expert is None and parallel_state.get_tensor_model_parallel_world_size() > 1,
    )


def _layers(chunks: Chunks) -> Iterator[tuple[str, tuple[int, Module]]]:
    """Of each weight's name: its chunk, and the layer that has it."""
    for i, module in enumerate(chunks.modules):
        for name, layer in module.named_modules():
            yield chunks.whole_name(module, f"{name}.weight"), (i, layer)


def _adding(
    adapter: Adapter,
) -> Callable[[Module, tuple[Tensor, ...], tuple[Tensor, Any]], tuple[Tensor, Any]]:
    def hook(_: Module, args: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        y, bias = output
        return y + adapter(args[0]), bias

    return hook


def _ask_for_gradients(_: Module, __: Any, output: Tensor) -> Tensor:
    """Nothing before the first layer is trained; layers that are recomputed would then have no backward pass."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


# -- the model under the adapters -----------------------------------------------------------------------------

_PIECE = 2**22
"""Elements that are mixed at once: the copies take 8 bytes each."""


def fingerprint(chunks: Chunks, hf: HFConfig) -> int:
    """A number of 64 bits that any changed weight of the whole model changes; the same in every layout. Collective.

    A sum over all elements, so that ranks can add theirs; two that change places within a tensor do not show.
    """
    local = LocalWeights(chunks, hf)
    total = torch.zeros(1, dtype=torch.int64)
    for number, entry in enumerate(entries(hf)):
        _, name, _ = local.place(entry)
        first = entry.rule.cut is not None or cutting_group(entry.rule).rank() == 0
        if name in local.here(entry) and first and _copy_number(entry) == 0:
            total += _mixed(local[name].detach(), number)
    dist.all_reduce(total)
    return int(total)


def _mixed(weight: Tensor, number: int) -> int:
    """Sum of the elements' bits, each scrambled by two odd factors. Wraps around."""
    words = weight.reshape(-1).view(torch.int32 if weight.element_size() == 4 else torch.int16)
    total = 0
    for piece in words.split(_PIECE):
        x = (piece.to(torch.int64) + (number << 33)) * 0x9E3779B97F4A7C1
        x = (x ^ (x >> 29)) * 0x3F58476D1CE4E5B9
        total += int((x ^ (x >> 32)).sum())
    return (total + 2**63) % 2**64 - 2**63
