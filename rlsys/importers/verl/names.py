"""Names in verl's scripts: programs, configs, and sections of settings."""

from __future__ import annotations

from rlsys.importers.draft import Draft

PROGRAM = "train"
"""Key of the program in the settings."""
ASYNC_FLOW = ("recipe.async_flow.grpo_main",)
PARTIAL_ROLLOUT = ("recipe.partial_rollout.main_ppo",)
ONE_STEP_OFF = ("verl.experimental.one_step_off_policy.main_ppo", "recipe.one_step_off_policy.main_ppo")
FULLY_ASYNC = (
    "verl.experimental.fully_async_policy.fully_async_main",
    "recipe.fully_async_policy.fully_async_main",
)
SYNC_STEPS = "async_training.trigger_parameter_sync_step"
PROGRAMS = (
    "verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "main_ppo", "recipe.dapo.main_dapo", "main_dapo",
    "recipe.entropy.main_entropy", "recipe.dapo.dapo_transfer_queue.main_dapo", *ONE_STEP_OFF, *FULLY_ASYNC,
    *PARTIAL_ROLLOUT, *ASYNC_FLOW,
)  # fmt: skip
CONFIGS = (
    "ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer",
    "dapo_transfer_queue_trainer",
)  # fmt: skip
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
NEVER = 1_000_000
"""Interval that is larger than the number of steps of any run, so that only the last step counts."""


def first_present(d: Draft, *names: str) -> str:
    """Return the first of `names` that the script sets; the first name if it sets none."""
    return next((name for name in names if d.is_present(name)), names[0])
