"""Losses on the tokens of given answers: cross entropy and variants. Pure: log-probs in, a loss per token out.

`rlsys sft` (sft.loss) takes the mean over all trained tokens of an update. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlsys.algo.plugin import Plugin


@dataclass(frozen=True)
class Tokens:
    """Model scores of each token of the answers, `[T]`.

    Attributes:
        logp: log-prob of the token, with gradient.
        chance: for a loss with `candidates`, the token's probability at that temperature, without gradient.
        expected: for a loss with `candidates`, the mean log-prob at temperature 1 of a token that is sampled at that
            temperature, with the gradient of the log-probs.
    """

    logp: Tensor
    chance: Tensor | None = None
    expected: Tensor | None = None


class Imitation(Plugin):
    """Base of losses on the tokens of answers."""

    @property
    def candidates(self) -> float | None:
        """Return the temperature at which candidates replace the answer's token; None for no candidates."""
        return None

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return the loss of each token, `[T]`."""
        raise NotImplementedError


class CrossEntropy(Imitation):
    """-log pi(token): imitate the answers."""

    paper = "TRL's SFTTrainer, loss_type nll"
    evidence = "R"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.logp
