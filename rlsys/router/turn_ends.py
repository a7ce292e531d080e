"""What ends a turn of the model: ids of its own, and texts of `rollout.stop`, however they are spelled in tokens.

An engine sees a text only in the tokens of its own request, and looks at the last few of them. So what arrives is
looked through here: a text that an interruption cut in two ends the turn as any other, and at the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlsys.config import Config
from rlsys.core.spans import truncate_spans
from rlsys.core.types import Sample, Segment
from rlsys.data import Tokenizer

LONGEST_CHARACTER = 4
"""Tokens that may be needed for one character: as many as it has bytes."""


class TurnEnds:
    """`texts`: what engines are asked to stop at."""

    def __init__(
        self,
        ids: Collection[int],
        texts: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
    ) -> None:
        """`decode`: with special tokens, as the engine's own."""
        self.ids = frozenset(ids)
        self.texts = tuple(dict.fromkeys(texts))
        self._decode = decode
        self.reach = LONGEST_CHARACTER * max(map(len, self.texts), default=0)
        """Tokens in which a text that is not complete yet must have begun."""

    def also(self, texts: Sequence[str]) -> TurnEnds:
        """With further texts."""
        return TurnEnds(self.ids, (*self.texts, *texts), self._decode) if texts else self

    def text_ends_after(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` ids complete a text, where one is complete; `before`: the turn's ids up to there."""
        if not self.texts or not new:
            return None
        known = list(before[-self.reach :])
        if not self._has_text([*known, *new]) or self._has_text(known):
            return None
        few, enough = 0, len(new)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if self._has_text([*known, *new[:middle]]) else (middle, enough)
        return enough

    def turn_of(self, sample: Sample) -> Sequence[int]:
        """The last ids of the turn that the sample is in, as many as matter for its end."""
        start = sample.observed[-1].end if sample.observed else 0
        return sample.response_ids[max(start, len(sample.response_ids) - self.reach - 1) :]

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether the last id of a turn's is one that ends it."""
        if not turn:
            return False
        return turn[-1] in self.ids or self.text_ends_after(turn[:-1], turn[-1:]) is not None

    def first_end(self, turn: Sequence[int]) -> int | None:
        """How many ids the turn has when it ends for the first time; None where it never does."""
        own = next((i + 1 for i, token in enumerate(turn) if token in self.ids), None)
        written = self.text_ends_after([], turn)
        return min((end for end in (own, written) if end is not None), default=None)

    def _has_text(self, ids: Sequence[int]) -> bool:
        found = self._decode(ids)
        return any(text in found for text in self.texts)


def shortened(segment: Segment, tokens: int, dropped: int) -> Segment:
    """Its first tokens, after which the turn ended. `dropped`: of all tokens of its request, how many come later: its
    routes, which come with a request's last segment, and its call's spans cover these too."""
    routes = segment.routes
    if routes is not None:
        kept = max(0, routes.end - dropped - routes.start)
        row = len(routes.experts) // (
            routes.end - routes.start
        )  # none are here where an engine has written them
        routes = (
            replace(routes, end=routes.start + kept, experts=routes.experts[: kept * row]) if kept else None
        )
    rows = [] if segment.support is None else segment.support.split(b"\0")[:tokens]
    return replace(
        segment,
        ids=segment.ids[:tokens],
        mu=segment.mu[:tokens],
        spans=truncate_spans(segment.spans, tokens),
        finish="stop" if dropped and segment.finish else segment.finish,
        routes=routes,
        call_spans=None
        if (call := segment.call_spans) is None
        else truncate_spans(call, call[-1].end - dropped),
        support=None if segment.support is None else b"".join(row + b"\0" for row in rows),
    )


def turn_ends(config: Config, tokenizer: Tokenizer) -> TurnEnds:
    """What ends a response or a turn: the model's own end, and the texts of rollout.stop."""
    return TurnEnds(tokenizer.stop_ids, config.rollout.stop, tokenizer.decode)
