"""TurnEnds: what ends a turn of the model, stop ids and the texts of `rollout.stop` in any tokenization.

An engine detects a text only in the tokens of its own request, among the last few. The router therefore checks
the tokens that arrive: a text split by an interruption ends the turn as any other, at the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlsys.config import Config
from rlsys.core.spans import truncate_spans
from rlsys.core.types import Segment, TokenSequence
from rlsys.data import Tokenizer

LONGEST_CHARACTER = 4
"""Most tokens of one character: its bytes."""


class TurnEnds:
    """Stop ids and texts. `texts` are also sent to engines."""

    def __init__(
        self,
        ids: Collection[int],
        texts: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        *,
        ignores_eos: bool = False,
    ) -> None:
        """Create the stop condition.

        Args:
            decode: decodes ids including special tokens, as the engine does.
            ignores_eos: the engine does not stop at the model's own end either.
        """
        self.ids, self.ignores_eos = frozenset(ids), ignores_eos
        self.texts = tuple(dict.fromkeys(texts))
        self._decode = decode
        self.reach = LONGEST_CHARACTER * max(map(len, self.texts), default=0)
        """Number of last tokens in which an incomplete text must have started."""

    def with_texts(self, texts: Sequence[str]) -> TurnEnds:
        """Return a copy with additional texts."""
        if not texts:
            return self
        return TurnEnds(self.ids, (*self.texts, *texts), self._decode, ignores_eos=self.ignores_eos)

    def text_ends_after(self, previous: Sequence[int], new: Sequence[int]) -> int | None:
        """Return how many of the `new` ids complete a text, None if no text is complete.

        Args:
            previous: ids of the turn before them.
        """
        if not self.texts or not new:
            return None
        context = list(previous[-self.reach :])
        if not self._has_text([*context, *new]) or self._has_text(context):
            return None
        few, enough = 0, len(new)
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (few, middle) if self._has_text([*context, *new[:middle]]) else (middle, enough)
        return enough

    def turn_of(self, sample: TokenSequence) -> Sequence[int]:
        """Return the last ids of the sample's current turn, as many as matter for its end."""
        start = sample.observed[-1].end if sample.observed else 0
        return sample.response_ids[max(start, len(sample.response_ids) - self.reach - 1) :]

    def is_ended(self, turn: Sequence[int]) -> bool:
        """Return whether the last id ends the turn."""
        if not turn:
            return False
        return turn[-1] in self.ids or self.text_ends_after(turn[:-1], turn[-1:]) is not None

    def first_end(self, turn: Sequence[int]) -> int | None:
        """Return the number of ids up to the first end of the turn, None if it does not end."""
        id_end = next((i + 1 for i, token in enumerate(turn) if token in self.ids), None)
        text_end = self.text_ends_after([], turn)
        return min((end for end in (id_end, text_end) if end is not None), default=None)

    def _has_text(self, ids: Sequence[int]) -> bool:
        decoded = self._decode(ids)
        return any(text in decoded for text in self.texts)


def truncate_segment(segment: Segment, tokens: int, dropped: int) -> Segment:
    """Truncate a segment to its first tokens, after which the turn ended.

    Args:
        dropped: tokens of the whole request after the end. Its routes, which come with its last segment, and
            the spans of its call include them.
    """
    routes = segment.routes
    if routes is not None:
        rows_kept = max(0, routes.end - dropped - routes.start)
        row = len(routes.experts) // (routes.end - routes.start)  # empty if the engine wrote them to a file
        routes = (
            replace(routes, end=routes.start + rows_kept, experts=routes.experts[: rows_kept * row])
            if rows_kept
            else None
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


def stop_ids(config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end turns and responses: the model's and those of rollout.stop_ids.

    Empty with rollout.ignore_eos.
    """
    own_ids = frozenset[int]() if config.rollout.ignore_eos else tokenizer.stop_ids
    return own_ids | frozenset(config.rollout.stop_ids)


def turn_ends(config: Config, tokenizer: Tokenizer) -> TurnEnds:
    """Return the ends of turns and responses: the stop ids and the texts of rollout.stop."""
    r = config.rollout
    return TurnEnds(stop_ids(config, tokenizer), r.stop, tokenizer.decode, ignores_eos=r.ignore_eos)
