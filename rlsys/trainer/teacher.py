"""Frozen models of their own weights and their own architectures, which the policy is compared with.

Each is laid out over the ranks as the policy is, and sees the same micro-batches. Shapes: T tokens of a micro-batch,
P of it padded, c context-parallel ranks, V vocabulary, K of its entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlsys.config.algo import TeacherSection
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_teacher
from rlsys.convert.flops import crossover_length
from rlsys.trainer.logprobs import Scores, aligned, as_drawn
from rlsys.trainer.model.model import build_model, rotates_by_position
from rlsys.trainer.model.routing import Routing
from rlsys.trainer.model.share import Share
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.passes import Passes
from rlsys.trainer.setup import local_device
from rlsys.trainer.trainer import Trainer


@dataclass(frozen=True)
class Opinion(Scores):
    """The most probable tokens in the place of each token, and their log-probs: `[T, K]`."""

    ids: Tensor | None = None
    most: Tensor | None = None


class Teacher:
    """One of them, without gradients and optimizer. Raises UserError for a folder or a layout that does not fit."""

    def __init__(self, policy: Trainer, section: TeacherSection, folder: Path) -> None:
        model = policy.config.model.model_copy(update={"path": folder})
        config = policy.config.model_copy(update={"model": model})
        hf = HFConfig.read(folder)
        check_teacher(config, policy.hf, hf, folder)
        self._top_k = min(section.top_k or hf.vocab_size, hf.vocab_size)
        device = local_device()
        self.chunks = chunks = build_model(config, hf, device)
        for _, parameter in chunks.named_parameters():
            parameter.requires_grad_(False)
        routing = Routing(chunks.modules, hf.layers, "off")  # it takes its own experts
        self._passes = Passes(
            config, chunks.modules, routing, self._scores, crossover_length(hf), device,
            by_position=rotates_by_position(config, hf),
        )  # fmt: skip

    def opinions(self, batch: list[MicroBatch]) -> Iterator[Opinion]:
        """Of every micro-batch, at the rollout's temperature."""
        for found in self._passes.score(batch):
            assert isinstance(found, Opinion)
            yield found

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


class Teachers:
    """All of `algo.teacher`: that of `path` first, then those of `by_source`. A folder that is named twice is held
    once."""

    def __init__(self, policy: Trainer) -> None:
        section = policy.config.algo.teacher
        assert section is not None
        folders = list(dict.fromkeys(section.folders.values()))
        self.models = [Teacher(policy, section, folder) for folder in folders]
        self._places = {source: folders.index(folder) for source, folder in section.by_source.items()}

    def place(self, source: str) -> int:
        """Which of them teaches prompts of this source."""
        return self._places.get(source, 0)

    def score(self, batches: Sequence[list[MicroBatch]]) -> None:
        """Fill `teacher_ids` and `teacher_logp` `[T, K]` of every micro-batch: each sample's teacher's."""
        for batch in batches:
            for number, model in enumerate(self.models):
                for micro, found in zip(batch, model.opinions(batch), strict=True):
                    ids, most = found.ids, found.most
                    if number:
                        assert micro.teachers is not None, (
                            "a step with several teachers tells its groups' sources"
                        )
                        own = (micro.expand(micro.teachers) == number)[:, None]
                        ids, most = (
                            _chosen(own, ids, micro.teacher_ids),
                            _chosen(own, most, micro.teacher_logp),
                        )
                    micro.teacher_ids, micro.teacher_logp = ids, most


def _chosen(own: Tensor, new: Tensor | None, before: Tensor | None) -> Tensor:
    assert new is not None and before is not None
    return torch.where(own, new, before)


def add_teacher(policy: Trainer) -> None:
    """Give the policy's trainer the teachers of `algo.teacher`. Collective."""
    policy.teacher = Teachers(policy)
