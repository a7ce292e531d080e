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

    `logp`: its log-prob, with gradient. For a loss with `candidates`, tokens that would be drawn in its place at that
    temperature: `chance`: the probability that it is this one, without gradient; `expected`: the mean of their
    log-probs at temperature 1, with the gradient of these log-probs.
    """

    logp: Tensor
    chance: Tensor | None = None
    expected: Tensor | None = None


class Imitation(Plugin):
    """A loss on the tokens of answers."""

    @property
    def candidates(self) -> float | None:
        """Temperature at which candidates are drawn in place of the answer's token; None: no candidates."""
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
