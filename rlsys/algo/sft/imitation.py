"""Losses on the tokens of answers that are there: cross entropy and its kin. Pure: log-probs in, a loss a token out.

`rlsys sft` (sft.loss) takes the mean over all trained tokens of an update. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlsys.algo.plugin import Plugin


@dataclass(frozen=True)
class Tokens:
    """What the model thinks of each token of the answers, `[T]`.

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
        """The temperature at which other tokens are drawn in the place of the answer's; None: none are."""
        return None

    def __call__(self, tokens: Tokens) -> Tensor:
        """Of each token, `[T]`."""
        raise NotImplementedError


class CrossEntropy(Imitation):
    """-log pi(token): imitate the answers."""

    paper = "TRL's SFTTrainer, loss_type nll"
    evidence = "R"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.logp
