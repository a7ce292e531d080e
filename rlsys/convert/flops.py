"""Cost of a sequence in FLOPs, from config.json. Pure."""

from __future__ import annotations

from math import prod

from rlsys.convert.config import HFConfig
from rlsys.convert.table import prediction_layers


def crossover_length(hf: HFConfig) -> float:
    """Return the length n0 of a sequence whose attention costs as much as all matrix products.

    A sequence of n tokens then costs n + n^2 / n0. A forward pass takes 2 FLOPs per token and visited parameter, and
    n^2 FLOPs per head and element of a query and a value, because half of the scores are masked. A backward pass
    takes twice as many of both.
    """
    if (latent := hf.latent) is not None:
        query_and_value = latent.plain + latent.rotary + latent.value
    else:
        query_and_value = 2 * hf.head_dim
    attention_layers = hf.layers - sum(hf.linear_layers)
    return 2 * visited_parameters(hf) / (max(1, attention_layers) * hf.heads * query_and_value)


def visited_parameters(hf: HFConfig) -> float:
    """Return the number of parameters that a token visits: all except the embedding and unselected experts."""
    return sum(visited_by_kind(hf))


def visited_by_kind(hf: HFConfig) -> tuple[float, float]:
    """Return the numbers of visited parameters outside of experts and in experts, see visited_parameters."""
    layers = [*range(hf.layers), *(prediction_layers(hf) if hf.mtp else ())]
    rules = [rule for layer in layers for rule in hf.rules(layer)]
    # Without the embedding, which comes first. A tied one counts as the head.
    rules += [rule for rule in hf.family.rules if not rule.per_layer][1:]
    rules += len(layers[hf.layers :]) * list(hf.family.mtp)
    sizes = [(rule.per_expert, prod(hf.shape(letters))) for rule in rules for letters in rule.hf.values()]
    dense = sum(size for per_expert, size in sizes if not per_expert)
    return dense, hf.experts_per_token * sum(size for per_expert, size in sizes if per_expert)
