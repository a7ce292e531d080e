"""The token sequences on which trainer and engines are compared after a push: real prompts, real responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlsys.data import PromptSource
from rlsys.types import Sample, SampleGroup

CANARIES = 4
"""How many prompts, and how many responses."""
CANARY_TOKENS = 512
"""Of a response with its prompt, so many are compared: wrong weights show on any token, and the comparison stands
between every push and the next token."""


class Canaries:
    """Owns the longest responses taken last. `heldout`: how many held-out prompts the run has a use for."""

    def __init__(self, source: PromptSource, heldout: int) -> None:
        self._source = source
        self._prompts = min(CANARIES, heldout)
        self._responses: list[list[int]] = []

    def see(
        self, groups: Sequence[SampleGroup], load: Callable[[Sequence[Sample]], Sequence[Sample]]
    ) -> None:
        """A step has taken these: its longest responses, of equals the older sample, are compared from now on.

        `load`: gives samples their tokens.
        """
        samples = sorted((s for g in groups for s in g.samples), key=lambda s: (-s.tokens, s.sample_id))
        longest = load(samples[:CANARIES])
        self._responses = [[*s.prompt_ids, *s.response_ids][:CANARY_TOKENS] for s in longest]

    def sequences(self) -> list[list[int]]:
        """Prompts, then the last step's longest responses with theirs."""
        return [*(p.ids for p in self._source.heldout(self._prompts)), *self._responses]
