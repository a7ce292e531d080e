"""Sharing of common first tokens of sequences (rlsys/trainer/prefixes.py): its conditions, and its effect on cost.

Needs only config.json. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.config import Config
from rlsys.convert.config import HFConfig

Sharing = tuple[float, float]
"""(number of tokens of a sequence, number of those that are computed for another sequence)."""


def why_not_shared(config: Config, hf: HFConfig, transformer_engine: bool) -> str | None:
    """Return why the sequences of a micro-batch do not share the tokens of a common prompt; None if they do.

    Args:
        config: The run's config.
        hf: Configuration of the trained model.
        transformer_engine: Whether Transformer Engine is installed on the trainer's hosts.
    """
    if config.parallel.cp > 1:
        return f"parallel.cp = {config.parallel.cp} divides every sequence"
    if config.trainer.mtp_loss:
        return f"trainer.mtp_loss = {config.trainer.mtp_loss:g}: the MTP layer predicts two tokens ahead"
    teacher = config.algo.teacher
    folders = [] if teacher is None else list(teacher.folders.values())
    engine = transformer_engine and config.trainer.lora is None
    for model, path in ((hf, config.model.path), *((HFConfig.read(folder), folder) for folder in folders)):
        if model.delta is not None:
            return f"{path} has gated delta nets, whose states belong to one sequence"
        if engine and model.megatron.get("softmax_type", "vanilla") != "vanilla":
            return f"{path} has attention sinks, with which Transformer Engine supports only a sequence's own keys"
    return None


def group_of(prompt: float, lengths: Sequence[float], shared: bool) -> list[Sharing]:
    """Return the sequences of a group of responses to one prompt.

    Args:
        prompt: Number of tokens of the prompt.
        lengths: Number of tokens of each response.
        shared: Whether the first sequence computes the prompt for all, except for its last token.
    """
    shared_tokens = max(0.0, prompt - 1) if shared else 0.0
    return [(prompt + n, shared_tokens if i else 0.0) for i, n in enumerate(lengths)]


def computed(sequences: Sequence[Sharing]) -> float:
    """Return the number of tokens that the sequences compute."""
    return sum(n - k for n, k in sequences)


def cost(sequences: Sequence[Sharing], crossover: float) -> float:
    """Return the cost of sequences, in units of the cost of a token of a short sequence (rlsys.convert.flops).

    A sequence of n tokens, of which k are computed for another sequence, costs n - k + (n^2 - k^2) / `crossover`.
    """
    return sum(n - k + (n**2 - k**2) / crossover for n, k in sequences)
