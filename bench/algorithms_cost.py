"""Share of a train step that an algorithm takes, measured on the real trainer with a recorded step. See
algorithms.py."""

from __future__ import annotations

import gzip
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import ROOT

from rlsys.algo.anchors import CURRENT
from rlsys.algo.objective import Objective
from rlsys.config import load_config
from rlsys.config.algo import CriticSection
from rlsys.core.messages import decode
from rlsys.core.spans import TurnReward
from rlsys.core.types import Sample, SampleGroup, TrainBatch
from rlsys.trainer import step
from rlsys.trainer.critic import add_critic
from rlsys.trainer.trainer import Trainer

GROUPS = 16
"""Groups of the measured step: the recorded groups, repeated."""
TIMED = ("plan", "finish", "prepare", "__call__", "lr_factor", "defer")


class TimedObjective(Objective):
    """An objective that measures the seconds of its methods, without the backward pass through the loss term."""

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.seconds = 0.0


class ScoringObjective(TimedObjective):
    """An objective that requests a scoring pass before every update, as if `old` were needed before the loss."""

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.requirements = replace(
            self.requirements, scored=self.requirements.passes, looks_ahead=("the bench",)
        )


def _clocked(name: str) -> Any:
    plain = getattr(Objective, name)

    def timed(self: TimedObjective, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start

    return timed


for method in TIMED:
    setattr(TimedObjective, method, _clocked(method))


def full_step(odd: bool, named: bool) -> TrainBatch:
    """Return the recorded step with GROUPS groups; with `odd` they have seven samples each."""
    packed = gzip.decompress((ROOT / "tests" / "data" / "step.msgpack.gz").read_bytes())
    batch = decode(packed, TrainBatch)

    def sample(s: Sample) -> Sample:
        marks = s.named_rewards or {"answer": s.reward or 0.0}
        s = replace(s, turn_rewards=[TurnReward(marks["answer"], True)])
        return s if named else replace(s, reward=marks["answer"], named_rewards=None)

    def group(i: int) -> SampleGroup:
        source_group = batch.groups[i % len(batch.groups)]
        samples = [replace(sample(s), group_id=i) for s in source_group.samples[: 7 if odd else None]]
        return replace(source_group, group_id=i, samples=samples)

    return replace(batch, groups=[group(i) for i in range(GROUPS)])


def measure_cost(
    names: Sequence[str], work: Path, repeats: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each recipe with its figures, one value per repeat: the share of the algorithm in a step, the share of
    the forward passes that it requests, and the seconds of a step. `seconds_scored`, for recipes that need no scoring
    pass for `old`: the seconds of a step with that pass. Repeats are interleaved."""
    if not names:
        return
    quick = load_config(
        ROOT / "configs" / "quickstart.yaml", [f"run.dir={work / 'cost'}", "trainer.lr=1e-30"]
    )
    trainer = Trainer(quick, ("entropy", "values", "ref", "sum_pi_squared"))
    add_critic(trainer, CriticSection())
    passes = [0.0]

    def timed(score: Callable[..., Any]) -> Callable[..., Any]:
        def timed_score(*args: Any) -> Any:
            start = time.perf_counter()
            result = score(*args)
            passes[0] += time.perf_counter() - start
            return result

        return timed_score

    for each in (trainer, trainer.critic):
        each.passes.score = timed(each.passes.score)  # type: ignore
    figures: dict[str, dict[str, list[float]]] = {n: defaultdict(list) for n in names}
    for _ in range(repeats):
        for name in names:
            section = load_config(ROOT / "configs" / "algorithms" / f"{name}.yaml").algo
            objective, batch = TimedObjective(section), full_step(name == "mc_grpo", name == "gdpo")
            start, passes[0] = time.perf_counter(), 0.0
            step.train_step(trainer, objective, batch)
            total = time.perf_counter() - start
            figures[name]["algorithm_share"].append(objective.seconds / total)
            figures[name]["passes_share"].append(passes[0] / total)
            figures[name]["seconds"].append(total)
            if objective.requirements.passes & CURRENT and not objective.requirements.looks_ahead:
                start = time.perf_counter()
                step.train_step(trainer, ScoringObjective(section), batch)
                figures[name]["seconds_scored"].append(time.perf_counter() - start)
    trainer.close()
    yield from figures.items()
