"""Token log of a train step: per-token results, gathered for the viewer (rlsys/obs/token_records.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlsys.core.types import Sample, TrainBatch
from rlsys.obs.token_records import TokenRecord, readable_groups, to_floats, write_records
from rlsys.trainer.passes import from_last_stage
from rlsys.trainer.trainer import Trainer


class MicroBatchRecord(NamedTuple):
    """Results of one micro-batch of T tokens and S sequences, on the CPU.

    Only ranks of the last pipeline stage, which compute logits, have records.
    """

    samples: Sequence[Sample]
    """The whole sample table."""
    rows: list[int]
    """Row of each sequence in the table."""
    sequence_index: list[int]
    """Index of each sequence within its sample."""
    cu_seqlens: list[int]
    """[S + 1], first token of each sequence, and T."""
    logp: Tensor | None
    """[T], log-probs under the weights at the start of the step; None: unknown."""
    advantages: Tensor | None
    """[T], the advantages in the loss."""


def write_token_log(trainer: Trainer, train_batch: TrainBatch, records: Sequence[MicroBatchRecord]) -> None:
    """Write the records of up to rollout.keep_groups groups of the step on rank 0. Collective.

    A sample's record covers its first sequence.
    """
    max_groups = trainer.config.rollout.keep_groups
    if not max_groups:
        return
    group_ids = readable_groups((g.group_id for g in train_batch.groups), max_groups)
    local_records = _sample_floats(records, group_ids)
    stage_records = {
        sample_id: floats
        for rank_records in trainer.gather_dp(local_records)
        for sample_id, floats in rank_records.items()
    }
    token_records = from_last_stage(stage_records)
    if trainer.is_main:
        samples = [s for g in train_batch.groups if g.group_id in group_ids for s in g.samples]
        records_by_sample = {
            s.sample_id: TokenRecord(
                np.array(s.response_ids, dtype="<i4").tobytes(),
                to_floats(s.mu),
                *token_records.get(s.sample_id, ()),
            )
            for s in map(trainer.segments.load, samples)
        }
        write_records(trainer.config.run.dir, train_batch.train_step, records_by_sample)


def _sample_floats(
    records: Sequence[MicroBatchRecord], group_ids: Collection[int]
) -> dict[int, tuple[bytes, bytes]]:
    """Encode the log-probs and the advantages of the first sequence of each logged sample, by sample id."""
    floats: dict[int, tuple[bytes, bytes]] = {}
    for record in records:
        for row, index, end in zip(record.rows, record.sequence_index, record.cu_seqlens[1:], strict=True):
            sample = record.samples[row]
            if sample.group_id in group_ids and not index:
                tokens = slice(end - sample.tokens, end)
                floats[sample.sample_id] = _floats(record.logp, tokens), _floats(record.advantages, tokens)
    return floats


def _floats(values: Tensor | None, tokens: slice) -> bytes:
    """Encode the values of these tokens; NaN if `values` is None."""
    floats = [np.nan] * (tokens.stop - tokens.start) if values is None else values[tokens].float().tolist()
    return to_floats(floats)
