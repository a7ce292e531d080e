"""What a train step computed of single tokens, gathered for people to read (rlsys/obs/token_records.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlsys.core.types import Sample, TrainBatch
from rlsys.obs.token_records import TokenRecord, readable_groups, to_floats, write_records
from rlsys.trainer.passes import from_last_stage
from rlsys.trainer.trainer import Trainer


class Noted(NamedTuple):
    """Of one micro-batch of T tokens and S sequences, on the CPU. Ranks that have no logits note nothing."""

    samples: Sequence[Sample]
    """Of the whole sample table."""
    rows: list[int]
    """Of the table, that of each sequence."""
    places: list[int]
    """The number of each sequence within its sample."""
    cu_seqlens: list[int]
    """[S + 1]."""
    logp: Tensor | None
    """[T] under the weights that start the step; None: those are not known, because the weights have moved."""
    advantages: Tensor | None
    """[T], as the loss saw them."""


def write_notes(trainer: Trainer, taken: TrainBatch, noted: Sequence[Noted]) -> None:
    """Every rank calls it; rank 0 writes the step's kept groups."""
    most = trainer.config.rollout.keep_groups
    if not most:
        return
    kept = readable_groups((g.group_id for g in taken.groups), most)
    mine: dict[int, tuple[bytes, bytes]] = {}
    for note in noted:
        for row, place, end in zip(note.rows, note.places, note.cu_seqlens[1:], strict=True):
            if (sample := note.samples[row]).group_id in kept and not place:
                tokens = slice(end - sample.tokens, end)
                mine[sample.sample_id] = _floats(note.logp, tokens), _floats(note.advantages, tokens)
    of_stage = {i: found for part in trainer.from_all(mine) for i, found in part.items()}
    found = from_last_stage(of_stage)
    if trainer.is_main:
        samples = [s for g in taken.groups if g.group_id in kept for s in g.samples]
        figures = {
            s.sample_id: TokenRecord(
                np.array(s.response_ids, dtype="<i4").tobytes(), to_floats(s.mu), *found.get(s.sample_id, ())
            )
            for s in map(trainer.segments.load, samples)
        }
        write_records(trainer.config.run.dir, taken.train_step, figures)


def _floats(values: Tensor | None, tokens: slice) -> bytes:
    """NaN where nothing is known."""
    known = [np.nan] * (tokens.stop - tokens.start) if values is None else values[tokens].float().tolist()
    return to_floats(known)
