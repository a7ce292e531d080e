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
"""Defaults of the recipe's async_grpo.yaml that differ from verl's."""


def translate_asynchronous(d: Draft) -> None:
    """Translate the settings of an asynchronous trainer to those of verl's synchronous trainer."""
    program = d.get(PROGRAM)
    if program in PARTIAL_ROLLOUT:
        _partial_rollout(d)
    elif program in ASYNC_FLOW:
        _async_flow(d)
    elif program in FULLY_ASYNC:
        _fully_async(d)


def _fully_async(d: Draft) -> None:
    """Translate the fully asynchronous trainer: the prompts between two pushes are a step."""
    mini = d.integer(f"{ACTOR}.ppo_mini_batch_size", 256)
    required = d.integer("async_training.require_batches", 1)
    rounds = d.integer(SYNC_STEPS, 4)
    for name in ("data.train_batch_size", "data.gen_batch_size", "trainer.total_epochs", "rollout.n"):
        d.settings.pop(name, None)
    groups = mini * required * rounds
    d.settings["data.train_batch_size"] = groups
    d.settings["trainer.total_training_steps"] = max(
        1, d.integer("rollout.total_rollout_steps", 100) // groups
    )
    d.defaults.append(
        Row(
            "rollout.total_rollout_steps",
            str(groups),
            "trainer.steps is this number / rollout.groups_per_step",
        )
    )
    stale = d.number("async_training.staleness_threshold", 0.1)
    partial = "async_training.partial_rollout"
    if stale > 0:
        d.set_field("rollout.over_provision", 1 + stale, "async_training.staleness_threshold")
    d.set_field("rollout.max_staleness", 1 if stale <= 1 else 2, "async_training.staleness_threshold")
    if d.is_present(partial) and not d.flag(partial):
        d.reject(partial, "expected true: rlsys always resumes interrupted samples")
    d.warnings.append(
        f"rollout.groups_per_step = {groups}: the fully asynchronous trainer trains this number of prompts between "
        "two pushes; algo.minibatches is the number of its mini-batches"
    )


def _async_flow(d: Draft) -> None:
    """Translate the recipe async_flow: GPUs of trainer and engines, staleness, and no evaluations."""
    for name, value in ASYNC_FLOW_DEFAULTS.items():
        d.settings.setdefault(name, str(value))
    for name in ("nnodes", "n_gpus_per_node"):
        d.settings[f"rollout.{name}"] = d.settings.pop(f"trainer.{name}", "1")
        trainer_setting = f"async_resources.actor_train.{name}"
        count = d.settings.pop(trainer_setting, "1")
        d.settings[f"trainer.{name}"] = count
        d.defaults.append(
            Row(
                trainer_setting,
                str(count),
                "GPUs of the trainer; in this recipe, trainer.* are GPUs of the engines",
            )
        )
    for name in d.settings:
        if re.match(r"async_resources\.(actor_fwd|ref_fwd|advantage)\.", name):
            d.consumed.add(name)
            d.speed.append(
                Row(
                    name,
                    str(d.settings[name]),
                    "the trainer computes log-probs; rlsys has no workers for this",
                )
            )
    if d.is_present("data.val_files"):
        d.defaults.append(Row("data.val_files", d.text("data.val_files"), "the recipe does not evaluate"))
    d.settings |= {"data.val_files": "", "trainer.test_freq": "-1", "trainer.val_before_train": "False"}
    if d.is_present(f"{ACTOR}.ppo_epochs"):
        d.defaults.append(
            Row(f"{ACTOR}.ppo_epochs", d.text(f"{ACTOR}.ppo_epochs"), "the recipe always has one epoch")
        )
        del d.settings[f"{ACTOR}.ppo_epochs"]
    staleness = "async_flow.staleness"
    bound = d.integer(staleness, 1)
    if bound or d.is_unresolved(staleness):
        d.set_field("rollout.over_provision", float(bound + 1), staleness)
    d.set_field("rollout.max_staleness", bound, staleness)
    d.warnings.append(
        "rollout.over_provision: the recipe starts prompts while fewer than data.train_batch_size x (staleness + 1) "
        "prompts wait or run, and resumes an interrupted response at most 5 times"
    )


def _partial_rollout(d: Draft) -> None:
    """Translate the recipe partial_rollout, which always has one step's number of unfinished prompts in flight."""
    partial = "async_training.partial_rollout"
    if not d.flag(partial):
        d.require(partial)
        d.reject(partial, "expected true: rlsys always resumes interrupted samples")
    d.set_field("rollout.over_provision", 2.0, partial)
    d.set_field("rollout.max_staleness", 4)
    d.warnings.append(
        "rollout.over_provision = 2: the script runs data.train_batch_size prompts at any time until as many have "
        "finished; engine.max_running_requests limits the running samples to the same number"
    )
    d.warnings.append("rollout.max_staleness = 4: the script has no limit; see docs/rollout.md")


def bound_running_samples(d: Draft) -> None:
    """Write engine.max_running_requests for the recipe partial_rollout, whose workers share the prompts in flight."""
    groups, n, workers = "data.train_batch_size", f"{ROLLOUT}.n", f"{ROLLOUT}.agent.num_workers"
    count = max(1, d.integer(workers, 8))
    samples = -(-d.integer(groups, 1024) // count) * count * d.integer(n, 1)
    running = max(1, -(-samples // max(1, d.get_field("engine.count", 1))))
    bound = d.integer(f"{ROLLOUT}.max_num_seqs", 1024)
    names = (groups, n, workers, f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.tensor_model_parallel_size")
    d.set_field("engine.max_running_requests", min(running, bound), *names)
