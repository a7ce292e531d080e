"""Trainer of reward models for `rlsys sft`.

A reward model outputs one value per token; the reward of a text is the value of its last token. It is saved in the
format of transformers' models for sequence classification with one label. SGLang serves such folders with
--is-embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlsys.convert.carried import with_carried
from rlsys.convert.hf import write_hf
from rlsys.convert.stack import stack_experts
from rlsys.trainer.logprobs import ValueScoring
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.model.weights import gather_hf
from rlsys.trainer.passes import ScoresOf
from rlsys.trainer.trainer import Trainer

_HEAD = "output_layer."


class RewardTrainer(Trainer):
    """Trainer of a model that outputs values. Its scores contain only `values`; the log-probs are 0."""

    def _build_model(self) -> Chunks:
        chunks = super()._build_model()
        chunks.end_in_values(self._device)
        for name, parameter in chunks.named_parameters():
            # The folder cannot store the bias, and reward differences do not depend on it.
            if name == f"{_HEAD}bias":
                parameter.requires_grad_(False)
        return chunks

    def _scoring_function(self) -> ScoresOf:
        return ValueScoring(self._chunks.value_layer())

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of the model without an output head."""
        headless = replace(self.hf, tied=True)
        return stack_experts(gather_hf(self._chunks, headless), headless)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder for sequence classification. Atomic."""
        source = self.config.model.path
        tensors = chain(self.named_hf_tensors(), [("score.weight", self._score_weight())])
        if self.is_main:
            changes = {
                "architectures": [
                    self.hf.family.architecture.replace("ForCausalLM", "ForSequenceClassification")
                ],
                "num_labels": 1,
                "id2label": {"0": "reward"},
                "label2id": {"reward": 0},
            }
            write_hf(folder, source, with_carried(tensors, source, self.hf), changes=changes)
        else:
            for _ in tensors:  # takes part in the gathering
                pass
        self.control.wait_for_all()

    def _score_weight(self) -> Tensor:
        """Return the weight of the value layer, `[1, hidden size]`, on every rank. Collective."""
        head = dict(self.named_parameters()).get(f"{_HEAD}weight")
        group = parallel_state.get_pipeline_model_parallel_group()
        weight = torch.empty(
            1, self.hf.hidden_size, dtype=self._transformer.params_dtype, device=self._device
        )
        if head is not None:
            weight.copy_(head.detach())
        if group.size() > 1:
            dist.broadcast(weight, dist.get_global_rank(group, group.size() - 1), group)
        return weight
