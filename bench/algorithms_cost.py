"""Part `cost` of algorithms.py: the share of a train step that an algorithm takes, on the real trainer.

The step is the recorded step of the tests.
"""

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
"""Methods of Objective that TimedObjective measures."""


class TimedObjective(Objective):
    """An objective that measures the time of its methods, without the backward pass through the loss term.

    Attributes:
        seconds: time in the methods of TIMED so far.
    """

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.seconds = 0.0


class ScoringObjective(TimedObjective):
    """An objective that requests a scoring pass before every update, as if it needed `old` before the loss."""

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.requirements = replace(
            self.requirements, scored=self.requirements.passes, looks_ahead=("the bench",)
        )


def _timed_method(name: str) -> Any:
    """Return the method `name` of Objective, extended so that it adds its time to `seconds`."""
    method = getattr(Objective, name)

    def timed(self: TimedObjective, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start

    return timed


for _name in TIMED:
    setattr(TimedObjective, _name, _timed_method(_name))


def full_step(odd: bool, named: bool) -> TrainBatch:
    """Return the recorded step with GROUPS groups.

    Args:
        odd: whether to keep only seven samples of each group.
        named: whether rewards keep their named parts; otherwise the reward is the part `answer`.
    """
    packed = gzip.decompress((ROOT / "tests" / "data" / "step.msgpack.gz").read_bytes())
    batch = decode(packed, TrainBatch)

    def sample(s: Sample) -> Sample:
        parts = s.named_rewards or {"answer": s.reward or 0.0}
        s = replace(s, turn_rewards=[TurnReward(parts["answer"], True)])
        return s if named else replace(s, reward=parts["answer"], named_rewards=None)

    def group(i: int) -> SampleGroup:
        source_group = batch.groups[i % len(batch.groups)]
        samples = [replace(sample(s), group_id=i) for s in source_group.samples[: 7 if odd else None]]
        return replace(source_group, group_id=i, samples=samples)

    return replace(batch, groups=[group(i) for i in range(GROUPS)])


def measure_cost(
    names: Sequence[str], work: Path, repeats: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each recipe with its figures, which have one value per repeat.

    Args:
        names: recipes of configs/algorithms.
        work: folder of the trainer's run.
        repeats: number of repeats, interleaved over the recipes.

    Yields:
        name and figures of a recipe:
        algorithm_share: share of a step in the algorithm's own methods.
        passes_share: share of a step in the scoring passes that the algorithm requests.
        seconds: seconds of a step.
        seconds_scored: seconds of a step with a scoring pass, for recipes that need no scoring pass for `old`.
    """
    if not names:
        return
    config = load_config(
        ROOT / "configs" / "quickstart.yaml", [f"run.dir={work / 'cost'}", "trainer.lr=1e-30"]
    )
    trainer = Trainer(config, ("entropy", "values", "ref", "sum_pi_squared"))
    add_critic(trainer, CriticSection())
    scoring_seconds = [0.0]

    def timed(score: Callable[..., Any]) -> Callable[..., Any]:
        def timed_score(*args: Any) -> Any:
            start = time.perf_counter()
            result = score(*args)
            scoring_seconds[0] += time.perf_counter() - start
            return result

        return timed_score

    for model in (trainer, trainer.critic):
        model.passes.score = timed(model.passes.score)  # type: ignore
    figures: dict[str, dict[str, list[float]]] = {n: defaultdict(list) for n in names}
    for _ in range(repeats):
        for name in names:
            section = load_config(ROOT / "configs" / "algorithms" / f"{name}.yaml").algo
            objective = TimedObjective(section)
            batch = full_step(odd=name == "mc_grpo", named=name == "gdpo")
            scoring_seconds[0] = 0.0
            start = time.perf_counter()
            step.train_step(trainer, objective, batch)
            total = time.perf_counter() - start
            figures[name]["algorithm_share"].append(objective.seconds / total)
            figures[name]["passes_share"].append(scoring_seconds[0] / total)
            figures[name]["seconds"].append(total)
            if objective.requirements.passes & CURRENT and not objective.requirements.looks_ahead:
                start = time.perf_counter()
                step.train_step(trainer, ScoringObjective(section), batch)
                figures[name]["seconds_scored"].append(time.perf_counter() - start)
    trainer.close()
    yield from figures.items()
