"""`data.source: mixture`: several prompt sources with weights.

The seed and `index` determine the source of a prompt and its index there. So the mixture has no state, and a resumed
run continues with the same prompts. Prompts are drawn in blocks: each block contains prompts of all sources in
proportion to their weights, in a random order.
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
    """Weighted mixture of sources. A prompt that is held out in one source is not trained from another table."""

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float], names: Sequence[str], seed: int
    ) -> None:
        self.sources, self._names, self._seed = list(sources), list(names), seed
        self._counts = shares(weights)
        self._block = lru_cache(maxsize=4)(self._draw_block)
        tables = row_sources(self)
        for table in tables:
            for heldout_table in tables:
                table.leave_out(heldout_table.held_keys)

    @property
    def data_sources(self) -> frozenset[str] | None:
        """Values of `data_source` in the prompts' entries; None if those of a source are unknown in advance."""
        names: set[str] = set()
        for name, source in zip(self._names, self.sources, strict=True):
            if (source_names := known_data_sources(source)) is None:
                return None
            names |= {source_name or name for source_name in source_names}
        return frozenset(names)

    def train(self, index: int) -> Prompt:
        part, index_in_part = self._turn(index)
        return self._relabel(index, part, self.sources[part].train(index_in_part))

    def heldout(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        draws = n
        while len(prompts) < n:
            turns = [self._turn(i) for i in range(draws)]
            parts = [
                self._heldout_of(
                    part, 1 + max((index_in_part for p, index_in_part in turns if p == part), default=-1), n
                )
                for part in range(len(self.sources))
            ]
            different = {
                parts[part][index_in_part].text: (part, parts[part][index_in_part])
                for part, index_in_part in reversed(turns)
            }
            prompts = [
                self._relabel(i, *part_and_prompt)
                for i, part_and_prompt in enumerate(reversed(different.values()))
            ]
            draws += n
        return prompts[:n]

    def _heldout_of(self, part: int, count: int, n: int) -> list[Prompt]:
        try:
            return self.sources[part].heldout(count)
        except TooFewPrompts as e:
            raise TooFewPrompts(
                f"eval.prompts = {n}: {count} of them are of data.params.sources[{part}]: {e}",
                n * e.count // count,
            ) from None

    def _turn(self, index: int) -> tuple[int, int]:
        """Return the source of this index, and the index within the source."""
        block, position = divmod(index, BLOCK)
        part, rank = self._block(block)[position]
        return part, block * self._counts[part] + rank

    def _draw_block(self, block: int) -> list[tuple[int, int]]:
        """Return (source, its earlier prompts in the block) for each position of a block."""
        parts = [part for part, count in enumerate(self._counts) for _ in range(count)]
        order = sorted(range(BLOCK), key=lambda i: stable_hash(self._seed, "mixture", block, i, bits=64))
        counts = [0] * len(self._counts)
        out = []
        for i in order:
            out.append((parts[i], counts[parts[i]]))
            counts[parts[i]] += 1
        return out

    def _relabel(self, index: int, part: int, prompt: Prompt) -> Prompt:
        return replace(prompt, index=index, entry={"data_source": self._names[part], **prompt.entry})


def row_sources(source: PromptSource) -> list[RowSource]:
    """Return the row sources that a source consists of."""
    if isinstance(source, Mixture):
        return [table for part in source.sources for table in row_sources(part)]
    return [source] if isinstance(source, RowSource) else []


def known_data_sources(source: PromptSource) -> frozenset[str] | None:
    """Return the values of `data_source` of a source's prompts; None for a user's source, for which they are
    unknown."""
    return source.data_sources if isinstance(source, Mixture | RowSource | ReasoningGymSource) else None


def check_teachers(config: Config, source: PromptSource) -> None:
    """Check that prompts have every name of algo.teacher.by_source.

    Raises:
        UserError: no prompt has a name.
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
    """Return the number of each source's prompts in a block, by largest remainders.

    Raises:
        UserError: a source has none.
    """
    exact = [w / sum(weights) * BLOCK for w in weights]
    counts = [int(e) for e in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        empty = counts.index(0)
        raise UserError(
            f"data.params.sources[{empty}].weight = {weights[empty]:g}: less than one prompt in {BLOCK} of "
            f"{sum(weights):g}; increase it, or remove the source"
        )
    return counts


def part_config(config: Config, part: Part) -> Config:
    """Return the run's config with the section `data` of a part of the mixture."""
    updates = {"source": part.source, "params": part.params, "keys": part.keys or config.data.keys}
    return config.model_copy(update={"data": config.data.model_copy(update=updates)})
