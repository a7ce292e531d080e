"""Configs of the additional servers of a run (reference and teacher), which receive no weight updates."""

from __future__ import annotations

from rlsys.config.schema import Config


def reference_config(config: Config) -> Config:
    """Return the config of the server for engine.reference = own, which serves the weights of model.path."""
    return _updated(config, {"fp8": "none"}, {"tp": 1, "pools": []})


def teacher_config(config: Config) -> Config:
    """Return the config of the server for algo.teacher.engine = own, which serves the folder algo.teacher.path.

    Options that concern the policy's engines only have their defaults.
    """
    assert config.algo.teacher is not None
    defaults = {
        "tp": 1, "pools": [], "ngram_drafts": 0, "return_routes": False, "tool_call_parser": None,
        "reasoning_parser": None, "extra_args": [],
    }  # fmt: skip
    trainer = config.trainer.model_copy(update={"lora": None})
    updated = _updated(config, {"path": config.algo.teacher.path, "fp8": "none"}, defaults)
    return updated.model_copy(update={"trainer": trainer})


def _updated(config: Config, model: dict[str, object], engine: dict[str, object]) -> Config:
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "engine": config.engine.model_copy(update=engine),
        }
    )
