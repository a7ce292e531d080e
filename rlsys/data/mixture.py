"""`data.source: mixture`: several prompt sources with weights.

Which source gives prompt `index`, and which of its prompts, follows from the seed and the index alone. So the mixture
keeps no state either, and a resumed run goes on with the same prompts. Prompts are drawn in blocks: each block has as
many of every source as its weight says, in an order of its own.
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
"""Prompts in a block: a weight is exact to one in so many."""


class Part(Section):
    """One source of a mixture."""

    source: str
    """Name of the source, as data.source."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the training prompts is its weight over the sum of all weights."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source, as data.params."""
    keys: KeysConfig | None = None
    """Keys of the source's rows. Unset: data.keys."""
    name: str | None = None
    """Value of `data_source` of a prompt whose row has none. Unset: the source's name."""


class MixtureParams(Section):
    sources: Annotated[list[Part], Field(min_length=1)]
    """The sources, each with weight and arguments."""


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
        """Values of `data_source` in prompts' entries; None where a part's are unknown before they are drawn."""
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
    """List the tables among a source's parts."""
    if isinstance(source, Mixture):
        return [table for part in source.sources for table in row_sources(part)]
    return [source] if isinstance(source, RowSource) else []


def known_data_sources(source: PromptSource) -> frozenset[str] | None:
    """Return the values of `data_source` of a source's prompts; None for a user's source, which does not say."""
    return source.data_sources if isinstance(source, Mixture | RowSource | ReasoningGymSource) else None


def check_teachers(config: Config, source: PromptSource) -> None:
    """Raise UserError for a name in algo.teacher.by_source that no prompt has."""
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
    """Return each source's prompts in a block, by largest remainders. Raises UserError for a source without any."""
    exact = [w / sum(weights) * BLOCK for w in weights]
    counts = [int(e) for e in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        at = counts.index(0)
        raise UserError(
            f"data.params.sources[{at}].weight = {weights[at]:g}: less than one prompt in {BLOCK} of "
            f"{sum(weights):g}; leave it out, or give it more"
        )
    return counts


def part_config(config: Config, part: Part) -> Config:
    """Return the run's config as a part of the mixture reads it."""
    updates = {"source": part.source, "params": part.params, "keys": part.keys or config.data.keys}
    return config.model_copy(update={"data": config.data.model_copy(update=updates)})
