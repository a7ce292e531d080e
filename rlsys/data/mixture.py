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
from rlsys.core.errors import UserError
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
    """As data.keys; unset: those."""
    name: str | None = None
    """What a prompt's entry has as `data_source`, where its row does not say it. Unset: the source's name."""


class MixtureParams(Section):
    sources: Annotated[list[Part], Field(min_length=1)]
    """The sources, each with weight and arguments."""


class Mixture:
    """No prompt that is held out in one source is trained from another table."""

    def __init__(
        self, sources: Sequence[PromptSource], weights: Sequence[float], names: Sequence[str], seed: int
    ) -> None:
        self.sources, self._names, self._seed = list(sources), list(names), seed
        self._counts = shares(weights)
        self._block = lru_cache(maxsize=4)(self._draw_block)
        tables = row_sources(self)
        for table in tables:
            for other in tables:
                table.leave_out(other.held_keys)

    @property
    def data_sources(self) -> frozenset[str] | None:
        """What prompts' entries have as `data_source`; None where a part's are not known before they are drawn."""
        found: set[str] = set()
        for name, source in zip(self._names, self.sources, strict=True):
            if (own := known_data_sources(source)) is None:
                return None
            found |= {said or name for said in own}
        return frozenset(found)

    def train(self, index: int) -> Prompt:
        part, place = self._turn(index)
        return self._as(index, part, self.sources[part].train(place))

    def heldout(self, n: int) -> list[Prompt]:
        found: list[Prompt] = []
        drawn = n
        while len(found) < n:
            turns = [self._turn(i) for i in range(drawn)]
            parts = [
                self._heldout_of(part, 1 + max((place for p, place in turns if p == part), default=-1), n)
                for part in range(len(self.sources))
            ]
            different = {
                parts[part][place].text: (part, parts[part][place]) for part, place in reversed(turns)
            }
            found = [self._as(i, *what) for i, what in enumerate(reversed(different.values()))]
            drawn += n
        return found[:n]

    def _heldout_of(self, part: int, count: int, n: int) -> list[Prompt]:
        try:
            return self.sources[part].heldout(count)
        except UserError as e:
            raise UserError(
                f"eval.prompts = {n}: {count} of them are of data.params.sources[{part}]: {e}"
            ) from None

    def _turn(self, index: int) -> tuple[int, int]:
        """Which source has this index, and which of its own prompts it gives."""
        block, place = divmod(index, BLOCK)
        part, rank = self._block(block)[place]
        return part, block * self._counts[part] + rank

    def _draw_block(self, block: int) -> list[tuple[int, int]]:
        """(source, how often it has come in the block before) for each place."""
        parts = [part for part, count in enumerate(self._counts) for _ in range(count)]
        order = sorted(range(BLOCK), key=lambda i: stable_hash(self._seed, "mixture", block, i, bits=64))
        seen = [0] * len(self._counts)
        out = []
        for i in order:
            out.append((parts[i], seen[parts[i]]))
            seen[parts[i]] += 1
        return out

    def _as(self, index: int, part: int, prompt: Prompt) -> Prompt:
        return replace(prompt, index=index, entry={"data_source": self._names[part], **prompt.entry})


def row_sources(source: PromptSource) -> list[RowSource]:
    """The tables among a source's parts."""
    if isinstance(source, Mixture):
        return [table for part in source.sources for table in row_sources(part)]
    return [source] if isinstance(source, RowSource) else []


def known_data_sources(source: PromptSource) -> frozenset[str] | None:
    """What prompts of a source have as `data_source`; None for a source of somebody's own, which does not tell."""
    return source.data_sources if isinstance(source, Mixture | RowSource | ReasoningGymSource) else None


def check_teachers(config: Config, source: PromptSource) -> None:
    """Raises UserError for a name in algo.teacher.by_source that no prompt has."""
    teacher = config.algo.teacher
    if teacher is None or not teacher.by_source or (known := known_data_sources(source)) is None:
        return
    names = sorted(known - {""})
    for name in teacher.by_source:
        if name not in known:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            expected = f"expected some of {', '.join(names)}" if names else "no prompt has one"
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"algo.teacher.by_source names the data_source {name!r}: {expected}{hint}")


def shares(weights: Sequence[float]) -> list[int]:
    """How many prompts of a block each source gives: largest remainders. Raises UserError for one that gives none."""
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
    """The run's config as one source of the mixture sees it."""
    changed = {"source": part.source, "params": part.params, "keys": part.keys or config.data.keys}
    return config.model_copy(update={"data": config.data.model_copy(update=changed)})
