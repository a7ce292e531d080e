"""What a train step computed of single tokens, gathered for people to read (rlsys/obs/trained.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlsys.obs.trained import TokenFigures, kept_groups, to_floats, write_trained
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.passes import from_last_stage
from rlsys.trainer.trainer import Trainer
from rlsys.types import Sample, Taken


class Note(NamedTuple):
    """Of one sample: float32 for each response token."""

    logp: bytes
    advantages: bytes


class TokenNotes:
    """Of one rank and one step, by sample id. Ranks that have no logits have no notes."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}

    def take(self, micro: MicroBatch, samples: Sequence[Sample], logp: Tensor | None) -> None:
        """`samples`: the rows of the sample table. `logp` `[T]`: under the weights that start the step; None: those
        are not known, because the weights have moved."""
        if not micro.mask.any():  # fills a bin, and is trained elsewhere
            return
        unknown = torch.full_like(micro.mu, torch.nan)
        logp = unknown if logp is None else logp.to(micro.mu.device)
        advantages = unknown if micro.advantages is None else micro.advantages
        for row, end in zip(micro.rows.tolist(), micro.cu_seqlens[1:].tolist(), strict=True):
            sample = samples[row]
            tokens = slice(end - sample.tokens, end)
            self._notes[sample.sample_id] = Note(_bytes(logp[tokens]), _bytes(advantages[tokens]))

    def write(self, trainer: Trainer, taken: Taken) -> None:
        """Every rank calls it; rank 0 writes the step's kept groups."""
        most = trainer.config.rollout.keep_groups
        if not most:
            return
        kept = kept_groups((g.group_id for g in taken.groups), most)
        samples = [s for g in taken.groups if g.group_id in kept for s in g.samples]
        mine = {s.sample_id: self._notes[s.sample_id] for s in samples if s.sample_id in self._notes}
        of_stage = {i: note for part in trainer.from_all(mine) for i, note in part.items()}
        notes = from_last_stage(of_stage)
        if trainer.is_main:
            with trainer.segments as segments:
                figures = {
                    s.sample_id: TokenFigures(
                        np.array(s.response_ids, dtype="<i4").tobytes(),
                        to_floats(s.mu),
                        *notes.get(s.sample_id, ()),
                    )
                    for s in map(segments.loaded, samples)
                }
            write_trained(trainer.config.run.dir, taken.train_step, figures)


def _bytes(values: Tensor) -> bytes:
    return to_floats(values.detach().to("cpu", torch.float32).tolist())
