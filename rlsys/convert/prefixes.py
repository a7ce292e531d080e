"""Whether tokens that sequences have in common at their beginning are computed once: known from config.json alone."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.convert.config import HFConfig


def why_not_shared(config: Config, hf: HFConfig, transformer_engine: bool) -> str | None:
    """Why every sequence computes its own prompt; None where a micro-batch computes a common one once.

    Args:
        config: A run's.
        hf: The trained model.
        transformer_engine: Whether the trainer's hosts have it.
    """
    if config.parallel.cp > 1:
        return f"parallel.cp = {config.parallel.cp} cuts every sequence"
    if config.trainer.mtp_loss:
        return "the layer for multi-token prediction predicts two tokens ahead"
    teacher = config.algo.teacher
    folders = [] if teacher is None else list(teacher.folders.values())
    for model, where in ((hf, config.model.path), *((HFConfig.read(folder), folder) for folder in folders)):
        if model.delta is not None:
            return f"the states of a gated delta net, which {where} has, are of one sequence"
    if transformer_engine and config.trainer.lora is None:
        return "Transformer Engine attends, whose sequences have their own keys only"
    return None
