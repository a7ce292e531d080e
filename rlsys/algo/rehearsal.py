"""Every plug-in of the trainer's objective, run once on a made-up step before anything starts.

Four groups: one with wins and losses, one all won, one all lost, one mixed again. Their tokens are of four weight
versions, the last response was cut off, one was drawn from another prompt. What forward passes would give is drawn
from a fixed seed. The step goes as in rlsys.trainer.step: plan, finish, prepare, loss, backward, hooks, and what
was put off; then the state goes through JSON into a second objective.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.objective import Objective
from rlsys.algo.plan import Plan
from rlsys.algo.planners import start_size
from rlsys.algo.plugin import Plugin
from rlsys.algo.registry import make_all
from rlsys.config import Config
from rlsys.errors import RlsysError, UserError
from rlsys.types import Sample, SampleGroup, Segment, Status, VersionSpan

GROUPS = 4
LARGEST = 8
"""Samples of a made-up group, at most; one more where the run's groups are odd."""
VERSION = 7
PROMPT = 2
"""Tokens of each prompt."""


def rehearse(config: Config, rewards: Sequence[str] | None = ()) -> None:
    """Raises UserError, one line, for an objective that fails or gives no finite loss.

    rewards: names of the reward's parts, none for a plain number; None: not known, then as many as are asked for.
    """
    objective = Objective(config.algo)
    if rewards is None:
        weights = getattr(objective.advantage, "weights", None) or ()
        rewards = [f"reward {i}" for i in range(len(weights))]
    groups = made_up_groups(config, rewards)
    try:
        _step(config, objective, groups)
        state = json.loads(json.dumps(objective.state_dict()))
        Objective(config.algo).load_state_dict(state)
    except RlsysError:
        raise
    except Exception as e:  # anybody's code: all that it can raise is told in one line
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise UserError(
            f"algo{_culprit(objective, e.__traceback__)} fails on a made-up step: {type(e).__name__}: {e} "
            f"({at.filename.rpartition('/')[2]}:{at.lineno})"
        ) from e


def made_up_groups(config: Config, rewards: Sequence[str]) -> list[SampleGroup]:
    """As the trainer takes them, of a size that is odd or even as the run's groups are."""
    made = make_all(config.algo, ("planners",))
    start = start_size(made["planners"], config.rollout.group_size)
    size = min(start, LARGEST + start % 2)
    groups = []
    for g in range(GROUPS):
        won = [(i % 2 == 0, True, False, i == 0)[g] for i in range(size)]
        samples = [_sample(g * size + i, g, i, won[i], rewards) for i in range(size)]
        groups.append(SampleGroup(g, g + 100, samples))
    groups[-1].samples[-1].status = Status.TRUNCATED
    groups[-1].samples[-1].trained_prompt = [1] * PROMPT
    return groups


def _sample(number: int, group: int, place: int, won: bool, rewards: Sequence[str]) -> Sample:
    sample = Sample(number, group, place, [1] * PROMPT, seed=number, status=Status.FINISHED)
    length = 1 + (3 * number) % 7
    older = min(length, number % 3)
    spans = [VersionSpan(VERSION - 1 - number % 3, 0, older), VersionSpan(VERSION, older, length)]
    mu = [-0.1 - 0.2 * ((number + t) % 5) for t in range(length)]
    sample.append(Segment([1] * length, mu, spans))
    sample.reward, sample.answer = float(won), str(place % 3)
    if rewards:
        sample.named_rewards = {name: float(won) / len(rewards) for name in rewards}
    return sample


def _table(groups: Sequence[SampleGroup]) -> Samples:
    """With every optional column."""
    samples = [s for group in groups for s in group.samples]
    return replace(
        Samples.of(groups, step=3),
        answers=torch.tensor([int(s.answer or -1) for s in samples]),
        transferred=torch.tensor([s.trained_prompt is not None for s in samples]),
        tool_penalty=torch.tensor([(s.index % 4) / 2 for s in samples]),
    )


def _step(config: Config, objective: Objective, groups: Sequence[SampleGroup]) -> None:
    """What rlsys.trainer.step does, on one rank."""
    g, weights = torch.Generator().manual_seed(0), [("weight", torch.ones(2, 2))]
    objective.start(weights)
    plan = objective.plan(_table(groups))
    updates = [rows for k in range(plan.updates) if (rows := plan.rows[k :: plan.updates])]
    if updates:
        _optimise(objective, plan, groups, updates, g)
    if later := objective.put_off(plan, groups, 4):
        again = [group for group, _ in later]
        plan = objective.plan_again(_table(again), torch.tensor([a for _, a in later]))
        _optimise(objective, plan, again, [plan.rows], g)
    objective.after_version(weights, 1.0)
    objective.average_totals(weights)
    objective.average()


def _optimise(
    objective: Objective,
    plan: Plan,
    groups: Sequence[SampleGroup],
    updates: Sequence[Sequence[int]],
    g: torch.Generator,
) -> None:
    samples = [s for group in groups for s in group.samples]
    later = objective.asks.current - {"behaviour"}
    early = objective.asks.passes if objective.asks.looks_ahead else objective.asks.passes - later
    batches = [
        _parts(samples, rows, objective.asks.passes if i else early, g) for i, rows in enumerate(updates)
    ]
    for part in () if objective.asks.looks_ahead else batches[0]:
        part.old_is_current = True
    objective.finish(plan, [part for parts in batches for part in parts])
    for parts, rows in zip(batches, updates, strict=True):
        objective.prepare(parts)
        sums: dict[str, Tensor] = {}
        for part in parts:
            for name, value in _backward(objective, part, plan.denominator / len(updates), g).items():
                sums[name] = sums[name] + value if name in sums else value
        objective.lr_factor(plan, list(rows))
        objective.after_step([("weight", torch.ones(2, 2))], objective.metrics(sums))


def _parts(
    samples: Sequence[Sample], rows: Sequence[int], passes: frozenset[str], g: torch.Generator
) -> list[Batch]:
    """Two packed micro-batches of these rows, with the fields that passes give; one where there is one row."""
    cuts = [0, (len(rows) + 1) // 2, len(rows)]
    return [_pack(samples, rows[a:b], passes, g) for a, b in pairwise(cuts) if b > a]


def _pack(
    samples: Sequence[Sample], rows: Sequence[int], passes: frozenset[str], g: torch.Generator
) -> Batch:
    chosen = [samples[r] for r in rows]
    lengths = [PROMPT + len(s.response_ids) for s in chosen]
    batch = Batch(
        tokens=torch.ones(sum(lengths), dtype=torch.long),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        rows=torch.tensor(list(rows)),
        mask=torch.tensor([m for s in chosen for m in [0.0] * PROMPT + [1.0] * len(s.response_ids)]),
        mu=torch.tensor([m for s in chosen for m in [0.0] * PROMPT + s.mu]),
        versions=torch.tensor([v for s in chosen for v in [-1] * PROMPT + s.versions()]),
        version=VERSION,
    )
    for name in sorted(passes):
        values = batch.mu + 0.1 * torch.randn(batch.mu.shape, generator=g)
        if name == "behaviour":  # of the oldest, nothing was stored
            values[batch.versions < VERSION - 2] = torch.nan
        setattr(batch, name, values.abs() if name in ("entropy", "sum_pi_squared") else values)
    return batch


def _backward(objective: Objective, part: Batch, denominator: float, g: torch.Generator) -> dict[str, Tensor]:
    """Sums for the metrics. Raises UserError for a loss or a gradient that is not finite."""
    noise = torch.randn(part.mu.shape, generator=g)
    leaves = {"logp": part.mu + 0.1 * noise, "entropy": noise.abs(), "values": noise}
    current = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    loss, sums = objective(current["logp"], part, current["entropy"], current["values"])
    if objective.critic is not None:
        loss = loss + objective.critic_loss(current["values"], part)[0]
    if loss.requires_grad:  # a part of which all tokens are masked out need not have one
        (loss / denominator).backward()
    gradients = [leaf.grad for leaf in current.values() if leaf.grad is not None]
    if not (loss.isfinite() and all(bool(grad.isfinite().all()) for grad in gradients)):
        raise UserError(f"algo: on a made-up step the loss is {loss.item():g}, or its gradient is not finite")
    return sums


def _culprit(objective: Objective, tb: TracebackType | None) -> str:
    """` (Class)` of the innermost plug-in that was running; empty when none was."""
    found = ""
    while tb is not None:
        here: Any = tb.tb_frame.f_locals.get("self", tb.tb_frame.f_locals.get("_self"))
        if isinstance(here, Plugin):
            found = f" ({type(here).__name__})"
        tb = tb.tb_next
    return found
