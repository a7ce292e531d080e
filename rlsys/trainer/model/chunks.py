"""The model chunks of one rank: one GPTModel, or several with interleaved pipeline stages."""

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
from rlsys.trainer.model.output_layer import OutputLayer
from rlsys.trainer.model.value_head import ValueLayer

EXPERT_BIAS = "router.expert_bias"
"""Suffix of the names of the experts' biases, the only weights that are buffers: they have no gradient."""
MTP = "mtp."
"""Prefix of Megatron's names of the parameters of an MTP layer."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


class Adapters(Protocol):
    """The adapters of a rank's model (rlsys.trainer.model.lora.Lora)."""

    base: int
    """Fingerprint of the frozen base model."""

    @property
    def chunk_factors(self) -> Sequence[Any]:
        """Modules with the adapters' parameters, one per chunk."""

    def named_factors(self) -> Iterator[tuple[str, Entry, Parameter]]:
        """Iterate over (PEFT name, entry, parameter) of this rank's factors."""

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter merged, or the weight itself if it has no adapter."""

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of factors that several ranks hold. Call it once per update. Collective."""


class Chunks:
    """Model chunks of this rank. Parameter names contain the index of the layer in the whole model."""

    def __init__(self, modules: list[GPTModel]) -> None:
        self.modules = modules
        self.config = modules[0].config
        self.lora: Adapters | None = None
        """Adapters, which alone are then trained and stored in checkpoints; None: the model has none."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Iterate over (name, parameter) of this rank, including adapters."""
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield self.global_name(module, name), parameter

    def trained_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Iterate over the parameters that an optimizer updates."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def output_layer(self, vocab_size: int) -> OutputLayer | None:
        """Return the output layer; None if this rank does not have the last pipeline stage."""
        last = self.modules[-1]
        return OutputLayer(last, vocab_size) if last.post_process else None

    def add_value_head(self, device: torch.device) -> ValueLayer | None:
        """Add a value layer to the policy, besides its output layer, and return it.

        Return None if this rank does not have the last pipeline stage. The layer has hidden_size + 1 parameters. The
        value loss, scaled by the coefficient of the loss term `value`, also changes the policy's weights.
        """
        last = self.modules[-1]
        if not last.post_process:
            return None
        last.value_head = ValueLayer(last).to(device)
        return last.value_head

    def end_in_values(self, device: torch.device) -> None:
        """Replace the output layer by a value layer, which is not tied to the embedding."""
        for module in self.modules:
            module.share_embeddings_and_output_weights = False
        last = self.modules[-1]
        if last.post_process:
            last.output_layer = ValueLayer(last).to(device)

    def value_layer(self) -> ValueLayer | None:
        """Return the layer that `end_in_values` created; None if this rank does not have the last pipeline stage."""
        last = self.modules[-1]
        if not last.post_process:
            return None
        layer: ValueLayer = last.output_layer
        return layer

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, tensor) of the parameters and the experts' biases."""
        yield from self.named_parameters()
        yield from self.named_expert_biases()

    def named_expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, bias) of this rank's routers, for routers whose selection adds a bias per expert."""
        for module in self.modules:
            for name, buffer in module.named_buffers():
                if name.endswith(EXPERT_BIAS):
                    yield self.global_name(module, name), buffer

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return Megatron's description of the stored weights, by chunk index.

        It excludes the extra state of Transformer Engine's layers. That state belongs to delayed FP8 scaling, which
        rlsys does not use, and a machine without Transformer Engine could not load it.
        """
        if self.lora is not None:
            return {
                str(i): chunk.sharded_state_dict(ADAPTERS) for i, chunk in enumerate(self.lora.chunk_factors)
            }
        return {
            str(i): {k: v for k, v in module.sharded_state_dict().items() if not isinstance(v, ShardedObject)}
            for i, module in enumerate(self.modules)
        }

    def load_state_dict(self, state: dict[str, Any], ignore_prefix: str | None = None) -> None:
        """Load the tensors that `sharded_state_dict` describes.

        Args:
            state: The tensors, by chunk index and name.
            ignore_prefix: Prefix of the names of weights that may be missing; None: none may.

        Raises:
            ValueError: Another weight is missing.
        """
        for i, module in enumerate(self.modules):
            missing, _ = module.load_state_dict(state[str(i)], strict=False)
            if ignore_prefix is not None:
                missing = [name for name in missing if not name.startswith(ignore_prefix)]
            if self.lora is not None:
                missing = [name for name in missing if name.startswith(ADAPTERS)]
            if absent := [name for name in missing if not name.endswith("_extra_state")]:
                raise ValueError(f"state: {len(absent)} weights are missing, first: {absent[0]}")

    def shards(self, prefix: str) -> dict[str, Any]:
        """Return the descriptions of `sharded_state_dict` by parameter, with `prefix` before the checkpoint keys."""
        if self.lora is not None:
            descriptions = [chunk.sharded_state_dict(prefix + ADAPTERS) for chunk in self.lora.chunk_factors]
            return {
                name.removeprefix(prefix): shard for chunk in descriptions for name, shard in chunk.items()
            }
        return {
            self.global_name(module, name.removeprefix(prefix)): shard
            for module in self.modules
            for name, shard in module.sharded_state_dict(prefix=prefix).items()
        }

    @staticmethod
    def global_name(module: GPTModel, name: str) -> str:
        """Return the name of a parameter of `module` with the index of its layer in the whole model."""
        return _LAYER.sub(lambda m: str(module.decoder.layers[int(m[0])].layer_number - 1), name)
