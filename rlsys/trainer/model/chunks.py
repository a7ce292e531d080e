"""This rank's part of the model: one GPTModel, or several where pipeline stages are interleaved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter

from rlsys.convert.adapters import ADAPTERS
from rlsys.convert.table import Entry
from rlsys.trainer.model.value_head import ValueHead, ValueLayer

EXPERT_BIAS = "router.expert_bias"
"""Ends the names of the only weights that are no parameters: no gradient reaches them."""
MTP = "mtp."
"""Begins megatron's names of a layer for multi-token prediction."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


class Adapters(Protocol):
    """The adapters of a rank's model (rlsys.trainer.model.lora.Lora)."""

    base: int
    """Fingerprint of the model under the adapters."""

    @property
    def of_chunks(self) -> Sequence[Any]:
        """Their parameters, one module a chunk."""

    def named_factors(self) -> Iterator[tuple[str, Entry, Parameter]]:
        """PEFT's name, entry and parameter of each factor of this rank."""

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight with its adapter; the weight itself where there is none."""

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of factors that ranks share. Once an update. Collective."""


class Chunks:
    """Names its parameters as the whole model does: layers are counted from the model's first, not the chunk's."""

    def __init__(self, modules: list[GPTModel]) -> None:
        self.modules = modules
        self.config = modules[0].config
        self.lora: Adapters | None = None
        """Adapters, if it has some: then nothing else is trained, and nothing else is in checkpoints."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield self.whole_name(module, name), parameter

    def trained_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Those that an optimizer updates."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def add_value_head(self, device: torch.device) -> ValueHead | None:
        """A value head on the chunk that has the output layer; None where this rank has no such chunk."""
        for module in self.modules:
            if module.post_process:
                module.value_head = ValueHead(module).to(device)
                return module.value_head
        return None

    def end_in_values(self, device: torch.device) -> None:
        """A value layer in the place of the output layer: the model of a critic. Its embedding is tied to nothing."""
        for module in self.modules:
            module.share_embeddings_and_output_weights = False
            if module.post_process:
                module.output_layer = ValueLayer(module).to(device)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters, and the buffers that belong to the model as they do."""
        yield from self.named_parameters()
        yield from self.named_expert_biases()

    def named_expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        for module in self.modules:
            for name, buffer in module.named_buffers():
                if name.endswith(EXPERT_BIAS):
                    yield self.whole_name(module, name), buffer

    def sharded_state_dict(self) -> dict[str, Any]:
        """Megatron's description of every weight for a checkpoint, one entry a chunk.

        Without the extra state of Transformer Engine's layers: it is that of delayed FP8 scaling, which nobody here
        uses, and a machine without Transformer Engine could not load it.
        """
        if self.lora is not None:
            return {str(i): each.sharded_state_dict(ADAPTERS) for i, each in enumerate(self.lora.of_chunks)}
        return {
            str(i): {k: v for k, v in module.sharded_state_dict().items() if not isinstance(v, ShardedObject)}
            for i, module in enumerate(self.modules)
        }

    def load_state_dict(self, state: dict[str, Any], but: str | None = None) -> None:
        """What `sharded_state_dict` described. Raises ValueError when a weight is missing, save those that begin with
        `but`."""
        for i, module in enumerate(self.modules):
            missing, _ = module.load_state_dict(state[str(i)], strict=False)
            if but is not None:
                missing = [name for name in missing if not name.startswith(but)]
            if self.lora is not None:
                missing = [name for name in missing if name.startswith(ADAPTERS)]
            if lost := [name for name in missing if not name.endswith("_extra_state")]:
                raise ValueError(f"no {lost[0]} in the state")

    def shards(self, prefix: str) -> dict[str, Any]:
        """The same descriptions by parameter, under checkpoint keys that begin with `prefix`."""
        if self.lora is not None:
            of_chunks = [each.sharded_state_dict(prefix + ADAPTERS) for each in self.lora.of_chunks]
            return {name.removeprefix(prefix): shard for each in of_chunks for name, shard in each.items()}
        return {
            self.whole_name(module, name.removeprefix(prefix)): shard
            for module in self.modules
            for name, shard in module.sharded_state_dict(prefix=prefix).items()
        }

    @staticmethod
    def whole_name(module: GPTModel, name: str) -> str:
        return _LAYER.sub(lambda m: str(module.decoder.layers[int(m[0])].layer_number - 1), name)
