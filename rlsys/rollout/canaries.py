"""The token sequences on which trainer and engines are compared after a push: real prompts, real responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from rlsys.core.types import Sample, SampleGroup
from rlsys.data import PromptSource
from rlsys.engine_requests import Limits
from rlsys.generators.censoring import train_prompt

CANARIES = 4
"""How many prompts, and how many responses."""
CANDIDATES = 16 * CANARIES
"""Prompts among which those that serve as canaries are chosen."""
CANARY_TOKENS = 512
"""Of a prompt, and of a response with its prompt, so many are compared: wrong weights show on any token, and the
comparison stands between every push and the next token."""


class Canaries:
    """Owns the longest responses taken last."""

    def __init__(self, source: PromptSource, heldout: int, limits: Callable[[], Limits]) -> None:
        """`heldout`: how many held-out prompts the run has a use for; 0 takes training prompts. `limits`: of engines,
        read when they are needed."""
        self._source, self._limits = source, limits
        self._candidates = min(CANDIDATES, heldout)
        self._responses: list[list[int]] = []

    def see(
        self, groups: Sequence[SampleGroup], load: Callable[[Sequence[Sample]], Sequence[Sample]]
    ) -> None:
        """A step has taken these: its longest responses, of equals the older sample, are compared from now on.

        `load`: gives samples their tokens.
        """
        samples = sorted((s for g in groups for s in g.samples), key=lambda s: (-s.tokens, s.sample_id))
        longest = load(samples[:CANARIES])
        self._responses = [[*s.prompt_ids, *s.response_ids] for s in longest]

    def sequences(self) -> list[list[int]]:
        """Prompts, those first that need no cut, then the last step's longest responses with theirs. Engines take all
        of them: one that is refused says nothing about weights."""
        return [*self._prompts, *map(self._cut, self._responses)]

    @cached_property
    def _prompts(self) -> list[list[int]]:
        """A source always gives the same ones."""
        source, count = self._source, self._candidates
        found = source.heldout(count) if count else [train_prompt(source, i) for i in range(CANDIDATES)]
        prompts = [p.ids for p in found if p.ids]
        ordered = sorted(prompts, key=lambda ids: len(ids) > CANARY_TOKENS)
        return [ids for ids in map(self._cut, ordered) if self._limits().fits(ids)][:CANARIES]

    def _cut(self, ids: Sequence[int]) -> list[int]:
        return list(ids[: min(CANARY_TOKENS, self._limits().room - 1)])
