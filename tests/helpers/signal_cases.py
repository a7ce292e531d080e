"""One recorded train step of the real stack, and what each recipe makes of it on the real trainer.

`tests/data/step.msgpack.gz` is step 5 of `algorithms/exact_old.yaml` with 6 groups a step, `over_provision: 3` and
`data.reward: answer_and_format`: most of its tokens are one to four train steps old.

Run under torchrun it does the same in other layouts: `signal_cases.py WORKPLACE LAYOUT...`.
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
SOONER = {"sync_ref": ("algo.hooks=[{name: sync_ref, interval: 1}]",)}
"""Recipe -> what makes it act within two steps."""
STALE_EVERY, STALE_BY = 7, 1.8
OTHER = 1.3
"""What the reference's weights, and those of the average, are of the policy's: their log-probs must differ."""


def recorded() -> TrainBatch:
    packed = gzip.decompress((ROOT / "tests/data/step.msgpack.gz").read_bytes())
    return decode(packed, TrainBatch)


def stale(taken: TrainBatch) -> TrainBatch:
    """Of other weights than it was: a recorded step drifts less than the ratios that some corrections are for.

    In even samples, each seventh token was unlikelier to its engine by 1.8 nats; in every other odd one, all tokens
    were likelier.
    """

    def older(sample: Sample) -> Sample:
        if sample.index % 4 == 1:
            return sample
        if sample.index % 2:
            return replace(sample, mu=log_probs(m / 2 for m in sample.mu))
        return replace(
            sample, mu=log_probs(m - STALE_BY * (i % STALE_EVERY == 0) for i, m in enumerate(sample.mu))
        )

    return replace(taken, groups=[replace(g, samples=[older(s) for s in g.samples]) for g in taken.groups])


def odd(taken: TrainBatch) -> TrainBatch:
    """Groups of seven, as the median needs."""
    return replace(taken, groups=[replace(g, samples=g.samples[:7]) for g in taken.groups])


def single_rewards(taken: TrainBatch) -> TrainBatch:
    """Only the first of the named rewards."""

    def plain(group: SampleGroup) -> SampleGroup:
        samples = []
        for s in group.samples:
            assert s.named_rewards is not None
            samples.append(replace(s, reward=s.named_rewards["answer"], named_rewards=None))
        return replace(group, samples=samples)

    return replace(taken, groups=[plain(g) for g in taken.groups])


def partly_transferred(taken: TrainBatch) -> TrainBatch:
    """Of each group, every second success was drawn from a prompt without its first token."""

    def drawn(group: SampleGroup) -> SampleGroup:
        moved = {s.sample_id for s in [s for s in group.samples if s.reward][::2]}
        samples = [
            replace(s, prompt_ids=s.prompt_ids[1:], trained_prompt=s.prompt_ids)
            if s.sample_id in moved
            else s
            for s in group.samples
        ]
        return replace(group, samples=samples)

    return replace(taken, groups=[drawn(g) for g in taken.groups])


def in_turns(taken: TrainBatch) -> TrainBatch:
    """Each response of six tokens or more has two turns, with one token that was told between them; every third first
    turn did not match."""

    def played(sample: Sample) -> Sample:
        if sample.tokens < 6:
            return replace(sample, turn_rewards=[TurnReward(sample.reward or 0.0)])
        midpoint = sample.tokens // 2
        marks = [TurnReward(float(sample.index % 2), sample.index % 3 > 0), TurnReward(sample.reward or 0.0)]
        return replace(sample, observed=[TokenSpan(midpoint, midpoint + 1)], turn_rewards=marks)

    return replace(taken, groups=[replace(g, samples=[played(s) for s in g.samples]) for g in taken.groups])


def cut_off(taken: TrainBatch) -> TrainBatch:
    """The last response of each group was cut off."""

    def closed(group: SampleGroup) -> SampleGroup:
        last = replace(group.samples[-1], status=Status.TRUNCATED)
        return replace(group, samples=[*group.samples[:-1], last])

    return replace(taken, groups=[closed(g) for g in taken.groups])


def forked(taken: TrainBatch) -> TrainBatch:
    """Of each group, every third response branches off the one before it, at its second token."""

    def tree(group: SampleGroup) -> SampleGroup:
        def branch(s: Sample) -> Sample:
            return replace(s, fork=Fork(s.index - 1, 1)) if s.index % 3 == 1 else s

        return replace(group, samples=[branch(s) for s in group.samples])

    return replace(taken, groups=[tree(g) for g in taken.groups])


def batch_of(recipe: str) -> TrainBatch:
    batch = stale(recorded())
    batch = batch if recipe == "gdpo" else single_rewards(batch)
    change = {
        "mc_grpo": odd, "lens": partly_transferred, "overlong_filter": cut_off, "branch_grpo": forked,
        **dict.fromkeys(("dart", "mapo", "ui_s1", "gae_turn_rewards"), in_turns),
    }.get(recipe)  # fmt: skip
    return batch if change is None else change(batch)


def trainer_of(run: Path, *overrides: str) -> Trainer:
    """It serves every signal, and its reference is not its policy."""
    trainer = Trainer(config_of(None, run, TEACHER, *overrides), SIGNALS)
    add_critic(trainer, CriticSection())
    add_teacher(trainer)
    assert isinstance(trainer.teacher, Teachers)
    for _, parameter in trainer.teacher.models[0].chunks.named_parameters():
        parameter.data.mul_(OTHER)
    for weight in trainer.first_weights.values():
        weight *= OTHER
    return trainer


def config_of(recipe: str | None, run: Path, *overrides: str) -> Config:
    """Of a recipe, None: of the quickstart. The learning rate is too small to change a weight."""
    path = ROOT / "configs" / (f"algorithms/{recipe}.yaml" if recipe else "quickstart.yaml")
    return load_config(path, [f"run.dir={run}", "trainer.lr=1e-30", "trainer.token_budget=512", *overrides])


def outcome(trainer: Trainer, recipe: str | None, run: Path, *overrides: str) -> dict[str, Any]:
    """Metrics of one step, with the recipe's plug-ins on the trainer that is there. Averages began with the
    reference, a version ago."""
    config = config_of(recipe, run, *SOONER.get(recipe or "", ()), *overrides)
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
