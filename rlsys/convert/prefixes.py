"""Common first tokens of sequences (rlsys/trainer/prefixes.py): whether they are computed once, by config.json, and
the resulting cost of sequences. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.config import Config
from rlsys.convert.config import HFConfig

Sharing = tuple[float, float]
"""Tokens of a sequence, and how many of them are computed for another one."""


def why_not_shared(config: Config, hf: HFConfig, transformer_engine: bool) -> str | None:
    """Return why every sequence computes its own prompt; None if a micro-batch computes a common prompt once.

    Args:
        config: The run's config.
        hf: The trained model.
        transformer_engine: Whether Transformer Engine is installed on the trainer's hosts.
    """
    if config.parallel.cp > 1:
        return f"parallel.cp = {config.parallel.cp} cuts every sequence"
    if config.trainer.mtp_loss:
        return f"trainer.mtp_loss = {config.trainer.mtp_loss:g}: its layer looks two tokens ahead"
    teacher = config.algo.teacher
    folders = [] if teacher is None else list(teacher.folders.values())
    engine = transformer_engine and config.trainer.lora is None
    for model, path in ((hf, config.model.path), *((HFConfig.read(folder), folder) for folder in folders)):
        if model.delta is not None:
            return f"the states of a gated delta net, which {path} has, are of one sequence"
        if engine and model.megatron.get("softmax_type", "vanilla") != "vanilla":
            return (
                f"Transformer Engine computes the attention sinks of {path}, with a sequence's own keys only"
            )
    return None


def group_of(prompt: float, lengths: Sequence[float], shared: bool) -> list[Sharing]:
    """Return the sequences of responses of these lengths to one prompt.

    Args:
        prompt: Tokens of the prompt.
        lengths: Tokens of each response.
        shared: Whether the prompt is computed once, except for its last token, which every response computes.
    """
    common = max(0.0, prompt - 1) if shared else 0.0
    return [(prompt + n, common if i else 0.0) for i, n in enumerate(lengths)]


def computed(sequences: Sequence[Sharing]) -> float:
    """Return the number of computed tokens."""
    return sum(n - k for n, k in sequences)


def cost(sequences: Sequence[Sharing], crossover: float) -> float:
    """Return the cost in tokens of a short sequence (rlsys.convert.flops).

    A sequence of n tokens that shares k costs n - k + (n^2 - k^2) / `crossover`.
    """
    return sum(n - k + (n**2 - k**2) / crossover for n, k in sequences)
