"""One-token rollout (arXiv 2509.26313)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rlsys.algo.sft.imitation import Imitation, Tokens


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
    """Sampling temperature of the candidates. The authors draw above 1, where unlikely tokens count more."""

    @property
    def candidates(self) -> float:
        return self.temperature

    def __call__(self, tokens: Tokens) -> Tensor:
        assert tokens.chance is not None and tokens.expected is not None
        return -((1 - self.beta) * tokens.chance * tokens.logp + self.beta * tokens.expected)
