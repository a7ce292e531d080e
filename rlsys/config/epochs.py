"""Conversion of `trainer.epochs` and `trainer.warmup_fraction` to numbers of train steps."""

from __future__ import annotations

from rlsys.config.mistakes import ConfigError
from rlsys.config.schema import Config
from rlsys.core.row_counts import count_rows, existing_files


def resolve_epochs(config: Config) -> Config:
    """Return the config with trainer.steps in place of epochs, and trainer.warmup_steps in place of warmup_fraction.

    The config is returned unchanged if a file of rows does not exist; commands that read the rows report the file.

    Raises:
        ConfigError: the source has no files of rows, or the rows cannot be counted.
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
            f"trainer.epochs = {epochs:g}: the rows of data.source = {config.data.source} cannot be counted; "
            "expected jsonl or parquet with data.params.path, or trainer.steps instead"
        )
    if not existing_files(path):
        return None
    if (rows := count_rows(path)) is None:
        raise ConfigError(
            f"trainer.epochs = {epochs:g}: the rows of {path} cannot be counted; expected trainer.steps instead"
        )
    if not tuning and "heldout_path" not in config.data.params:
        rows -= rows // 8
    batch = int(config.sft.params.get("batch", 64)) if tuning else config.rollout.groups_per_step
    return round(epochs * max(1, rows // batch))
