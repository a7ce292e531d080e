"""A frozen model of its own weights and its own architecture, which the policy is compared with.

It is laid out over the ranks as the policy is, and sees the same micro-batches. Shapes: T tokens of a micro-batch,
P of it padded, c context-parallel ranks, V vocabulary, K of its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_teacher
from rlsys.convert.flops import crossover_length
from rlsys.trainer.logprobs import Scores, aligned, as_drawn
from rlsys.trainer.model import build_model
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.passes import Passes
from rlsys.trainer.routing import Routing
from rlsys.trainer.setup import local_device
from rlsys.trainer.share import Share
from rlsys.trainer.trainer import Trainer


@dataclass(frozen=True)
class Opinion(Scores):
    """The most probable tokens in the place of each token, and their log-probs: `[T, K]`."""

    ids: Tensor | None = None
    most: Tensor | None = None


class Teacher:
    """Without gradients and optimizer. Raises UserError for a folder or a layout that does not fit."""

    def __init__(self, policy: Trainer) -> None:
        section = policy.config.algo.teacher
        assert section is not None
        model = policy.config.model.model_copy(update={"path": section.path})
        config = policy.config.model_copy(update={"model": model})
        hf = HFConfig.read(section.path)
        check_teacher(config, policy.hf, hf)
        self._top_k = min(section.top_k or hf.vocab_size, hf.vocab_size)
        device = local_device()
        self.chunks = chunks = build_model(config, hf, device)
        for _, parameter in chunks.named_parameters():
            parameter.requires_grad_(False)
        routing = Routing(chunks.modules, hf.layers, "off")  # it takes its own experts
        self._passes = Passes(config, chunks.modules, routing, self._scores, crossover_length(hf), device)

    def score(self, batches: Sequence[list[MicroBatch]]) -> None:
        """Fill `teacher_ids` and `teacher_logp` `[T, K]` of every micro-batch, at the rollout's temperature."""
        for batch in batches:
            for micro, found in zip(batch, self._passes.score(batch), strict=True):
                assert isinstance(found, Opinion)
                micro.teacher_ids, micro.teacher_logp = found.ids, found.most

    def _scores(self, output: Tensor, share: Share, temperature: float) -> Opinion:
        """Of logits `[1, P / c, V / tp]`."""
        logits = as_drawn(output[0], share, temperature)
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        total = logits.logsumexp(-1)
        best, ids = logits.topk(min(self._top_k, columns))
        ids = ids + group.rank() * columns
        if group.size() > 1:
            totals, bests, all_ids = (_of_all(x, group) for x in (total, best, ids))
            total = torch.stack(totals).logsumexp(0)
            best, place = torch.cat(bests, -1).topk(self._top_k)
            ids = torch.cat(all_ids, -1).gather(1, place)
        most = aligned(share, best - total[:, None])
        return Opinion(torch.zeros_like(most[:, 0]), ids=aligned(share, ids), most=most)


def _of_all(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def add_teacher(policy: Trainer) -> None:
    """Give the policy's trainer the teacher of `algo.teacher`. Collective."""
    policy.teacher = Teacher(policy)
