"""Dynamic fine-tuning: cross entropy weighted by the token's probability (arXiv 2508.05629)."""

from __future__ import annotations

from torch import Tensor

from rlsys.algo.sft.imitation import Imitation, Tokens


class Dft(Imitation):
    """-sg(pi(token)) log pi(token), where sg stops the gradient: unlikely tokens have less weight."""

    paper = "Dynamic Fine-Tuning (arXiv 2508.05629), equation 9"
    evidence = "R"

    def __call__(self, tokens: Tokens) -> Tensor:
        return -tokens.logp.detach().exp() * tokens.logp
