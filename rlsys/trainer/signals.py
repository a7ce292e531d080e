"""What an objective asks for, served: the table of samples, packed rows, and the forward passes it needs.

Every rank calls every function together, and gets the same table and the same rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from rlsys.algo.batch import Samples
from rlsys.algo.objective import Objective
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from rlsys.types import Taken

CURRENT = frozenset({"old", "now", "behaviour", "entropy", "values"})
"""Signals that one forward pass of the current weights gives."""


def sample_table(taken: Taken, needs: Collection[str]) -> Samples:
    """One row per sample of the step, in the order of its groups; of the optional columns, those in `needs`."""
    table = Samples.of(taken.groups, taken.train_step - 1)
    samples = [s for group in taken.groups for s in group.samples]
    if "answers" in needs:
        table = replace(table, answers=torch.tensor([answer_id(s.answer) for s in samples]))
    return table


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
    score their own past."""
    passes = objective.passes
    for batch in batches if passes & CURRENT else ():
        for micro, found in zip(batch, trainer.score(batch), strict=True):
            micro.old = micro.now = found.logp
            micro.entropy, micro.values = found.entropy, found.values


def rescore(batch: list[MicroBatch], objective: Objective, trainer: Trainer) -> None:
    """Before a further update of the same step: the log-probs of the weights that it starts from."""
    if "now" in objective.passes:
        for micro, found in zip(batch, trainer.score(batch), strict=True):
            micro.now = found.logp
