"""Translates verl's settings into a config draft, section by section."""

from __future__ import annotations

from collections.abc import Collection

from rlsys.core.errors import UserError
from rlsys.importers.draft import Draft, Settings
from rlsys.importers.sizes import reject_media, set_anchor, set_sizes, set_warm_up
from rlsys.importers.verl.algorithm import translate_algorithm
from rlsys.importers.verl.asynchronous import bound_running_samples, translate_asynchronous
from rlsys.importers.verl.data import translate_data
from rlsys.importers.verl.fields import DEFAULTS, SFT_DEFAULTS, SPEED, VERL
from rlsys.importers.verl.fine_tuning import translate_fine_tuning
from rlsys.importers.verl.names import (
    ACTOR,
    ASYNC_FLOW,
    FULLY_ASYNC,
    MODEL,
    PARTIAL_ROLLOUT,
    PROGRAM,
    SYNC_STEPS,
)
from rlsys.importers.verl.rollout import translate_rollout
from rlsys.importers.verl.sizes import read_sizes
from rlsys.importers.verl.trainer import translate_trainer


def translate(settings: Settings, rewards: Collection[str]) -> Draft:
    """Translate verl's settings into a config.

    Args:
        settings: result of read_settings or read_yaml.
        rewards: short names of the built-in rewards.

    Raises:
        UserError: the script has no model or no data, or a value has the wrong type.
    """
    d = Draft(dict(settings.values), VERL)
    translate_asynchronous(d)
    if "sft_trainer" in str(d.get(PROGRAM)) or d.is_present("data.messages_key"):
        translate_fine_tuning(d)
        d.finish((*SFT_DEFAULTS, *DEFAULTS), SPEED, settings)
        return d
    for name in (f"{MODEL}.path", "data.train_files"):
        if not d.is_present(name):
            if not settings.problems:
                raise UserError(f"{name} is missing; expected {MODEL}.path and data.train_files")
            d.require(name)
    run_setting = (
        "trainer.default_local_dir"
        if d.is_present("trainer.default_local_dir")
        else "trainer.experiment_name"
    )
    name = d.text("trainer.experiment_name", "imported")
    d.set_field("run.dir", d.text("trainer.default_local_dir") or f"runs/{name}", run_setting)
    d.set_field("model.path", d.text(f"{MODEL}.path"), f"{MODEL}.path")
    reject_media(d, f"{MODEL}.path", "data.train_files")
    d.set_field("model.dtype", "bfloat16")
    translate_data(d, rewards)
    translate_rollout(d)
    translate_algorithm(d)
    translate_trainer(d)
    if d.text("trainer.resume_mode", "auto") != "resume_path":
        d.consumed.add("trainer.resume_from_path")
    d.consumed.discard("trainer.resume_mode")
    set_sizes(d, *read_sizes(d))
    if d.get(PROGRAM) in PARTIAL_ROLLOUT:
        bound_running_samples(d)
    if d.get(PROGRAM) in ASYNC_FLOW and (share := d.get_field("trainer.warmup_fraction", 0.0)):
        # The recipe counts mini-batches as steps.
        ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio"
        d.set_field("trainer.warmup_fraction", share / d.get_field("algo.minibatches", 1), ratio)
    if d.get(PROGRAM) in FULLY_ASYNC:
        set_warm_up(d, f"{ACTOR}.optim.lr_warmup_steps", d.integer(SYNC_STEPS, 4))
    if not d.get_field("algo.anchor", ""):
        set_anchor(d)
    d.finish(DEFAULTS, SPEED, settings)
    return d
