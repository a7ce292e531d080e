"""A train step with tokens in segments, and the samples and bytes that each trainer rank packs and reads.

Under torchrun, in each layout: `python -m tests.helpers.share_cases WORKPLACE LAYOUT...`.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlsys.core.messages import decode
from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import (
    GroupState,
    LogProbRequest,
    LogProbResult,
    Prompt,
    Sample,
    Segment,
    Status,
    TrainBatch,
)
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.step import pack_rows, score_parked
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

GROUPS, SIZE, LAYERS, EXPERTS, TOPK = 12, 4, 4, 8, 2


def lengthen(sample: Sample, version: int, tokens: int, rng: random.Random) -> None:
    """Append tokens with float64 log-probs and with routes of the positions that predict them."""
    start = sample.routes[-1].end if sample.routes else 0
    end = len(sample.prompt_ids) + sample.tokens + tokens - 1
    chosen = bytes(e for _ in range((end - start) * LAYERS) for e in rng.sample(range(EXPERTS), TOPK))
    ids = [rng.randrange(96) for _ in range(tokens)]
    mu, spans = [-rng.random() * 5 for _ in ids], [VersionSpan(version, 0, tokens)]
    sample.append(Segment(ids, mu, spans, None, routes=RouteSpan(start, end, chosen)))


def write_step(run: Path) -> tuple[TrainBatch, TrainBatch]:
    """Write the groups of a step. Return them as `take` returns them and with all tokens in memory.

    Each sample has several saved pieces of two versions. Some samples have scores, some a tool result.
    """
    rng = random.Random(0)
    run.mkdir()
    buffer = RolloutBuffer(run / FILE_NAME, "run", SIZE)
    version = buffer.versions.new(0)
    groups = [
        buffer.issue(Prompt(i, "", [rng.randrange(96) for _ in range(rng.randint(2, 9))], {}), range(SIZE))
        for i in range(GROUPS)
    ]
    samples = [s for g in groups for s in g.samples]
    for part in range(3):
        version = buffer.versions.new(1) if part == 2 else version
        for sample in samples:
            lengthen(sample, version, rng.randint(1, 12), rng)
            if part == 1 and sample.index == 1:
                sample.observe([5, 6, 7])
        buffer.save(samples)
    buffer.store_scores(
        LogProbResult(s.sample_id, 1, [-rng.random()] * (s.tokens - 2)) for s in samples if s.index % 2
    )
    for group in groups:
        for sample in group.samples:
            sample.status, sample.reward = Status.FINISHED, float(sample.index % 2)
        buffer.finish(group, GroupState.READY)
    buffer.take(1, groups)
    light = buffer.read_step(1)[1]
    buffer.close()
    full_groups = [replace(g, state=GroupState.TRAINED, train_step=1) for g in groups]
    return TrainBatch(1, version, light, {}), TrainBatch(1, version, full_groups, {})


def equal(one: MicroBatch, other: MicroBatch) -> bool:
    """Return whether two micro-batches are bitwise equal, including dtypes. NaN equals NaN."""
    for name in (f.name for f in fields(one)):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, torch.Tensor):
            is_equal = a.dtype == b.dtype and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
            if not is_equal or not torch.equal(a.isnan(), b.isnan()):
                return False
        elif a != b:
            return False
    return True


def rank_report(trainer: Trainer, light: TrainBatch, whole: TrainBatch) -> dict[str, object]:
    """Return the bytes that this rank reads and those of the samples that it trains, for packing and for scores."""
    samples = [s for g in light.groups for s in g.samples]
    in_hand = [s for g in whole.groups for s in g.samples]
    rows = [i for i in range(len(samples)) if i % 5]
    batch, expected = pack_rows(light, rows, trainer), pack_rows(whole, rows, trainer)
    own_rows = {row for micro in batch for row in micro.rows.tolist()}
    read = trainer.segments.bytes_read
    scores, expected_scores = (
        score_parked([LogProbRequest(s, 1) for s in sample_list if s.index == 0], trainer)
        for sample_list in (samples, in_hand)
    )
    return {
        "rank": dist.get_rank(),
        "dp": trainer.dp_rank,
        "same": len(batch) == len(expected) and all(map(equal, batch, expected)),
        "same_scores": scores == expected_scores,
        "rows": sorted(own_rows),
        "read": read,
        "own": sum(piece.length for row in own_rows for piece in samples[row].pieces),
        "read_for_scores": trainer.segments.bytes_read - read,
        "all": sum(piece.length for row in rows for piece in samples[row].pieces),
        "all_for_scores": sum(piece.length for s in samples if s.index == 0 for piece in s.pieces),
    }


def main(workplace: Path, layouts: list[str]) -> None:
    """Append the reports of all ranks to WORKPLACE/seen.jsonl."""
    light, full_batch = (
        decode((workplace / f"{name}.msgpack").read_bytes(), TrainBatch) for name in ("light", "whole")
    )
    for layout in layouts:
        config = cases.config_of(workplace / "model", workplace / "run", **cases.sections(layout))
        trainer = Trainer(config)
        rank_reports = trainer.control.gather(rank_report(trainer, light, full_batch))
        if trainer.is_main:
            with (workplace / "seen.jsonl").open("a") as file:
                file.write(json.dumps([layout, rank_reports]) + "\n")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
