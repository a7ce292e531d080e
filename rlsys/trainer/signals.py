"""What an objective asks for, served: the table of samples, packed rows, and the forward passes it needs.

Every rank calls every function together, and gets the same table and the same rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.objective import Objective
from rlsys.trainer.critic import critic_of
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from rlsys.types import SampleGroup, Scored, Taken, Unscored


def sample_table(groups: Sequence[SampleGroup], train_step: int, needs: Collection[str]) -> Samples:
    """One row per sample of the step, in the order of its groups; of the optional columns, those in `needs`."""
    samples = [s for group in groups for s in group.samples]
    columns: dict[str, Any] = {}
    if "answers" in needs:
        columns["answers"] = torch.tensor([answer_id(s.answer) for s in samples])
    if "transferred" in needs:
        columns["transferred"] = torch.tensor([s.trained_prompt is not None for s in samples])
    if "tool_penalty" in needs:
        columns["tool_penalty"] = torch.tensor([s.tool_penalty for s in samples])
    return replace(Samples.of(groups, train_step - 1), **columns)


def answer_id(answer: str | None) -> int:
    """The same number for the same answer in every process, of 24 bits, which float32 holds; -1 for none."""
    return -1 if answer is None else zlib.crc32(answer.encode()) & 0xFFFFFF


def shuffled(rows: Sequence[int], parts: int, seed: tuple[int, int]) -> list[list[int]]:
    """Rows in random order, dealt to at most `parts` lists that are not empty. `seed`: (run.seed, train step)."""
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [dealt for k in range(parts) if (dealt := [rows[i] for i in order[k::parts]])]


def pack_rows(taken: Taken, rows: Sequence[int], trainer: Trainer) -> list[MicroBatch]:
    """This rank's micro-batches of these rows of the sample table."""
    samples = [s for group in taken.groups for s in group.samples]
    chosen = [TrainSample.of(samples[r], r) for r in rows]
    batch = trainer.pack(chosen)
    for micro in batch:
        micro.version = taken.weight_version
    return batch


def score(batches: Sequence[list[MicroBatch]], objective: Objective, trainer: Trainer) -> None:
    """All passes that the objective needs, over the whole step: before the first update, or later ones would
    score their own past.

    The first update begins with the weights that score, so that its own log-probs are `old`, unless somebody wants
    them earlier. The routes that a scoring pass chooses (trainer.replay = trainer) are wanted earlier; and with
    further epochs these samples come again, when the weights have moved.
    """
    passes, replayed = objective.passes, trainer.config.trainer.replay == "trainer"
    reuse = not (objective.looks_ahead or replayed or trainer.config.algo.epochs > 1)
    for i, batch in enumerate(batches if objective.scored & objective.current or replayed else ()):
        if reuse and i == 0:
            for micro in batch:
                micro.old_is_current = True
                if "behaviour" in passes:
                    micro.behaviour = stored(micro)
            continue
        for micro, found in zip(batch, trainer.score(batch), strict=True):
            micro.old = micro.now = found.logp
            micro.entropy, micro.values = found.entropy, found.values
            micro.sum_pi_squared = found.sum_pi_squared
            if "behaviour" in passes:
                micro.behaviour = torch.where(micro.versions == micro.version, found.logp, stored(micro))
    if "values" in passes and (critic := critic_of(trainer, objective)) is not None:
        critic.score_values(batches)
    if "ref" in passes:
        with trainer.without_replay():
            _score_with(objective.reference() or trainer.first_weights, "ref", batches, trainer)
    if "ewma" in passes:
        _score_with(objective.average(), "ewma", batches, trainer)


def score_parked(unscored: Sequence[Unscored], trainer: Trainer) -> list[Scored]:
    """Log-probs of tokens that the resident weights sampled, before these change: exact `old` for later steps.

    With trainer.replay = engine it takes the engine's experts, as the step will that trains these tokens.
    Costs a forward pass over the whole sequences, since a token's log-prob needs all that is before it.
    """
    if not unscored:
        return []
    batch = trainer.pack(
        [
            TrainSample(u.prompt_ids, u.response_ids, [0.0] * n, [0] * n, row, routes=tuple(u.routes))
            for row, u in enumerate(unscored)
            if (n := len(u.response_ids))
        ]
    )
    mine: dict[int, list[float]] = {}
    for micro, logp in zip(batch, trainer.logprobs(batch), strict=True):
        ends = micro.cu_seqlens[1:].tolist()
        for row, end in zip(micro.rows.tolist(), ends, strict=True):
            tokens = len(unscored[row].response_ids) - unscored[row].start
            mine[row] = logp[end - tokens : end].tolist()
    found = {row: logp for part in trainer.from_all(mine) for row, logp in part.items()}
    return [Scored(u.sample_id, u.start, found[row]) for row, u in enumerate(unscored)]


def stored(micro: MicroBatch) -> Tensor:
    """What came with the samples of `behaviour`, `[T]`; NaN where nothing did."""
    return torch.full_like(micro.mu, torch.nan) if micro.behaviour is None else micro.behaviour


def _score_with(
    weights: Mapping[str, Tensor], name: str, batches: Sequence[list[MicroBatch]], trainer: Trainer
) -> None:
    """Log-probs under other weights as the field `name`."""
    with trainer.with_weights(weights):
        for batch in batches:
            for micro, logp in zip(batch, trainer.logprobs(batch), strict=True):
                setattr(micro, name, logp)


def rescore(batch: list[MicroBatch], objective: Objective, trainer: Trainer) -> None:
    """Before a further update of the same step: the log-probs of the weights that it starts from."""
    if "now" in objective.passes:
        for micro, logp in zip(batch, trainer.logprobs(batch), strict=True):
            micro.now = logp
