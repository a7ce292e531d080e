"""What a selector puts off keeps its tokens, when the run has deleted them, and over a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.algo.objective import Objective
from rlsys.config.algo import AlgoSection
from rlsys.core.errors import RunError
from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import GroupState, Prompt, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import SegmentReader
from rlsys.trainer.step import sample_table

SIZE = 8


def objective(capacity: int) -> Objective:
    selector = {"name": "rorecomp", "alpha": 0.5, "capacity": capacity}
    return Objective(AlgoSection.model_validate({"selectors": [selector]}))


def test_deferred_tokens_survive_pruning_and_a_checkpoint(tmp_path: Path) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", SIZE)
    version = buffer.versions.new(0)
    group = buffer.issue(Prompt(0, "", [1, 2], {}), range(SIZE))
    for s, tokens in zip(group.samples, [5, 1, 9, 3, 4, 8, 2, 6], strict=True):
        ids = [10 * s.index + i for i in range(tokens)]
        routes = RouteSpan(0, tokens + 1, bytes(tokens + 1))
        s.append(
            Segment(ids, [-i / 7 for i in ids], [VersionSpan(version, 0, tokens)], "stop", routes=routes)
        )
        s.status, s.reward = Status.FINISHED, float(s.index < 4)
    buffer.finish(group, GroupState.READY)
    buffer.take(1, [group])
    _, light = buffer.read_step(1)
    buffer.flush()

    first = objective(capacity=99)
    plan = first.plan(sample_table(light, 1, first.requirements.needs))
    assert len(plan.deferred) == 4
    with SegmentReader(tmp_path) as segments:
        assert first.defer(plan, light, 1, segments.load) == []
    buffer.prune(1)
    buffer.flush()
    with pytest.raises(RunError, match=r"sample 0: 5 tokens in the ledger, but 0 in its segments"):
        buffer.load(replace(s, pieces=[]) for s in light[0].samples)

    second = objective(capacity=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    nothing = replace(plan, deferred=[])
    due = second.defer(nothing, [], 2)
    expected = [group.samples[row] for row in plan.deferred]
    due_samples = sorted(
        (g.samples[0] for g, _ in due), key=lambda s: s.index
    )  # a draw orders what one step puts off
    assert [(s.response_ids, s.mu, s.routes) for s in due_samples] == [
        (s.response_ids, s.mu, s.routes) for s in expected
    ]
    assert all(len(s.response_ids) == s.tokens and not s.pieces for s in due_samples)
    buffer.close()
