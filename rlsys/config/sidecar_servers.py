"""Configs of the servers that a run starts besides its engines; they receive no weight updates."""

from __future__ import annotations

from rlsys.config.schema import Config


def reference_config(config: Config) -> Config:
    """Return the config of engine.reference = own: the policy's first weights."""
    return _updated(config, {"fp8": "none"}, {"tp": 1, "pools": []})


def teacher_config(config: Config) -> Config:
    """Return the config of algo.teacher: its folder, without options for engines of the policy."""
    assert config.algo.teacher is not None
    plain = {
        "tp": 1, "pools": [], "ngram_drafts": 0, "return_routes": False, "tool_call_parser": None,
        "reasoning_parser": None, "extra_args": [],
    }  # fmt: skip
    trainer = config.trainer.model_copy(update={"lora": None})
    updated = _updated(config, {"path": config.algo.teacher.path, "fp8": "none"}, plain)
    return updated.model_copy(update={"trainer": trainer})


def _updated(config: Config, model: dict[str, object], engine: dict[str, object]) -> Config:
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "engine": config.engine.model_copy(update=engine),
        }
    )
