"""Compute cost of a sequence, from config.json alone. Pure."""

from __future__ import annotations

from math import prod

from rlsys.convert.config import HFConfig
from rlsys.convert.table import prediction_layers


def crossover_length(hf: HFConfig) -> float:
    """Return the length n0 at which attention costs as much as all matrices: n tokens cost n + n^2 / n0.

    A forward pass takes 2 FLOPs per token and visited parameter (only selected experts count), and n^2 FLOPs per
    head and element of its query and its value, since half of the scores are masked. A backward pass takes twice as
    many of both.
    """
    if (latent := hf.latent) is not None:
        head = latent.plain + latent.rotary + latent.value
    else:
        head = 2 * hf.head_dim
    attending = hf.layers - sum(hf.linear_layers)
    return 2 * visited_parameters(hf) / (max(1, attending) * hf.heads * head)


def visited_parameters(hf: HFConfig) -> float:
    """Return the number of parameters that one token uses: all but the embedding and the unselected experts."""
    return sum(visited_by_kind(hf))


def visited_by_kind(hf: HFConfig) -> tuple[float, float]:
    """Return the number of parameters that one token uses, outside of experts and in experts."""
    layers = [*range(hf.layers), *(prediction_layers(hf) if hf.mtp else ())]
    rules = [rule for layer in layers for rule in hf.rules(layer)]
    rules += [rule for rule in hf.family.rules if not rule.per_layer][
        1:
    ]  # a tied embedding is the head as well
    rules += len(layers[hf.layers :]) * list(hf.family.mtp)
    sizes = [(rule.per_expert, prod(hf.shape(letters))) for rule in rules for letters in rule.hf.values()]
    dense = sum(size for per_expert, size in sizes if not per_expert)
    return dense, hf.experts_per_token * sum(size for per_expert, size in sizes if per_expert)
