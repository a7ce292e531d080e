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
"""Suffix of the names of the only weights that are not parameters: they have no gradient."""
MTP = "mtp."
"""Prefix of Megatron's names of an MTP layer."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")


class Adapters(Protocol):
    """The adapters of a rank's model (rlsys.trainer.model.lora.Lora)."""

    base: int
    """Fingerprint of the model under the adapters."""

    @property
    def chunk_factors(self) -> Sequence[Any]:
        """Parameters of the adapters, one module per chunk."""

    def named_factors(self) -> Iterator[tuple[str, Entry, Parameter]]:
        """Iterate over (PEFT name, entry, parameter) of each factor of this rank."""

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter merged, or the weight itself if it has no adapter."""

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of factors that ranks share. Call it once per update. Collective."""


class Chunks:
    """Model chunks with the parameter names of the whole model: layers are counted from the model's first layer."""

    def __init__(self, modules: list[GPTModel]) -> None:
        self.modules = modules
        self.config = modules[0].config
        self.lora: Adapters | None = None
        """Adapters, if any: then only they are trained and stored in checkpoints."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield self.global_name(module, name), parameter

    def trained_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Iterate over the parameters that an optimizer updates."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def output_layer(self, vocab_size: int) -> OutputLayer | None:
        """Return the output layer of the policy or a teacher; None if this rank has none."""
        last = self.modules[-1]
        return OutputLayer(last, vocab_size) if last.post_process else None

    def add_value_head(self, device: torch.device) -> ValueLayer | None:
        """Add a value layer to the policy, in addition to its output layer; None if this rank has no output layer.

        The value loss, scaled by the coefficient of the loss term `value`, also changes the policy's weights. The
        layer costs hidden_size + 1 parameters instead of a second model.
        """
        last = self.modules[-1]
        if not last.post_process:
            return None
        last.value_head = ValueLayer(last).to(device)
        return last.value_head

    def end_in_values(self, device: torch.device) -> None:
        """Replace the output layer by a value layer, for the model of a critic. Its embedding is not tied."""
        for module in self.modules:
            module.share_embeddings_and_output_weights = False
        last = self.modules[-1]
        if last.post_process:
            last.output_layer = ValueLayer(last).to(device)

    def value_layer(self) -> ValueLayer | None:
        """Return the layer that `end_in_values` created; None if this rank has none."""
        last = self.modules[-1]
        if not last.post_process:
            return None
        layer: ValueLayer = last.output_layer
        return layer

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the parameters and the buffers that are part of the model."""
        yield from self.named_parameters()
        yield from self.named_expert_biases()

    def named_expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        for module in self.modules:
            for name, buffer in module.named_buffers():
                if name.endswith(EXPERT_BIAS):
                    yield self.global_name(module, name), buffer

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return Megatron's description of every weight for a checkpoint, one entry per chunk.

        The extra state of Transformer Engine's layers is left out: it belongs to delayed FP8 scaling, which is not
        used, and a machine without Transformer Engine could not load it.
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
        """Load the state that `sharded_state_dict` described.

        Raises:
            ValueError: a weight is missing, except those whose names start with `ignore_prefix`.
        """
        for i, module in enumerate(self.modules):
            missing, _ = module.load_state_dict(state[str(i)], strict=False)
            if ignore_prefix is not None:
                missing = [name for name in missing if not name.startswith(ignore_prefix)]
            if self.lora is not None:
                missing = [name for name in missing if name.startswith(ADAPTERS)]
            if absent := [name for name in missing if not name.endswith("_extra_state")]:
                raise ValueError(f"state: expected the weight {absent[0]}, found none")

    def shards(self, prefix: str) -> dict[str, Any]:
        """Return the same descriptions by parameter, with checkpoint keys that start with `prefix`."""
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
        return _LAYER.sub(lambda m: str(module.decoder.layers[int(m[0])].layer_number - 1), name)
