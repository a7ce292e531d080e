"""Losses on the tokens of given answers: cross entropy and variants, as pure functions of log-probs.

`rlsys sft` (sft.loss) trains on the mean over all trained tokens of an update. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlsys.algo.plugin import Plugin


@dataclass(frozen=True)
class Tokens:
    """Scores of the answers' tokens, `[T]` each.

    Attributes:
        logp: Log-prob of the token, with gradient.
        chance: Probability of the token at the temperature `Imitation.candidates`, without gradient; None for a loss
            without candidates.
        expected: Expected log-prob (at temperature 1) of a token that is sampled at the temperature
            `Imitation.candidates`, with the gradient of the log-probs only; None for a loss without candidates.
    """

    logp: Tensor
    chance: Tensor | None = None
    expected: Tensor | None = None


class Imitation(Plugin):
    """Base of losses on the tokens of answers."""

    @property
    def candidates(self) -> float | None:
        """Return the temperature at which candidate tokens are sampled; None if the loss uses no candidates."""
        return None

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the loss of each token, `[T]`."""
        raise NotImplementedError


class CrossEntropy(Imitation):
    """Cross entropy, -log pi(token)."""

    paper = "TRL's SFTTrainer, loss_type nll"
    evidence = "R"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.logp
