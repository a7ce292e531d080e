"""The training loop of each trainer rank: `python -m launch.ranks ... -m rlsys.train --config RUN/config.yaml`.

    take     the first groups_per_step groups that finish; samples in flight are interrupted and parked
             (with trainer.early_backward, finished groups run backward while the others are generated)
    train    plan -> pack -> score -> advantages -> loss -> update (rlsys.trainer.step)
    push     the new weights to every engine, attested; generation resumes, interrupted samples first

Rank 0 communicates with the rollout process and broadcasts the responses, so that all ranks take the same branches.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import cast

from rlsys.algo.objective import Objective
from rlsys.config import Config, load_config
from rlsys.core.owner import Owner, owner_of_process
from rlsys.core.types import TrainBatch
from rlsys.obs.role import run_role
from rlsys.planner.layout import lay_out, push_plan
from rlsys.rollout.client import RolloutClient
from rlsys.trainer.aux_models import add_models
from rlsys.trainer.profiler import StepProfiler
from rlsys.trainer.recorder import Recorder
from rlsys.trainer.step import EarlyPasses, backward_early, score_parked, train_step
from rlsys.trainer.token_log import write_token_log
from rlsys.trainer.trainer import Trainer
from rlsys.weights.weight_push import WeightPush, push_phases


class Loop:
    """Training loop of one rank. Owns the trainer and the progress of the run: `step` train steps are complete;
    `saved_step` of them are in a checkpoint, written or in progress."""

    def __init__(self, config: Config, rollout: RolloutClient, owner: Owner) -> None:
        self.config, self.rollout = config, rollout
        self.objective = Objective(config.algo)
        self.trainer = Trainer(config, self.objective.requirements.passes, owner)
        add_models(self.trainer, self.objective)
        self.weight_push = WeightPush(self.trainer, push_plan(config, lay_out(config)))
        self.on_main = self.trainer.on_main
        self.step = self.saved_step = self.trainer.load_checkpoint(self.objective)
        self.recorder = Recorder(config, self.step) if self.trainer.is_main else None
        self.evaluating: int | None = None  # the step whose weights are evaluated in the background

    def run(self) -> None:
        """Train from the newest checkpoint to the last step, or until the run must leave its machines."""
        self.weight_push.prepare()
        self.on_main(lambda: self.rollout.wait_ready(self.config.start_seconds))
        self.on_main(lambda: self.rollout.restore(self.step))
        self._write("run", event="resume" if self.step else "start")
        self.push()
        if self.step == 0 and self.config.eval.due(0, False):
            self.evaluate()
        while self.step < self.config.trainer.steps:
            start = time.monotonic()
            early = EarlyPasses() if self.config.trainer.early_backward else None
            if (batch := self.take(early)) is None:
                self.leave()
                return
            with StepProfiler(self.config, self.trainer.rank).record(batch.train_step):
                self.train(batch, early, start)
            self.finish_step()
        self.commit_checkpoint(wait=True)
        self._write("run", event="end")

    def take(self, early: EarlyPasses | None) -> TrainBatch | None:
        """Return the groups of the next step; None: leave. Pushes the weights if an engine restarted without them."""
        rollout, step = self.rollout, self.step + 1
        while True:
            while early is not None and (part := self.on_main(lambda: rollout.early(step))) is not None:
                backward_early(self.trainer, self.objective, part, early)
            if (batch := self.on_main(lambda: rollout.take(step))) is not None:
                return batch
            if self.on_main(rollout.leaving) is not None:
                return None
            self.push()

    def train(self, batch: TrainBatch, early: EarlyPasses | None, start: float) -> None:
        """Run one train step and push the updated weights. `start`: start of the step in monotonic seconds."""
        taken_at = time.monotonic()
        stats: dict[str, object] = {}
        records = [] if early is None else early.records
        if "behaviour" in self.objective.requirements.needs:
            stats["time_score"] = self.score_interrupted(batch.train_step)
        stats |= train_step(self.trainer, self.objective, batch, early, records)
        trained_at = time.monotonic()
        stats |= self.push(cast("float | None", stats.get("mismatch_kept_mean")))
        write_token_log(self.trainer, batch, records)  # after the push: no engine waits for it
        self.trainer.segments.close()
        end = time.monotonic()
        self.step = batch.train_step
        if self.recorder is not None:
            self.recorder.show(batch.groups)
        self._write(
            "step", **batch.metrics, **stats, weight_version=batch.weight_version, time_rollout=taken_at - start,
            time_train=trained_at - taken_at, time_step=end - start,
            tokens_per_s=batch.metrics["tokens"] / (end - start),
        )  # fmt: skip

    def score_interrupted(self, step: int) -> float:
        """Score interrupted tokens before the update replaces the weights that sampled them. Returns seconds."""
        start = time.monotonic()
        scores = score_parked(self.on_main(lambda: self.rollout.unscored(step)), self.trainer)
        self.on_main(lambda: self.rollout.store_scores(scores))
        return time.monotonic() - start

    def push(self, mismatch_kept: float | None = None) -> dict[str, float]:
        """Send the weights to all engines under a new version, attest them, resume the rollout. Returns metrics.
        With `weights.rolling` in rounds; the other engines generate with the previous version meanwhile.
        `mismatch_kept`: mean mismatch in the step due to the KV cache of older weights (rollout.keep_budget)."""
        hashing, remaining = 0.0, 1.0
        phases = push_phases()
        while remaining:
            phases.call("room", self.trainer.release_unused_memory)  # for the weights of the engines
            ticket = phases.call("begin", self.on_main, partial(self.rollout.begin_push, mismatch_kept))
            result = phases.call("send", self.weight_push.push, ticket)
            canaries = phases.call("canaries", self.trainer.canaries, ticket.canaries)
            phases.call("room", self.trainer.release_unused_memory)  # for their caches
            end = partial(self.rollout.end_push, ticket, canaries, result.digests, result.excluded)
            metrics = phases.call("end", self.on_main, end)
            remaining, hashing = metrics.pop("push_left"), hashing + result.hash_seconds
        metrics["time_checksums"] += hashing
        return {**phases.with_total, "time_sync_hash": hashing, **self.weight_push.metrics, **metrics}

    def finish_step(self) -> None:
        """Evaluate, export and begin a checkpoint after a step, each when it is due."""
        step, t, last = self.step, self.config.trainer, self.step == self.config.trainer.steps
        self.end_evaluation(wait=False)
        accuracy = self.evaluate() if self.config.eval.due(step, last) else None
        if t.export_every and step % t.export_every == 0:
            self.trainer.export(self.config.run.dir / "exports" / f"step-{step:06d}")
        due = last or step % t.checkpoint_every == 0
        self.commit_checkpoint(wait=due)
        if due:
            self.trainer.save_checkpoint(step, self.objective, accuracy)
            self.saved_step = step

    def evaluate(self) -> float | None:
        """Return the held-out accuracy of the engines' weights; None if the evaluation runs in the background."""
        self.end_evaluation(wait=True)
        background = self.config.eval.background and self.step < self.config.trainer.steps
        if background and self.on_main(self.rollout.begin_evaluation):
            self.evaluating = self.step
            return None
        result = self.on_main(self.rollout.evaluate)
        self._write("eval", **result.metrics())
        return result.accuracy

    def end_evaluation(self, *, wait: bool) -> None:
        """Record the result of the background evaluation, if it has ended. `wait`: wait until it ends."""
        if self.evaluating is None:
            return
        status = self.on_main(lambda: self.rollout.end_evaluation(wait))
        if status.result is not None and self.recorder is not None:
            self.recorder.write("eval", self.evaluating, **status.result.metrics())
        self.evaluating = None if status.done else self.evaluating

    def commit_checkpoint(self, wait: bool) -> None:
        """Commit a written checkpoint in the rollout process: its samples are never trained again."""
        if (step := self.trainer.finish_checkpoint(wait)) is not None:
            self.on_main(lambda: self.rollout.commit(step))

    def leave(self) -> None:
        """Save the steps since the last checkpoint, if enough time remains."""
        self.commit_checkpoint(wait=True)
        trainer = self.trainer
        if self.step > self.saved_step and (self.on_main(self.rollout.leaving) or 0.0) > trainer.save_seconds:
            trainer.save_checkpoint(self.step, self.objective)
            self.commit_checkpoint(wait=True)
        self._write("run", event="leave")

    def _write(self, kind: str, **values: object) -> None:
        if self.recorder is not None:
            self.recorder.write(kind, self.step, **values)


def _main(args: argparse.Namespace) -> None:
    config = load_config(args.config)
    owner, start = owner_of_process(config.run.dir)
    loop = Loop(config, RolloutClient(owner.rollout_socket, owner.key, start), owner)
    loop.run()
    loop.weight_push.close()
    loop.trainer.close(job=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args()
    run_role(lambda: _main(args))


if __name__ == "__main__":
    main()
