"""Teachers: frozen models with their own weights and architectures, to which the policy is compared.

Each has the policy's layout over the ranks and gets the same micro-batches.

Shapes: T tokens of a micro-batch, P after padding, c context-parallel ranks, V vocabulary size, K scored ids per
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from rlsys.config.algo import TeacherSection
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_teacher
from rlsys.convert.flops import crossover_length
from rlsys.trainer.logprobs import Scores, align_to_tokens, sampling_logits
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.model.model import build_model, rotates_by_position
from rlsys.trainer.model.routing import Routing
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.passes import Passes
from rlsys.trainer.setup import local_device
from rlsys.trainer.trainer import Trainer


@dataclass(frozen=True)
class TeacherScores(Scores):
    """Scores of a teacher, `[T, K]` each.

    Attributes:
        ids: The teacher's most probable ids at each token; with algo.teacher.top_k = 0 the token itself.
        logprobs: The teacher's log-probs of `ids`.
    """

    ids: Tensor | None = None
    logprobs: Tensor | None = None


class Teacher:
    """One teacher, without gradients and optimizer.

    Raises:
        UserError: The model in `folder` does not fit the layout or the policy's vocabulary.
    """

    def __init__(self, policy: Trainer, section: TeacherSection, folder: Path) -> None:
        model = policy.config.model.model_copy(update={"path": folder})
        config = policy.config.model_copy(update={"model": model})
        hf = HFConfig.read(folder)
        check_teacher(config, policy.hf, hf, folder)
        self._top_k = hf.vocab_size if section.top_k is None else min(section.top_k, hf.vocab_size)
        device = local_device()
        self.chunks = chunks = build_model(config, hf, device)
        for _, parameter in chunks.named_parameters():
            parameter.requires_grad_(False)
        self._output = chunks.output_layer(hf.vocab_size)
        routing = Routing(chunks.modules, hf.layers, "off")  # no route belongs to a teacher's experts
        self._passes = Passes(
            config, chunks.modules, routing, self._scores, crossover_length(hf), device,
            by_position=rotates_by_position(config, hf),
        )  # fmt: skip

    def score(self, batch: list[MicroBatch]) -> Iterator[TeacherScores]:
        """Score every micro-batch at the rollout's temperature."""
        for scores in self._passes.score(batch):
            assert isinstance(scores, TeacherScores)
            yield scores

    def _scores(self, hidden: Tensor, share: Share, temperature: float) -> TeacherScores:
        """Compute the scores from the last hidden states `[P / c or P / (c tp), 1, H]`."""
        assert self._output is not None, "only the last pipeline stage computes scores"

        def score_rows(logits: Tensor, rows: slice) -> dict[str, Tensor]:
            targets = share.targets(rows)
            logits = sampling_logits(logits, targets, temperature)
            if self._top_k == 0:
                logprobs = -vocab_parallel_cross_entropy(logits, targets.following)
                return {"ids": targets.following[:, None], "logprobs": logprobs[:, None]}
            return self._most_probable(logits)

        scores = self._output.scores(hidden, score_rows)
        logprobs, ids = (align_to_tokens(share, scores[name]) for name in ("logprobs", "ids"))
        return TeacherScores(torch.zeros_like(logprobs[:, 0]), ids=ids, logprobs=logprobs)

    def _most_probable(self, logits: Tensor) -> dict[str, Tensor]:
        """Return the most probable ids and their log-probs, `[N, K]`, for logits `[N, V / tp]`."""
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        total = logits.logsumexp(-1)
        best, ids = logits.topk(min(self._top_k, columns))
        ids = ids + group.rank() * columns
        if group.size() > 1:
            totals, bests, all_ids = (_gather_all(x, group) for x in (total, best, ids))
            total = torch.stack(totals).logsumexp(0)
            best, index = torch.cat(bests, -1).topk(self._top_k)
            ids = torch.cat(all_ids, -1).gather(1, index)
        return {"ids": ids, "logprobs": best - total[:, None]}


def _gather_all(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


class Teachers:
    """All teachers of `algo.teacher`: the one in `path` first, then those in `by_source`.

    A folder that occurs several times is loaded once.
    """

    def __init__(self, policy: Trainer) -> None:
        section = policy.config.algo.teacher
        assert section is not None
        folders = list(dict.fromkeys(section.folders.values()))
        self.models = [Teacher(policy, section, folder) for folder in folders]
        self._index_by_source = {
            source: folders.index(folder) for source, folder in section.by_source.items()
        }

    def index_of(self, source: str) -> int:
        """Return the index in `models` of the teacher for prompts of this source."""
        return self._index_by_source.get(source, 0)

    def score(self, batches: Sequence[list[MicroBatch]]) -> None:
        """Set `teacher_ids` and `teacher_logp` `[T, K]` of every micro-batch from each sample's teacher."""
        for batch in batches:
            for number, model in enumerate(self.models):
                for micro, scores in zip(batch, model.score(batch), strict=True):
                    ids, logprobs = scores.ids, scores.logprobs
                    if number:
                        assert micro.teachers is not None, (
                            "a step with several teachers needs the source of each group"
                        )
                        is_taught = (micro.expand(micro.teachers) == number)[:, None]
                        ids, logprobs = (
                            _select_rows(is_taught, ids, micro.teacher_ids),
                            _select_rows(is_taught, logprobs, micro.teacher_logp),
                        )
                    micro.teacher_ids, micro.teacher_logp = ids, logprobs


def _select_rows(is_taught: Tensor, new: Tensor | None, previous: Tensor | None) -> Tensor:
    """Return the rows of `new` where `is_taught` `[T, 1]`, else those of `previous`, `[T, K]`."""
    assert new is not None and previous is not None
    return torch.where(is_taught, new, previous)


def add_teacher(policy: Trainer) -> None:
    """Set `policy.teacher` to the teachers of `algo.teacher`. Collective."""
    policy.teacher = Teachers(policy)
