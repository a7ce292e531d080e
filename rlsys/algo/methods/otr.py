"""One-token rollout (arXiv 2509.26313)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rlsys.algo.sft.imitation import Imitation, Tokens


class Otr(Imitation):
    """One-Token Rollout: policy gradient on one sampled token at each position of an answer.

    The sampled token has reward 1 if it is the answer's token, else `beta`. The paper samples 256 candidates at each
    position. rlsys computes the expectation instead: -sum_a q(a) R(a) log pi(a), where q is pi at `temperature`
    without gradient. At temperature 1 the gradient is (1 - beta) times that of `dft`.
    """

    paper = "One-Token Rollout (arXiv 2509.26313), section 3"
    evidence = "P"

    beta: Annotated[float, Field(le=1)] = 0.0
    """Reward of a token other than the answer's; 0: no gradient. The authors use a small negative value."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The authors use a value above 1, which gives unlikely tokens more weight."""

    @property
    def candidates(self) -> float:
        return self.temperature

    def __call__(self, tokens: Tokens) -> Tensor:
        assert tokens.chance is not None and tokens.expected is not None
        return -((1 - self.beta) * tokens.chance * tokens.logp + self.beta * tokens.expected)
