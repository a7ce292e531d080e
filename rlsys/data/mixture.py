"""`data.source: mixture`: several prompt sources with weights.

The seed and a prompt's index determine the source of the prompt and its index in the source. So the mixture has no
state, and a resumed run continues with the same prompts. Prompts are drawn in blocks: each block contains prompts of
all sources in proportion to their weights, in a random order.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlsys.config import Config
from rlsys.config.data import KeysConfig
from rlsys.config.section import Section
from rlsys.core.errors import TooFewPrompts, UserError
from rlsys.core.seeds import stable_hash
from rlsys.core.types import Prompt
from rlsys.data.row_source import RowSource
from rlsys.data.source import PromptSource, ReasoningGymSource

BLOCK = 1000
"""Number of prompts in a block, which limits the precision of weights."""


class Part(Section):
    """One source of a mixture."""

    source: str
    """Name of the source, as data.source."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the source; its share of the training prompts is weight / sum of all weights."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source, as data.params."""
    keys: KeysConfig | None = None
    """Keys of the source's rows. Unset: data.keys."""
    name: str | None = None
    """Value of `data_source` for prompts whose row has none. Unset: the source's name."""


class MixtureParams(Section):
    sources: Annotated[list[Part], Field(min_length=1)]
    """The sources with their weights and arguments."""


class Mixture:
    """Weighted mixture of sources.

    A prompt that one table of the mixture holds out is not trained from any of its tables.
    """

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float], names: Sequence[str], seed: int
    ) -> None:
        """Combine the sources.

        Args:
            weights: weight of each source; a source's share of the prompts is its weight / the sum of the weights.
            names: `data_source` of each source's prompts whose rows have none.

        Raises:
            UserError: a source has less than one prompt in a block, or all prompts of a table are held out.
        """
        self.sources, self._names, self._seed = list(sources), list(names), seed
        self._counts = shares(weights)
        self._block = lru_cache(maxsize=4)(self._draw_block)
        tables = row_sources(self)
        for table in tables:
            for heldout_table in tables:
                table.leave_out(heldout_table.held_keys)

    @property
    def data_sources(self) -> frozenset[str] | None:
        """Values of `data_source` in the prompts' entries; None if the values of some source are unknown."""
        names: set[str] = set()
        for name, source in zip(self._names, self.sources, strict=True):
            if (source_names := known_data_sources(source)) is None:
                return None
            names |= {source_name or name for source_name in source_names}
        return frozenset(names)

    def train(self, index: int) -> Prompt:
        part, index_in_part = self._locate(index)
        return self._relabel(index, part, self.sources[part].train(index_in_part))

    def heldout(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        draws = n
        while len(prompts) < n:  # sources may have prompts in common, which count once
            prompts = self._draw_heldout(draws, n)
            draws += n
        return prompts[:n]

    def _draw_heldout(self, draws: int, n: int) -> list[Prompt]:
        """Return the different prompts among the first `draws` held-out prompts, in their order.

        Args:
            n: number of requested prompts, for the error.
        """
        locations = [self._locate(i) for i in range(draws)]
        counts = [0] * len(self.sources)
        for part, index_in_part in locations:
            counts[part] = max(counts[part], index_in_part + 1)
        heldout = [self._heldout_of(part, count, n) for part, count in enumerate(counts)]
        parts_and_prompts: dict[str, tuple[int, Prompt]] = {}
        for part, index_in_part in locations:
            prompt = heldout[part][index_in_part]
            parts_and_prompts.setdefault(prompt.text, (part, prompt))
        return [self._relabel(i, part, prompt) for i, (part, prompt) in enumerate(parts_and_prompts.values())]

    def _heldout_of(self, part: int, count: int, n: int) -> list[Prompt]:
        try:
            return self.sources[part].heldout(count)
        except TooFewPrompts as e:
            raise TooFewPrompts(
                f"eval.prompts = {n}: {count} of them are of data.params.sources[{part}]: {e}",
                n * e.count // count,
            ) from None

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the source of prompt `index`, and the prompt's index in the source."""
        block, position = divmod(index, BLOCK)
        part, rank = self._block(block)[position]
        return part, block * self._counts[part] + rank

    def _draw_block(self, block: int) -> list[tuple[int, int]]:
        """Draw the sources of a block's prompts.

        Returns:
            for each prompt, the number of its source, and the number of earlier prompts of this source in the block.
        """
        parts = [part for part, count in enumerate(self._counts) for _ in range(count)]
        order = sorted(range(BLOCK), key=lambda i: stable_hash(self._seed, "mixture", block, i, bits=64))
        counts = [0] * len(self._counts)
        sources_and_ranks = []
        for i in order:
            sources_and_ranks.append((parts[i], counts[parts[i]]))
            counts[parts[i]] += 1
        return sources_and_ranks

    def _relabel(self, index: int, part: int, prompt: Prompt) -> Prompt:
        return replace(prompt, index=index, entry={"data_source": self._names[part], **prompt.entry})


def row_sources(source: PromptSource) -> list[RowSource]:
    """Return the sources of tables in a source: itself, or the parts of a mixture, or none."""
    if isinstance(source, Mixture):
        return [table for part in source.sources for table in row_sources(part)]
    return [source] if isinstance(source, RowSource) else []


def known_data_sources(source: PromptSource) -> frozenset[str] | None:
    """Return the values of `data_source` in the prompts of a source.

    Returns:
        "" stands for prompts without it; None if the values are unknown, as for a user's source.
    """
    return source.data_sources if isinstance(source, Mixture | RowSource | ReasoningGymSource) else None


def check_teachers(config: Config, source: PromptSource) -> None:
    """Check that each name in algo.teacher.by_source is the `data_source` of some prompts.

    Raises:
        UserError: no prompt has one of the names.
    """
    teacher = config.algo.teacher
    if teacher is None or not teacher.by_source or (data_sources := known_data_sources(source)) is None:
        return
    names = sorted(data_sources - {""})
    for name in teacher.by_source:
        if name not in data_sources:
            matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            expected = f"expected some of {', '.join(names)}" if names else "no prompt has one"
            hint = f"; did you mean {matches[0]}?" if matches else ""
            raise UserError(f"algo.teacher.by_source names the data_source {name!r}: {expected}{hint}")


def shares(weights: Sequence[float]) -> list[int]:
    """Return the number of each source's prompts in a block, rounded by the largest remainder method.

    Raises:
        UserError: a source has less than one prompt in a block.
    """
    quotas = [w / sum(weights) * BLOCK for w in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        empty = counts.index(0)
        raise UserError(
            f"data.params.sources[{empty}].weight = {weights[empty]:g}: less than one prompt in {BLOCK} for a sum of "
            f"weights of {sum(weights):g}; increase the weight, or remove the source"
        )
    return counts


def part_config(config: Config, part: Part) -> Config:
    """Return the config with source, params and keys of one part of a mixture in its section `data`."""
    updates = {"source": part.source, "params": part.params, "keys": part.keys or config.data.keys}
    return config.model_copy(update={"data": config.data.model_copy(update=updates)})
