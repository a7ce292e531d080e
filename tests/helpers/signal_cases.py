"""A recorded train batch and the metrics of a train step on it, for each recipe, with the real trainer.

`tests/data/step.msgpack.gz` is step 5 of `algorithms/exact_old.yaml` with 6 groups per step, `over_provision: 3` and
`data.reward: answer_and_format`. Most of its tokens are one to four train steps old.

Under torchrun, `signal_cases.py WORKPLACE LAYOUT...` does the same in other parallel layouts.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.algo.objective import Objective
from rlsys.config import Config, load_config
from rlsys.config.algo import CriticSection
from rlsys.core.arrays import log_probs
from rlsys.core.messages import decode
from rlsys.core.spans import Fork, TokenSpan, TurnReward
from rlsys.core.types import Sample, SampleGroup, Status, TrainBatch
from rlsys.trainer.critic import add_critic
from rlsys.trainer.step import EarlyPasses, backward_early, train_step
from rlsys.trainer.teacher import Teachers, add_teacher
from rlsys.trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(p.stem for p in (ROOT / "configs/algorithms").glob("*.yaml"))
SIGNALS = ("entropy", "values", "ref", "sum_pi_squared", "divergence")
TEACHER = "algo.teacher={path: configs/models/quickstart-moe, top_k: 16}"
SHORT_INTERVALS = {"sync_ref": ("algo.hooks=[{name: sync_ref, interval: 1}]",)}
"""Recipe -> overrides with which it takes effect within two steps."""
STALE_EVERY, STALE_BY = 7, 1.8
WEIGHT_SCALE = 1.3
"""Scale of the weights of reference, teacher and average, so that their log-probs differ from those of the policy."""


def recorded() -> TrainBatch:
    """Return the recorded train batch."""
    packed = gzip.decompress((ROOT / "tests/data/step.msgpack.gz").read_bytes())
    return decode(packed, TrainBatch)


def stale(batch: TrainBatch) -> TrainBatch:
    """Change `mu` as if the tokens were more off-policy, because some corrections act only on large ratios.

    In even samples, `mu` of each seventh token decreases by 1.8 nats. In every other odd sample, the log-probs of all
    tokens are halved.
    """

    def shift_mu(sample: Sample) -> Sample:
        if sample.index % 4 == 1:
            return sample
        if sample.index % 2:
            return replace(sample, mu=log_probs(m / 2 for m in sample.mu))
        return replace(
            sample, mu=log_probs(m - STALE_BY * (i % STALE_EVERY == 0) for i, m in enumerate(sample.mu))
        )

    return replace(batch, groups=[replace(g, samples=[shift_mu(s) for s in g.samples]) for g in batch.groups])


def odd_groups(batch: TrainBatch) -> TrainBatch:
    """Truncate groups to seven samples, because the median needs an odd number."""
    return replace(batch, groups=[replace(g, samples=g.samples[:7]) for g in batch.groups])


def single_rewards(batch: TrainBatch) -> TrainBatch:
    """Keep only the reward `answer` of the named rewards."""

    def plain(group: SampleGroup) -> SampleGroup:
        samples = []
        for s in group.samples:
            assert s.named_rewards is not None
            samples.append(replace(s, reward=s.named_rewards["answer"], named_rewards=None))
        return replace(group, samples=samples)

    return replace(batch, groups=[plain(g) for g in batch.groups])


def partly_transferred(batch: TrainBatch) -> TrainBatch:
    """Generate every second success of each group from a prompt without its first token."""

    def transfer(group: SampleGroup) -> SampleGroup:
        moved = {s.sample_id for s in [s for s in group.samples if s.reward][::2]}
        samples = [
            replace(s, prompt_ids=s.prompt_ids[1:], trained_prompt=s.prompt_ids)
            if s.sample_id in moved
            else s
            for s in group.samples
        ]
        return replace(group, samples=samples)

    return replace(batch, groups=[transfer(g) for g in batch.groups])


def with_turns(batch: TrainBatch) -> TrainBatch:
    """Split each response of six tokens or more into two turns with one observed token in between.

    In every third sample, the first turn does not match.
    """

    def split_turns(sample: Sample) -> Sample:
        if sample.tokens < 6:
            return replace(sample, turn_rewards=[TurnReward(sample.reward or 0.0)])
        midpoint = sample.tokens // 2
        rewards = [
            TurnReward(float(sample.index % 2), sample.index % 3 > 0),
            TurnReward(sample.reward or 0.0),
        ]
        return replace(sample, observed=[TokenSpan(midpoint, midpoint + 1)], turn_rewards=rewards)

    return replace(
        batch, groups=[replace(g, samples=[split_turns(s) for s in g.samples]) for g in batch.groups]
    )


def with_truncation(batch: TrainBatch) -> TrainBatch:
    """Mark the last response of each group as truncated."""

    def truncate(group: SampleGroup) -> SampleGroup:
        last = replace(group.samples[-1], status=Status.TRUNCATED)
        return replace(group, samples=[*group.samples[:-1], last])

    return replace(batch, groups=[truncate(g) for g in batch.groups])


def with_forks(batch: TrainBatch) -> TrainBatch:
    """Fork every third response of each group from the previous response, at its second token."""

    def tree(group: SampleGroup) -> SampleGroup:
        def branch(s: Sample) -> Sample:
            return replace(s, fork=Fork(s.index - 1, 1)) if s.index % 3 == 1 else s

        return replace(group, samples=[branch(s) for s in group.samples])

    return replace(batch, groups=[tree(g) for g in batch.groups])


def batch_of(recipe: str) -> TrainBatch:
    batch = stale(recorded())
    batch = batch if recipe == "gdpo" else single_rewards(batch)
    change = {
        "mc_grpo": odd_groups, "lens": partly_transferred, "overlong_filter": with_truncation,
        "branch_grpo": with_forks,
        **dict.fromkeys(("dart", "mapo", "ui_s1", "gae_turn_rewards"), with_turns),
    }.get(recipe)  # fmt: skip
    return batch if change is None else change(batch)


def trainer_of(run: Path, *overrides: str) -> Trainer:
    """Return a trainer that computes every signal, with a reference that differs from the policy."""
    trainer = Trainer(config_of(None, run, TEACHER, *overrides), SIGNALS)
    add_critic(trainer, CriticSection())
    add_teacher(trainer)
    assert isinstance(trainer.teacher, Teachers)
    for _, parameter in trainer.teacher.models[0].chunks.named_parameters():
        parameter.data.mul_(WEIGHT_SCALE)
    for weight in trainer.first_weights.values():
        weight *= WEIGHT_SCALE
    return trainer


def config_of(recipe: str | None, run: Path, *overrides: str) -> Config:
    """Return the config of a recipe or, for None, the quickstart, with a learning rate that changes no weight."""
    path = ROOT / "configs" / (f"algorithms/{recipe}.yaml" if recipe else "quickstart.yaml")
    return load_config(path, [f"run.dir={run}", "trainer.lr=1e-30", "trainer.token_budget=512", *overrides])


def outcome(trainer: Trainer, recipe: str | None, run: Path, *overrides: str) -> dict[str, Any]:
    """Run one train step with the recipe's plug-ins on an existing trainer and return its metrics.

    Weight averages start from the reference, one version before.
    """
    config = config_of(recipe, run, *SHORT_INTERVALS.get(recipe or "", ()), *overrides)
    batch, early = batch_of(recipe or ""), None
    objective = Objective(config.algo)
    devices = {name: parameter.device for name, parameter in trainer.named_parameters()}
    for hook in objective.hooks:
        hook.start((name, weight.to(devices[name])) for name, weight in trainer.first_weights.items())
        hook.after_version(trainer.named_parameters(), 1.0)
    if config.trainer.early_backward:
        early = EarlyPasses()
        for groups in (batch.groups[:2], batch.groups[2:3]):
            backward_early(trainer, objective, replace(batch, groups=groups), early)
    metrics = train_step(trainer, objective, batch, early)
    return {k: v for k, v in metrics.items() if isinstance(v, float | int) and k != "time_early"}


def main(workplace: Path, layouts: list[str]) -> None:
    results: dict[str, Any] = {}
    for layout in layouts:
        parallel = [f"parallel.{pair}" for pair in layout.split(",")]
        trainer = trainer_of(workplace / "run", *parallel)
        results[layout] = {recipe: outcome(trainer, recipe, workplace / "run") for recipe in RECIPES}
        if trainer.is_main:
            (workplace / "seen.json").write_text(json.dumps(results))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
