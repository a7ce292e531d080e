"""Losses on the tokens of answers that are there: cross entropy and its kin. Pure: log-probs in, a loss a token out.

`rlsys sft` (sft.loss) takes the mean over all trained tokens of an update. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
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


class Dft(Imitation):
    """-pi(token) log pi(token), pi without gradient: tokens that the model finds unlikely count less."""

    paper = "Dynamic Fine-Tuning (arXiv 2508.05629), equation 9"
    evidence = "R"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.logp.detach().exp() * tokens.logp


class Otr(Imitation):
    """One-Token Rollout: policy gradient on tokens drawn in the answer's place; reward 1 for its token, else `beta`.

    The paper draws 256 candidates at each place. Here it is their mean over all draws, which needs none:
    -sum_a q(a) R(a) log pi(a), with q = pi at `temperature`, without gradient. At temperature 1 that is (1 - beta)
    times the gradient of dft.
    """

    paper = "One-Token Rollout (arXiv 2509.26313), section 3"
    evidence = "P"

    beta: Annotated[float, Field(le=1)] = 0.0
    """Reward of every other token. The authors use a small negative one; 0 leaves them alone."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """At which candidates are drawn. The authors draw above 1, where unlikely tokens count more."""

    @property
    def candidates(self) -> float:
        return self.temperature

    def __call__(self, tokens: Tokens) -> Tensor:
        assert tokens.chance is not None and tokens.expected is not None
        return -((1 - self.beta) * tokens.chance * tokens.logp + self.beta * tokens.expected)
