"""One-token rollout (arXiv 2509.26313)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rlsys.algo.sft.imitation import Imitation, Tokens


class Otr(Imitation):
    """One-Token Rollout: policy gradient on a token sampled at each position, with reward 1 for the answer's token
    and `beta` for any other.

    The paper samples 256 candidates at each position. rlsys computes their expectation without sampling:
    -sum_a q(a) R(a) log pi(a), with q = pi at `temperature`, without gradient. At temperature 1 that is (1 - beta)
    times the gradient of dft.
    """

    paper = "One-Token Rollout (arXiv 2509.26313), section 3"
    evidence = "P"

    beta: Annotated[float, Field(le=1)] = 0.0
    """Reward of all other tokens. The authors use a small negative value; with 0 they have no gradient."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of the candidates. The authors use more than 1, which gives unlikely tokens more
    weight."""

    @property
    def candidates(self) -> float:
        return self.temperature

    def __call__(self, tokens: Tokens) -> Tensor:
        assert tokens.chance is not None and tokens.expected is not None
        return -((1 - self.beta) * tokens.chance * tokens.logp + self.beta * tokens.expected)
