"""Canaries: the token sequences on which trainer and engines are compared after a push: prompts and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from rlsys.core.types import Sample, SampleGroup
from rlsys.data import PromptSource
from rlsys.data.source import draw_heldout
from rlsys.engine_requests import Limits
from rlsys.generators.censoring import train_prompt

CANARIES = 4
"""Largest number of prompts, and of responses with their prompts."""
CANDIDATES = 16 * CANARIES
"""Number of prompts from which the canary prompts are chosen."""
CANARY_TOKENS = 512
"""Largest number of tokens of a canary.

A few tokens suffice, because wrong weights change all log-probs. More tokens would delay generation after every push.
"""


class Canaries:
    """Provides the canaries. Owns the longest responses of the last step."""

    def __init__(self, source: PromptSource, heldout: int | None, limits: Callable[[], Limits]) -> None:
        """Create the canaries of a run.

        Args:
            heldout: number of held-out prompts that the run uses (eval.prompts); None: all held-out prompts of the
                source; 0: the canaries are training prompts.
            limits: returns the engines' limits of prompts.
        """
        self._source, self._limits = source, limits
        self._heldout = heldout
        self._responses: list[list[int]] = []

    def update(
        self, groups: Sequence[SampleGroup], load: Callable[[Sequence[Sample]], Sequence[Sample]]
    ) -> None:
        """Use the longest responses of these groups from now on, older samples first among equal lengths.

        Args:
            load: returns samples with their tokens.
        """
        samples = sorted((s for g in groups for s in g.samples), key=lambda s: (-s.tokens, s.sample_id))
        longest = load(samples[:CANARIES])
        self._responses = [[*s.prompt_ids, *s.response_ids] for s in longest]

    def sequences(self) -> list[list[int]]:
        """Return the prompts, short ones first, and the longest responses of the last step with their prompts.

        All of them fit the engines' limits, because a refused canary verifies nothing.
        """
        return [*self._prompts, *map(self._truncate, self._responses)]

    @cached_property
    def _prompts(self) -> list[list[int]]:
        """Canary prompts, chosen once: a source returns the same prompts in every call."""
        source = self._source
        if self._heldout == 0:
            candidates = [train_prompt(source, i) for i in range(CANDIDATES)]
        else:
            count = None if self._heldout is None else min(CANDIDATES, self._heldout)
            candidates = draw_heldout(source, count)[:CANDIDATES]
        prompts = [p.ids for p in candidates if p.ids]
        short_first = sorted(prompts, key=lambda ids: len(ids) > CANARY_TOKENS)
        return [ids for ids in map(self._truncate, short_first) if self._limits().fits(ids)][:CANARIES]

    def _truncate(self, ids: Sequence[int]) -> list[int]:
        return list(ids[: min(CANARY_TOKENS, self._limits().max_tokens - 1)])
