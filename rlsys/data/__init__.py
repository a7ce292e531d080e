"""Prompt sources: `build_source(config, tokenizer)`; tokenizer and chat template; traces for warm starts."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.data.chain_sum import chain_sum_tail
from rlsys.data.faults import chain_sum_faults
from rlsys.data.source import PromptSource, jsonl, reasoning_gym
from rlsys.data.tokenizer import Tokenizer
from rlsys.plugins import call, resolve

SOURCES: dict[str, Callable[..., PromptSource]] = {
    "chain_sum_tail": chain_sum_tail,
    "chain_sum_faults": chain_sum_faults,
    "reasoning_gym": reasoning_gym,
    "jsonl": jsonl,
}


def build_source(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The source that `data.source` names, made as `function(config, tokenizer, **data.params)`.

    Raises UserError: unknown name (with the nearest known one), parameters it does not take.
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
