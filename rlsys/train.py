"""THE LOOP. Runs on every trainer rank: `torchrun ... -m rlsys.train --config RUN/config.yaml --rollout URL`.

    take      the first groups_per_step groups that finished; what is still in flight is interrupted and parked
    train     plan -> packed micro-batches -> log-prob passes -> advantages -> loss -> optimizer (megatron-core)
    push      the new weights to every engine, attested; generation goes on, interrupted samples first

Rank 0 talks to the rollout process; what it hears is broadcast, so that all ranks do the same thing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlsys.algo.objective import Objective, Plan
from rlsys.config import Config, load_config
from rlsys.obs.metrics import MISMATCH_EDGES, MetricsWriter, mismatch_summary
from rlsys.obs.role import run_role
from rlsys.rollout.client import RolloutClient
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.schedule import learning_rate
from rlsys.trainer.signals import pack_rows, rescore, sample_table, score, score_parked, shuffled
from rlsys.trainer.trainer import Trainer
from rlsys.types import Taken
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.sync import WeightSync


def train(config: Config, rollout: RolloutClient) -> None:
    objective = Objective(config.algo)
    trainer = Trainer(config, objective.passes)
    sync = WeightSync(config, trainer.is_main)
    step, on_main = trainer.load_checkpoint(objective), trainer.on_main
    metrics = MetricsWriter(config.run.dir, resume_step=step) if trainer.is_main else None

    def push() -> dict[str, float]:
        """Every engine gets this model's weights under a new version, attested; the rollout resumes. Metrics."""
        start, checksums = time.monotonic(), EngineChecksums(trainer.hf, config.engine.tp)
        ticket = on_main(rollout.begin_push)
        tensors = trainer.named_hf_tensors()
        sync.push(checksums.watch(tensors) if trainer.is_main else tensors, ticket)
        canaries = trainer.canaries(ticket.canaries)
        attested = on_main(lambda: rollout.end_push(ticket, canaries, checksums.digests()))
        attested["time_checksums"] += checksums.seconds
        return {"time_sync": time.monotonic() - start, **attested}

    def take() -> Taken | None:
        """The groups of this step; an engine that came back without weights gets them first. None: leave."""
        while (taken := on_main(lambda: rollout.take(step))) is None:
            if on_main(rollout.leaving) is not None:
                return None
            push()
        return taken

    def score_interrupted() -> float:
        """What the weights sampled that are about to change, kept for the step that trains it. Seconds."""
        start = time.monotonic()
        scores = score_parked(on_main(lambda: rollout.unscored(step)), trainer)
        on_main(lambda: rollout.store_scores(scores))
        return time.monotonic() - start

    def write(kind: str, **values: object) -> None:
        if metrics is not None:
            metrics.write(kind, step, **values)

    def evaluate() -> float:
        result = on_main(rollout.evaluate)
        write(
            "eval",
            accuracy=result.accuracy,
            mean_length=result.mean_length,
            prompts=result.prompts,
            truncated=result.truncated,
        )
        return result.accuracy

    def settle(wait: bool) -> None:
        """A checkpoint that has been written since counts from now on."""
        if (saved := trainer.finish_checkpoint(wait)) is not None:
            on_main(lambda: rollout.commit(saved))

    on_main(lambda: rollout.wait_ready(config.engine.start_timeout))
    on_main(lambda: rollout.restore(step))
    write("run", event="resume" if step else "start")
    push()
    if step == 0:
        evaluate()
    saved = step
    while step < config.trainer.steps:
        step += 1
        start = time.monotonic()
        if (taken := take()) is None:
            step -= 1
            settle(wait=True)
            if step > saved and (on_main(rollout.leaving) or 0.0) > trainer.save_seconds:
                trainer.save_checkpoint(step, objective)
                settle(wait=True)
            write("run", event="leave")
            return
        rollout_done = time.monotonic()
        extra = {"time_score": score_interrupted()} if "behaviour" in objective.needs else {}
        stats = update(trainer, objective, taken)
        train_done = time.monotonic()
        pushed = push()
        end = time.monotonic()
        write(
            "step", **taken.metrics, **stats, **extra, weight_version=taken.weight_version,
            time_rollout=rollout_done - start, time_train=train_done - rollout_done, **pushed,
            time_step=end - start, tokens_per_s=taken.metrics["tokens"] / (end - start),
        )  # fmt: skip
        last, accuracy = step == config.trainer.steps, None
        if last or step % config.eval.every == 0:
            accuracy = evaluate()
        if config.trainer.export_every and step % config.trainer.export_every == 0:
            trainer.export_hf(config.run.dir / "exports" / f"step-{step:06d}")
        save = last or step % config.trainer.checkpoint_every == 0
        settle(wait=save)
        if save:
            trainer.save_checkpoint(step, objective, accuracy)
            saved = step
    settle(wait=True)
    write("run", event="end")


def update(trainer: Trainer, objective: Objective, taken: Taken) -> dict[str, object]:
    """One train step on the groups taken. Returns its metrics."""
    step, groups = taken.train_step, taken.groups
    plan = objective.plan(sample_table(groups, step, objective.needs))
    stats: dict[str, object] = {"effective_groups": len({int(plan.samples.group_ids[r]) for r in plan.rows})}
    sums: dict[str, Tensor] = {}
    if plan.rows:  # else every group's rewards are equal: nothing to learn
        stats |= optimise(trainer, objective, plan, taken, trainer.config.algo.minibatches, sums)
    if later := objective.put_off(
        plan, groups, step
    ):  # a selector's rest of earlier steps, in an extra update
        again, advantages = replace(taken, groups=[g for g, _ in later]), torch.tensor([a for _, a in later])
        plan = objective.plan_again(sample_table(again.groups, step, objective.needs), advantages)
        stats |= {"replayed": len(later), **optimise(trainer, objective, plan, again, 1, sums)}
    if not sums:
        return stats
    stats |= objective.metrics(sums)
    return stats | mismatch_summary(sums["mismatch_counts"].tolist(), float(sums["mismatch"]))


def optimise(
    trainer: Trainer, objective: Objective, plan: Plan, taken: Taken, parts: int, sums: dict[str, Tensor]
) -> dict[str, object]:
    """`parts` optimizer updates on the planned rows. Adds to `sums`; returns the last update's figures."""
    config = trainer.config
    stats: dict[str, object] = {}
    updates = shuffled(plan.rows, parts, (config.run.seed, taken.train_step))
    batches = [pack_rows(taken, rows, trainer) for rows in updates]
    score(batches, objective, trainer)
    objective.finish(plan, [micro for batch in batches for micro in batch], trainer.sum_over_dp)
    t, skipped = config.trainer, 0
    lr = learning_rate(t, taken.train_step, t.schedule, t.lr_end)
    for i, (rows, batch) in enumerate(zip(updates, batches, strict=True)):
        if i:
            rescore(batch, objective, trainer)
        objective.prepare(batch, trainer.sum_over_dp)
        rate = lr * objective.lr_factor(plan, rows)
        share = plan.denominator / len(updates)
        result = trainer.train_step(batch, partial(micro_loss, objective), rate, denominator=share)
        skipped += result.skipped
        objective.after_step(trainer.named_parameters(), objective.metrics(result.sums))
        figures = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": rate, "skipped_updates": skipped}
        stats = {**figures, "padding_share": result.padding_share, **result.routing}
        for name, value in result.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return stats


def micro_loss(objective: Objective, scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum of one packed micro-batch, and sums for the metrics."""
    loss, sums = objective(scores.logp, micro, scores.entropy, scores.values)
    gap = (scores.logp.detach() - micro.mu).abs()[micro.comparable]
    sums["mismatch"] = gap.sum()
    sums["mismatch_counts"] = torch.histc(gap.clamp(min=1e-12).log10(), len(MISMATCH_EDGES) - 1, -12, 2)
    return loss, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rollout", required=True, help="URL of the rollout process")
    args = parser.parse_args()
    run_role(lambda: train(load_config(args.config), RolloutClient(args.rollout)))


if __name__ == "__main__":
    main()
