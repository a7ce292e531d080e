"""Translates verl's asynchronous trainers: batch sizes, staleness, and samples in flight."""

from __future__ import annotations

import re

from rlsys.importers.draft import Draft, Row
from rlsys.importers.verl.names import (
    ACTOR,
    ASYNC_FLOW,
    FULLY_ASYNC,
    PARTIAL_ROLLOUT,
    PROGRAM,
    ROLLOUT,
    SYNC_STEPS,
)

ASYNC_FLOW_DEFAULTS = {
    "data.train_batch_size": 16, "data.max_prompt_length": 1024, "data.max_response_length": 1024,
    f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.03, f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ROLLOUT}.n": 8, f"{ROLLOUT}.tensor_model_parallel_size": 1, "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": 20, "trainer.total_epochs": 5, "async_resources.actor_train.n_gpus_per_node": 4,
}  # fmt: skip
"""Of the recipe's async_grpo.yaml, where it differs from verl's."""


def translate_asynchronous(d: Draft) -> None:
    """Translate the batch sizes of the asynchronous trainers to those of the other one."""
    program = d.get(PROGRAM)
    if program in PARTIAL_ROLLOUT:
        _partial_rollout(d)
    if program in ASYNC_FLOW:
        _async_flow(d)
    if program not in FULLY_ASYNC:
        return
    mini, required, rounds = (
        d.integer(name, default)
        for name, default in (
            (f"{ACTOR}.ppo_mini_batch_size", 256),
            ("async_training.require_batches", 1),
            (SYNC_STEPS, 4),
        )
    )
    for name in ("data.train_batch_size", "data.gen_batch_size", "trainer.total_epochs", "rollout.n"):
        d.settings.pop(name, None)
    groups = mini * required * rounds
    d.settings["data.train_batch_size"] = groups
    d.settings["trainer.total_training_steps"] = max(
        1, d.integer("rollout.total_rollout_steps", 100) // groups
    )
    d.defaults.append(Row("rollout.total_rollout_steps", str(groups), "its groups / those of a step"))
    stale = d.number("async_training.staleness_threshold", 0.1)
    partial = "async_training.partial_rollout"
    if stale > 0:
        d.set_field("rollout.over_provision", 1 + stale, "async_training.staleness_threshold")
    d.set_field("rollout.max_staleness", 1 if stale <= 1 else 2, "async_training.staleness_threshold")
    if d.is_present(partial) and not d.flag(partial):
        d.reject(partial, "interrupted samples are always resumed")
    d.warnings.append(
        f"rollout.groups_per_step = {groups}: the prompts between two pushes of the fully asynchronous trainer; its "
        "mini-batches are algo.minibatches"
    )


def _async_flow(d: Draft) -> None:
    """Translate the recipe async_flow: GPUs of trainer and engines, staleness, and a trainer without evaluations."""
    for name, value in ASYNC_FLOW_DEFAULTS.items():
        d.settings.setdefault(name, str(value))
    for name in ("nnodes", "n_gpus_per_node"):
        d.settings[f"rollout.{name}"] = d.settings.pop(f"trainer.{name}", "1")
        of_trainer = f"async_resources.actor_train.{name}"
        d.settings[f"trainer.{name}"] = count = d.settings.pop(of_trainer, "1")
        d.defaults.append(
            Row(of_trainer, str(count), "GPUs of the trainer; trainer.* are those of the engines")
        )
    for name in [
        name for name in d.settings if re.match(r"async_resources\.(actor_fwd|ref_fwd|advantage)\.", name)
    ]:
        d.consumed.add(name)
        d.speed.append(Row(name, str(d.settings[name]), "the trainer scores; it has no workers for that"))
    if d.is_present("data.val_files"):
        d.defaults.append(Row("data.val_files", d.text("data.val_files"), "the recipe does not evaluate"))
    d.settings |= {"data.val_files": "", "trainer.test_freq": "-1", "trainer.val_before_train": "False"}
    if d.is_present(f"{ACTOR}.ppo_epochs"):
        d.defaults.append(
            Row(f"{ACTOR}.ppo_epochs", d.text(f"{ACTOR}.ppo_epochs"), "the recipe has one pass")
        )
        del d.settings[f"{ACTOR}.ppo_epochs"]
    staleness = "async_flow.staleness"
    bound = d.integer(staleness, 1)
    if bound or d.is_unresolved(staleness):
        d.set_field("rollout.over_provision", float(bound + 1), staleness)
    d.set_field("rollout.max_staleness", bound, staleness)
    d.warnings.append(
        "rollout.over_provision: the recipe starts prompts while fewer than data.train_batch_size x (staleness + 1) "
        "wait or run; there an interrupted response is resumed at most 5 times"
    )


def _partial_rollout(d: Draft) -> None:
    """Translate the recipe of partial rollouts: one step's number of unfinished prompts is always in flight."""
    partial = "async_training.partial_rollout"
    if not d.flag(partial):
        d.require(partial)
        d.reject(partial, "interrupted samples are always resumed")
    d.set_field("rollout.over_provision", 2.0, partial)
    d.set_field("rollout.max_staleness", 4)
    d.warnings.append(
        "rollout.over_provision = 2: the script keeps data.train_batch_size prompts running until as many are done; "
        "engine.max_running_requests bounds the running samples to theirs"
    )
    d.warnings.append("rollout.max_staleness = 4: the script has no bound; see docs/rollout.md")


def bound_running_samples(d: Draft) -> None:
    """Write engine.max_running_requests of partial rollouts, whose workers divide the prompts in flight."""
    groups, n, workers = "data.train_batch_size", f"{ROLLOUT}.n", f"{ROLLOUT}.agent.num_workers"
    count = max(1, d.integer(workers, 8))
    samples = -(-d.integer(groups, 1024) // count) * count * d.integer(n, 1)
    running = max(1, -(-samples // max(1, d.get_field("engine.count", 1))))
    bound = d.integer(f"{ROLLOUT}.max_num_seqs", 1024)
    names = (groups, n, workers, f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.tensor_model_parallel_size")
    d.set_field("engine.max_running_requests", min(running, bound), *names)
