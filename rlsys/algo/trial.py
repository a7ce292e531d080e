"""Trial of the trainer's objective on a synthetic step before a run starts.

The step has four groups: two with successes and failures, one with successes only, one with failures only. Their
tokens have four weight versions. The last response is truncated and was generated from another prompt. Results of
forward passes are random numbers with a fixed seed. The step runs as in rlsys.trainer.step: plan, finish, prepare,
loss, backward, hooks and deferred samples. Then the objective's state is stored as JSON and loaded into a second
objective.
"""

from __future__ import annotations

import json
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples, fork_columns
from rlsys.algo.figures import loss_metrics
from rlsys.algo.objective import Objective, StepPlan
from rlsys.algo.planners import start_size
from rlsys.algo.plugin import Plugin
from rlsys.algo.registry import make_all, name_of
from rlsys.algo.requirements import Requirements
from rlsys.config import Config
from rlsys.core.errors import RlsysError, UserError
from rlsys.core.spans import Fork, VersionSpan
from rlsys.core.types import Sample, SampleGroup, Segment, Status

GROUPS = 4
LARGEST = 8
"""Largest even number of samples of a synthetic group."""
VERSION = 7
"""Weight version at the start of the synthetic step."""
PROMPT = 2
"""Number of tokens of each prompt."""


def try_objective(config: Config, rewards: Sequence[str] | None = ()) -> None:
    """Run the objective of a config on a synthetic step.

    Args:
        config: the config.
        rewards: names of the named rewards; empty for a single reward; None if the names are unknown, in which case
            there are as many as the advantage estimator has weights.

    Raises:
        UserError: the objective raises an exception, or its loss or gradient is not finite.
    """
    objective = Objective(config.algo)
    if rewards is None:
        weights = getattr(objective.advantage, "weights", None) or ()
        rewards = [f"reward {i}" for i in range(len(weights))]
    groups = made_up_groups(config, rewards)
    try:
        made_up_step(objective, groups)
        state = json.loads(json.dumps(objective.state_dict()))
        Objective(config.algo).load_state_dict(state)
    except RlsysError:
        raise
    except Exception as e:  # user code: any error is reported in one line
        frame = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(
            f"algo{_failing_plugin(e.__traceback__)} fails on a made-up step: {type(e).__name__}: {e} "
            f"({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        ) from e


def made_up_groups(config: Config, rewards: Sequence[str]) -> list[SampleGroup]:
    """Return synthetic groups as the trainer receives them.

    The number of samples is odd if the run's groups start with an odd number.

    Args:
        config: config of the run.
        rewards: names of the named rewards; empty for a single reward.
    """
    plugins = make_all(config.algo, ("planners",))
    start = start_size(plugins["planners"], config.rollout.group_size)
    size = min(start, LARGEST + start % 2)
    groups = []
    for g in range(GROUPS):
        is_success = [(i % 2 == 0, True, False, i == 0)[g] for i in range(size)]
        samples = [_sample(g * size + i, g, i, is_success[i], rewards) for i in range(size)]
        groups.append(SampleGroup(g, g + 100, samples))
    groups[-1].samples[-1].status = Status.TRUNCATED
    groups[-1].samples[-1].trained_prompt = [1] * PROMPT
    return groups


def _sample(number: int, group: int, index: int, is_success: bool, rewards: Sequence[str]) -> Sample:
    """Return a finished sample of 1 to 7 response tokens. See made_up_groups for `rewards`."""
    sample = Sample(number, group, index, [1] * PROMPT, seed=number, status=Status.FINISHED)
    length = 1 + (3 * number) % 7
    older = min(length, number % 3)
    spans = [VersionSpan(VERSION - 1 - number % 3, 0, older), VersionSpan(VERSION, older, length)]
    mu = [-0.1 - 0.2 * ((number + t) % 5) for t in range(length)]
    sample.append(Segment([1] * length, mu, spans))
    sample.reward, sample.answer = float(is_success), str(index % 3)
    sample.fork = Fork(index - 1, 1) if index % 3 == 1 else None
    if rewards:
        sample.named_rewards = {name: float(is_success) / len(rewards) for name in rewards}
    return sample


def _table(groups: Sequence[SampleGroup]) -> Samples:
    """Return the sample table with all optional columns."""
    samples = [s for group in groups for s in group.samples]
    indices, stems, forks = fork_columns(samples).values()
    return replace(
        Samples.of(groups, step=3),
        answers=torch.tensor([int(s.answer or -1) for s in samples]),
        transferred=torch.tensor([s.trained_prompt is not None for s in samples]),
        tool_penalty=torch.tensor([(s.index % 4) / 2 for s in samples]),
        turn_rewards=torch.tensor([[(s.index % 3) / 2, float(_turns(s) > 1)] for s in samples]),
        turn_matches=torch.tensor([[s.index % 5 > 0, True] for s in samples]),
        turn_counts=torch.tensor([_turns(s) for s in samples]),
        index_in_group=indices,
        stem=stems,
        fork_at=forks,
    )


def _turns(sample: Sample) -> int:
    """Return the number of turns of a synthetic sample: two if it has tokens for both."""
    return min(2, len(sample.response_ids))


@dataclass
class Outcome:
    """Result of a synthetic step.

    Attributes:
        metrics: Metrics of the last update.
        gradients: Row of a packed sample -> gradient of the loss with respect to the log-probs of its tokens,
            `[tokens]`, summed over the updates.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)


def made_up_step(objective: Objective, groups: Sequence[SampleGroup], pieces: int = 2) -> Outcome:
    """Run a train step on one rank, as rlsys.trainer.step does.

    Args:
        objective: the objective, whose state changes.
        groups: result of made_up_groups.
        pieces: number of micro-batches per update.

    Raises:
        UserError: a loss or a gradient is not finite.
        Exception: any exception of a plug-in.
    """
    weights = [("weight", torch.ones(2, 2))]
    outcome = Outcome()
    objective.start(lambda: weights)
    plan = objective.plan(_table(groups))
    updates = [rows for k in range(plan.updates) if (rows := plan.rows[k :: plan.updates])]
    if updates:
        _learn(objective, plan, groups, updates, pieces, outcome)
    if deferred := objective.defer(plan, groups, 4):
        deferred_groups = [group for group, _ in deferred]
        plan = objective.plan_deferred(_table(deferred_groups), torch.tensor([a for _, a in deferred]))
        _learn(objective, plan, deferred_groups, [plan.rows], pieces, outcome)
    objective.after_version(lambda: weights, 1.0)
    objective.average_totals(weights)
    objective.average()
    return outcome


def _learn(
    objective: Objective,
    plan: StepPlan,
    groups: Sequence[SampleGroup],
    updates: Sequence[Sequence[int]],
    pieces: int,
    outcome: Outcome,
) -> None:
    """Run the optimizer updates of a plan, and add metrics and gradients to `outcome`.

    Args:
        objective: the objective.
        plan: the plan.
        groups: groups of the plan's samples.
        updates: rows of each update.
        pieces: number of micro-batches per update.
        outcome: is changed in place.
    """
    requirements = objective.requirements
    batches = _update_batches(requirements, [s for group in groups for s in group.samples], updates, pieces)
    objective.finish(plan, [part for parts in batches for part in parts])
    for parts, rows in zip(batches, updates, strict=True):
        if not objective.trains(parts):
            continue
        if requirements.prepares:
            objective.prepare(parts)
        sums: dict[str, Tensor] = {}
        for part in parts:
            for name, value in _backward(objective, part, plan.denominator / len(updates), outcome).items():
                sums[name] = sums[name] + value if name in sums else value
        objective.lr_factor(plan, list(rows))
        outcome.metrics = loss_metrics(sums, requirements.needs)
        objective.after_step(lambda: [("weight", torch.ones(2, 2))], outcome.metrics)


def _update_batches(
    requirements: Requirements, samples: Sequence[Sample], updates: Sequence[Sequence[int]], pieces: int
) -> list[list[Batch]]:
    """Return the micro-batches of each update, with the fields of the required passes.

    As in the trainer, the first update has no separate pass of the policy unless a plug-in looks ahead.
    """
    passes = requirements.passes
    first_passes = passes if requirements.looks_ahead else passes - (requirements.current - {"behaviour"})
    batches = [
        _micro_batches(samples, rows, passes if i else first_passes, pieces) for i, rows in enumerate(updates)
    ]
    if not requirements.looks_ahead:
        for part in batches[0]:
            part.old_is_current = True
    return batches


def _micro_batches(
    samples: Sequence[Sample], rows: Sequence[int], passes: frozenset[str], pieces: int
) -> list[Batch]:
    """Return up to `pieces` micro-batches of these rows, with a field for each member of `passes`."""
    cuts = [len(rows) * k // pieces for k in range(pieces + 1)]
    return [_pack(samples, rows[a:b], passes) for a, b in pairwise(cuts) if b > a]


def _pack(samples: Sequence[Sample], rows: Sequence[int], passes: frozenset[str]) -> Batch:
    """Return a packed batch of the samples with these rows, with random values for each member of `passes`."""
    packed = [samples[r] for r in rows]
    lengths = [PROMPT + len(s.response_ids) for s in packed]
    batch = Batch(
        tokens=torch.ones(sum(lengths), dtype=torch.long),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        rows=torch.tensor(list(rows)),
        mask=torch.tensor([m for s in packed for m in [0.0] * PROMPT + [1.0] * len(s.response_ids)]),
        mu=torch.tensor([m for s in packed for m in [*[0.0] * PROMPT, *s.mu]], dtype=torch.float64),
        versions=torch.tensor([v for s in packed for v in [-1] * PROMPT + s.versions()]),
        turns=torch.tensor(
            [t for s in packed for t in [-1] * PROMPT + [int(i > 0) for i in range(s.tokens)]]
        ),
        version=VERSION,
    )
    for name in sorted(passes):
        values = batch.mu + 0.1 * _noise(batch, name)
        if name == "behaviour":  # not stored for the oldest version
            values[batch.versions < VERSION - 2] = torch.nan
        setattr(batch, name, values.abs() if name in ("entropy", "sum_pi_squared") else values)
    return batch


def _noise(batch: Batch, name: str) -> Tensor:
    """Return random numbers, `[T]`, that depend only on the name, the row and the position in the row."""
    values = []
    for row, length in zip(batch.rows.tolist(), batch.cu_seqlens.diff().tolist(), strict=True):
        g = torch.Generator().manual_seed(zlib.crc32(f"{name} {row}".encode()))
        values.append(torch.randn(length, generator=g, dtype=torch.float64))
    return torch.cat(values)


def _backward(objective: Objective, part: Batch, denominator: float, outcome: Outcome) -> dict[str, Tensor]:
    """Run forward and backward pass of a micro-batch; add gradients to `outcome`, and return the sums for metrics.

    Raises:
        UserError: the loss or a gradient is not finite.
    """
    leaves = {
        "logp": part.mu + 0.1 * _noise(part, "logp"),
        "entropy": _noise(part, "entropy now").abs(),
        "values": _noise(part, "values now"),
        "divergence": _noise(part, "divergence now").abs(),
    }
    current = {name: value.requires_grad_() for name, value in leaves.items()}
    loss, sums = objective(batch=part, **current)
    if objective.critic is not None:
        loss = loss + objective.critic_loss(current["values"], part)[0]
    if loss.requires_grad:  # a part whose tokens are all masked may have no gradient
        (loss / denominator).backward()
    gradients = [leaf.grad for leaf in current.values() if leaf.grad is not None]
    if not (loss.isfinite() and all(bool(grad.isfinite().all()) for grad in gradients)):
        raise UserError(f"algo: on a made-up step the loss is {loss.item():g}, or its gradient is not finite")
    logp_gradient = current["logp"].grad
    if logp_gradient is None:
        logp_gradient = torch.zeros_like(part.mu)
    row_gradients = logp_gradient.split(part.cu_seqlens.diff().tolist())
    for row, gradient in zip(part.rows.tolist(), row_gradients, strict=True):
        outcome.gradients[row] = outcome.gradients.get(row, torch.zeros_like(gradient)) + gradient
    return sums


def _failing_plugin(tb: TracebackType | None) -> str:
    """Return " (NAME)" for the innermost plug-in of a traceback; empty if there is none."""
    label = ""
    while tb is not None:
        owner: Any = tb.tb_frame.f_locals.get("self", tb.tb_frame.f_locals.get("_self"))
        if isinstance(owner, Plugin):
            label = f" ({name_of(owner)})"
        tb = tb.tb_next
    return label
