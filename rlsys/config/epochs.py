"""`trainer.epochs` and `trainer.warmup_fraction`: numbers of train steps from the number of training rows."""

from __future__ import annotations

from rlsys.config.mistakes import ConfigError
from rlsys.config.schema import Config
from rlsys.core.row_counts import count_rows, existing_files


def resolve_epochs(config: Config) -> Config:
    """Replace trainer.epochs with trainer.steps, and trainer.warmup_fraction with trainer.warmup_steps.

    If a file of rows does not exist, both stay: each command that needs the rows names the file.

    Raises:
        ConfigError: the rows cannot be counted.
    """
    trainer = config.trainer
    if trainer.epochs is not None:
        steps = _steps(config, trainer.epochs)
        if steps is None:
            return config
        trainer = trainer.model_copy(update={"steps": steps, "epochs": None})
    if trainer.warmup_fraction is not None:
        warmup = int(trainer.warmup_fraction * trainer.steps)
        trainer = trainer.model_copy(update={"warmup_steps": warmup, "warmup_fraction": None})
    return config if trainer is config.trainer else config.model_copy(update={"trainer": trainer})


def _steps(config: Config, epochs: float) -> int | None:
    """Return the number of train steps; None if a file of rows does not exist."""
    tuning = "path" in config.sft.params
    path = (config.sft if tuning else config.data).params.get("path")
    if not path or not (tuning or config.data.source in ("jsonl", "parquet")):
        raise ConfigError(
            f"trainer.epochs = {epochs:g} needs data.params.path and data.source = jsonl or parquet, to count the "
            f"rows; data.source = {config.data.source}: set trainer.steps"
        )
    if not existing_files(path):
        return None
    if (rows := count_rows(path)) is None:
        raise ConfigError(
            f"trainer.epochs = {epochs:g}: the rows of {path} cannot be counted: set trainer.steps"
        )
    if not tuning and "heldout_path" not in config.data.params:
        rows -= rows // 8
    batch = int(config.sft.params.get("batch", 64)) if tuning else config.rollout.groups_per_step
    return round(epochs * max(1, rows // batch))
