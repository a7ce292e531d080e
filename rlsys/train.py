"""THE LOOP. Runs on every trainer rank: `torchrun ... -m rlsys.train --config RUN/config.yaml --rollout URL`.

    take      the first groups_per_step groups that finished; what is still in flight is interrupted and parked
              (with trainer.early_backward, groups that are done go backward while the others are made)
    train     plan -> packed micro-batches -> log-prob passes -> advantages -> loss -> optimizer (megatron-core)
    push      the new weights to every engine, attested; generation goes on, interrupted samples first

Rank 0 talks to the rollout process; what it hears is broadcast, so that all ranks do the same thing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from launch.layout import lay_out, push_plan
from rlsys.algo.objective import Objective
from rlsys.config import Config, load_config
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.owner import Owner, of_process
from rlsys.rollout.client import RolloutClient
from rlsys.trainer.critic import add_critic
from rlsys.trainer.signals import score_parked
from rlsys.trainer.trainer import Trainer
from rlsys.trainer.update import Early, go_backward, update
from rlsys.types import Taken
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.fp8 import for_engines
from rlsys.weights.sync import WeightSync


def train(config: Config, rollout: RolloutClient, owner: Owner) -> None:
    objective = Objective(config.algo)
    trainer = Trainer(config, objective.passes, owner)
    if objective.critic is not None:
        add_critic(trainer, objective.critic)
    sync = WeightSync(config, trainer.rank, push_plan(config, lay_out(config)))
    step, on_main = trainer.load_checkpoint(objective), trainer.on_main
    metrics = MetricsWriter(config.run.dir, resume_step=step) if trainer.is_main else None

    def make_room() -> None:
        if config.launch.release_memory:
            trainer.empty_cache()

    def push() -> dict[str, float]:
        """Every engine gets this model's weights under a new version, attested; the rollout resumes. Metrics."""
        start, checksums = time.monotonic(), EngineChecksums(trainer.hf, config.engine.tp)
        make_room()  # engines that rest take back their weights' memory next
        ticket = on_main(rollout.begin_push)
        tensors = trainer.named_hf_tensors()
        if sync.sends(ticket) or trainer.is_main:
            tensors = for_engines(config, tensors)
        sync.push(checksums.watch(tensors) if trainer.is_main else tensors, ticket)
        canaries = trainer.canaries(ticket.canaries)
        make_room()  # and their caches'
        attested = on_main(lambda: rollout.end_push(ticket, canaries, checksums.digests()))
        attested["time_checksums"] += checksums.seconds
        return {"time_sync": time.monotonic() - start, **attested}

    def take(early: Early | None) -> Taken | None:
        """The groups of this step; an engine that came back without weights gets them first. None: leave."""
        while True:
            while early is not None and (part := on_main(lambda: rollout.early(step))) is not None:
                go_backward(trainer, objective, part, early)
            if (taken := on_main(lambda: rollout.take(step))) is not None:
                return taken
            if on_main(rollout.leaving) is not None:
                return None
            push()

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

    on_main(lambda: rollout.wait_ready(config.start_seconds))
    on_main(lambda: rollout.restore(step))
    write("run", event="resume" if step else "start")
    push()
    if step == 0:
        evaluate()
    saved = step
    while step < config.trainer.steps:
        step += 1
        start, early = time.monotonic(), Early() if config.trainer.early_backward else None
        if (taken := take(early)) is None:
            step -= 1
            settle(wait=True)
            if step > saved and (on_main(rollout.leaving) or 0.0) > trainer.save_seconds:
                trainer.save_checkpoint(step, objective)
                settle(wait=True)
            write("run", event="leave")
            return
        rollout_done = time.monotonic()
        extra = {"time_score": score_interrupted()} if "behaviour" in objective.needs else {}
        stats = update(trainer, objective, taken, early)
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


def _main(args: argparse.Namespace) -> None:
    config = load_config(args.config)
    owner, start = of_process(config.run.dir)
    train(config, RolloutClient(args.rollout, owner.key, start), owner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rollout", required=True, help="URL of the rollout process")
    args = parser.parse_args()
    run_role(lambda: _main(args))


if __name__ == "__main__":
    main()
