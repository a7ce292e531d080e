"""THE LOOP. Runs on every trainer rank: `python -m launch.ranks ... -m rlsys.train --config RUN/config.yaml`.

    take     the first groups_per_step groups that finished; what is still in flight is interrupted and parked
             (with trainer.early_backward, groups that are done go backward while the others are made)
    train    plan -> pack -> score -> advantages -> loss -> update (rlsys.trainer.step)
    push     the new weights to every engine, attested; generation goes on, interrupted samples first

Rank 0 talks to the rollout process; what it hears is broadcast, so that all ranks do the same thing.
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
from rlsys.trainer.recorder import Recorder
from rlsys.trainer.step import EarlyPasses, backward_early, score_parked, train_step
from rlsys.trainer.token_log import write_token_log
from rlsys.trainer.trainer import Trainer
from rlsys.weights.weight_push import WeightPush, push_phases


class Loop:
    """Owns a rank's trainer, and how far the run has got: `step` train steps are done, `begun` of them are in a
    checkpoint that is on its way or on the disk."""

    def __init__(self, config: Config, rollout: RolloutClient, owner: Owner) -> None:
        self.config, self.rollout = config, rollout
        self.objective = Objective(config.algo)
        self.trainer = Trainer(config, self.objective.requirements.passes, owner)
        add_models(self.trainer, self.objective)
        self.weight_push = WeightPush(self.trainer, push_plan(config, lay_out(config)))
        self.on_main = self.trainer.on_main
        self.step = self.begun = self.trainer.load_checkpoint(self.objective)
        self.recorder = Recorder(config, self.step) if self.trainer.is_main else None
        self.evaluating: int | None = None  # the step whose weights are evaluated in the background

    def run(self) -> None:
        """From the newest checkpoint to the last step, or until the run has to leave its machines."""
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
            if (taken := self.take(early)) is None:
                self.leave()
                return
            self.train(taken, early, start)
            self.keep()
        self.settle(wait=True)
        self._write("run", event="end")

    def take(self, early: EarlyPasses | None) -> TrainBatch | None:
        """The groups of the next step; an engine that came back without weights gets them first. None: leave."""
        rollout, step = self.rollout, self.step + 1
        while True:
            while early is not None and (part := self.on_main(lambda: rollout.early(step))) is not None:
                backward_early(self.trainer, self.objective, part, early)
            if (taken := self.on_main(lambda: rollout.take(step))) is not None:
                return taken
            if self.on_main(rollout.leaving) is not None:
                return None
            self.push()

    def train(self, taken: TrainBatch, early: EarlyPasses | None, start: float) -> None:
        """One train step on these groups, and the push of what came of it. `start`: when the step began."""
        taken_at = time.monotonic()
        stats: dict[str, object] = {}
        notes = [] if early is None else early.records
        if "behaviour" in self.objective.requirements.needs:
            stats["time_score"] = self.score_interrupted(taken.train_step)
        stats |= train_step(self.trainer, self.objective, taken, early, notes)
        trained_at = time.monotonic()
        stats |= self.push(cast("float | None", stats.get("mismatch_kept_mean")))
        write_token_log(self.trainer, taken, notes)  # for people: no engine waits for it
        self.trainer.segments.close()
        end = time.monotonic()
        self.step = taken.train_step
        if self.recorder is not None:
            self.recorder.show(taken.groups)
        self._write(
            "step", **taken.metrics, **stats, weight_version=taken.weight_version, time_rollout=taken_at - start,
            time_train=trained_at - taken_at, time_step=end - start,
            tokens_per_s=taken.metrics["tokens"] / (end - start),
        )  # fmt: skip

    def score_interrupted(self, step: int) -> float:
        """Score interrupted tokens before the update replaces the weights that sampled them. Returns seconds."""
        start = time.monotonic()
        scores = score_parked(self.on_main(lambda: self.rollout.unscored(step)), self.trainer)
        self.on_main(lambda: self.rollout.store_scores(scores))
        return time.monotonic() - start

    def push(self, mismatch_kept: float | None = None) -> dict[str, float]:
        """Every engine gets this model's weights under a new version, attested; the rollout resumes. Metrics.
        `mismatch_kept`: what keys and values of older weights cost in the step (rollout.keep_budget).
        With `weights.rolling` in rounds of some engines; what the others make meanwhile has the version before.
        """
        hashing, left = 0.0, 1.0
        phases = push_phases()
        while left:
            phases.call("room", self.trainer.release_unused_memory)  # for the weights of the engines
            ticket = phases.call("begin", self.on_main, partial(self.rollout.begin_push, mismatch_kept))
            sent = phases.call("send", self.weight_push.push, ticket)
            canaries = phases.call("canaries", self.trainer.canaries, ticket.canaries)
            phases.call("room", self.trainer.release_unused_memory)  # for their caches
            end = partial(self.rollout.end_push, ticket, canaries, sent.digests, sent.excluded)
            found = phases.call("end", self.on_main, end)
            left, hashing = found.pop("push_left"), hashing + sent.hash_seconds
        found["time_checksums"] += hashing
        return {**phases.with_total, "time_sync_hash": hashing, **self.weight_push.metrics, **found}

    def keep(self) -> None:
        """After a step: evaluate, export and begin a checkpoint when they are due."""
        step, t, accuracy = self.step, self.config.trainer, None
        last = step == t.steps
        self.end_evaluation(wait=False)
        if self.config.eval.due(step, last):
            accuracy = self.evaluate()
        if t.export_every and step % t.export_every == 0:
            self.trainer.export(self.config.run.dir / "exports" / f"step-{step:06d}")
        due = last or step % t.checkpoint_every == 0
        self.settle(wait=due)
        if due:
            self.trainer.save_checkpoint(step, self.objective, accuracy)
            self.begun = step

    def evaluate(self) -> float | None:
        """Held-out accuracy of the weights that the engines have; None while it is measured in the background."""
        self.end_evaluation(wait=True)
        beside = self.config.eval.background and self.step < self.config.trainer.steps
        if beside and self.on_main(self.rollout.begin_evaluation):
            self.evaluating = self.step
            return None
        found = self.on_main(self.rollout.evaluate)
        self._write("eval", **found.metrics())
        return found.accuracy

    def end_evaluation(self, *, wait: bool) -> None:
        """Write down what the one in the background found, once it has ended."""
        if self.evaluating is None:
            return
        ended = self.on_main(lambda: self.rollout.end_evaluation(wait))
        if ended.result is not None and self.recorder is not None:
            self.recorder.write("eval", self.evaluating, **ended.result.metrics())
        self.evaluating = None if ended.done else self.evaluating

    def settle(self, wait: bool) -> None:
        """A checkpoint that has been written since counts from now on: what it trained is never trained again."""
        if (saved := self.trainer.finish_checkpoint(wait)) is not None:
            self.on_main(lambda: self.rollout.commit(saved))

    def leave(self) -> None:
        """Save what no checkpoint has yet, if there is time for it."""
        self.settle(wait=True)
        if self.step > self.begun and (self.on_main(self.rollout.leaving) or 0.0) > self.trainer.save_seconds:
            self.trainer.save_checkpoint(self.step, self.objective)
            self.settle(wait=True)
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
