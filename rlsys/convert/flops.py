"""Compute cost of a sequence, from config.json alone. Pure."""

from __future__ import annotations

from rlsys.convert.config import HFConfig
from rlsys.convert.table import entries


def crossover_length(hf: HFConfig) -> float:
    """The length n0 at which attention costs as much as all matrices: a sequence of n tokens costs n + n^2 / n0.

    A forward pass takes 2 FLOPs a token and parameter that the token visits (of the experts, the chosen ones), and
    n^2 FLOPs a head and number of its query and its value, since half of the scores are masked. The backward pass
    takes twice both.
    """
    if (latent := hf.latent) is not None:
        head = latent.plain + latent.rotary + latent.value
    else:
        head = 2 * hf.head_dim
    attending = hf.layers - sum(hf.linear_layers)
    return 2 * visited_parameters(hf) / (max(1, attending) * hf.heads * head)


def visited_parameters(hf: HFConfig) -> float:
    """Return the parameters that one token visits: all but the embedding and the experts it is not routed to."""
    routed_share = hf.experts_per_token / hf.experts if hf.experts else 1.0
    embedding, *parameters = entries(hf)  # a tied embedding is the head as well
    visited = sum(e.elements * (routed_share if e.expert is not None else 1.0) for e in parameters)
    return visited + (embedding.elements if hf.tied else 0)


def forward_flops(hf: HFConfig, tokens: int) -> float:
    """Return the FLOPs of the forward pass of one sequence."""
    return 2 * visited_parameters(hf) * (tokens + tokens**2 / crossover_length(hf))
