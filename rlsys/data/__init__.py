"""Sources of training and held-out prompts, the tokenizer with its chat template, and the data of `rlsys sft`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.config.plugins import call, parse_params
from rlsys.core.errors import UserError
from rlsys.core.imports import resolve
from rlsys.data.chain_sum import chain_sum_tail
from rlsys.data.environment import environment
from rlsys.data.faults import chain_sum_faults
from rlsys.data.mixture import Mixture, MixtureParams, part_config
from rlsys.data.row_source import dataset, jsonl, parquet
from rlsys.data.source import PromptSource, reasoning_gym
from rlsys.data.tokenizer import Tokenizer


def mixture(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the mixture of the sources in `params` (MixtureParams)."""
    p = parse_params("data.params", MixtureParams, params)
    sources = []
    for index, part in enumerate(p.sources):
        try:
            sources.append(build_source(part_config(config, part), tokenizer))
        except UserError as e:
            raise UserError(f"data.params.sources[{index}]: {e}") from None
    names = [part.name or part.source for part in p.sources]
    seed = config.data.seed + config.run.seed
    return Mixture(sources, [part.weight for part in p.sources], names, seed)


SOURCES: dict[str, Callable[..., PromptSource]] = {
    "chain_sum_tail": chain_sum_tail,
    "chain_sum_faults": chain_sum_faults,
    "reasoning_gym": reasoning_gym,
    "jsonl": jsonl,
    "parquet": parquet,
    "dataset": dataset,
    "environment": environment,
    "mixture": mixture,
}


def build_source(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """Call the function that data.source names as `function(config, tokenizer, **data.params)`.

    Returns:
        the prompt source that the function returns.

    Raises:
        UserError: the name is unknown, or the function rejects a parameter.
    """
    source: PromptSource = call(
        "data.params",
        resolve("data.source", config.data.source, SOURCES),
        config,
        tokenizer,
        **config.data.params,
    )
    return source


__all__ = ["SOURCES", "PromptSource", "Tokenizer", "build_source"]
