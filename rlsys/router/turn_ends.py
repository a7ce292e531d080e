"""TurnEnds: the stop condition of a turn: stop ids, and the texts of `rollout.stop` in any tokenization.

An engine detects a text only within the last tokens of its own request. The router therefore also checks the
tokens that arrive: a text that an interruption splits ends the turn at the same token as without the interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlsys.config import Config
from rlsys.core.spans import RouteSpan, truncate_spans
from rlsys.core.types import Segment, TokenSequence
from rlsys.data import Tokenizer

LONGEST_CHARACTER = 4
"""Largest number of tokens of a character: its bytes in UTF-8."""


class TurnEnds:
    """Stop ids and stop texts. Engines get both with each request."""

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
            ignores_eos: the engine does not stop at the model's end-of-sequence token.
        """
        self.ids, self.ignores_eos = frozenset(ids), ignores_eos
        self.texts = tuple(dict.fromkeys(texts))
        self._decode = decode
        self.reach = LONGEST_CHARACTER * max(map(len, self.texts), default=0)
        """Largest number of tokens at the end of a turn that may belong to an incomplete text."""

    def with_texts(self, texts: Sequence[str]) -> TurnEnds:
        """Return a copy with additional texts."""
        if not texts:
            return self
        return TurnEnds(self.ids, (*self.texts, *texts), self._decode, ignores_eos=self.ignores_eos)

    def text_ends_after(self, previous: Sequence[int], new: Sequence[int]) -> int | None:
        """Return the number of `new` ids up to the end of the first text.

        Args:
            previous: ids of the turn before `new`.

        Returns:
            None if `new` completes no text, or `previous` already contains one.
        """
        if not self.texts or not new:
            return None
        context = list(previous[-self.reach :])
        if not self._has_text([*context, *new]) or self._has_text(context):
            return None
        low, high = 0, len(new)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_text([*context, *new[:middle]]) else (middle, high)
        return high

    def turn_of(self, sample: TokenSequence) -> Sequence[int]:
        """Return the last ids of the sample's current turn that can decide whether it has ended."""
        start = sample.observed[-1].end if sample.observed else 0
        return sample.response_ids[max(start, len(sample.response_ids) - self.reach - 1) :]

    def is_ended(self, turn: Sequence[int]) -> bool:
        """Return whether the last id ends the turn."""
        if not turn:
            return False
        return turn[-1] in self.ids or self.text_ends_after(turn[:-1], turn[-1:]) is not None

    def first_end(self, turn: Sequence[int]) -> int | None:
        """Return the number of ids up to and including the first end of the turn; None if the turn does not end."""
        id_end = next((i + 1 for i, token in enumerate(turn) if token in self.ids), None)
        text_end = self.text_ends_after([], turn)
        return min((end for end in (id_end, text_end) if end is not None), default=None)

    def _has_text(self, ids: Sequence[int]) -> bool:
        decoded = self._decode(ids)
        return any(text in decoded for text in self.texts)


def truncate_segment(segment: Segment, tokens: int, dropped: int) -> Segment:
    """Return the segment up to the end of the turn.

    Args:
        tokens: number of the segment's tokens to keep.
        dropped: number of tokens after the end in the whole request. The routes, stored in the request's last
            segment, and the call spans cover these tokens, too.
    """
    call_spans, support = segment.call_spans, segment.support
    if call_spans is not None:
        call_spans = truncate_spans(call_spans, call_spans[-1].end - dropped)
    if support is not None:
        support = b"".join(row + b"\0" for row in support.split(b"\0")[:tokens])
    return replace(
        segment,
        ids=segment.ids[:tokens],
        mu=segment.mu[:tokens],
        spans=truncate_spans(segment.spans, tokens),
        finish="stop" if dropped and segment.finish else segment.finish,
        routes=None if segment.routes is None else _truncate_routes(segment.routes, dropped),
        call_spans=call_spans,
        support=support,
    )


def _truncate_routes(routes: RouteSpan, dropped: int) -> RouteSpan | None:
    """Return the routes of all but the last `dropped` tokens; None if no token is left."""
    tokens = max(0, routes.end - dropped - routes.start)
    if not tokens:
        return None
    token_bytes = len(routes.experts) // (routes.end - routes.start)  # 0 if the engine wrote them to a file
    return replace(routes, end=routes.start + tokens, experts=routes.experts[: tokens * token_bytes])


def stop_ids(config: Config, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end turns and responses.

    These are rollout.stop_ids and, without rollout.ignore_eos, the model's own stop ids.
    """
    own_ids = frozenset[int]() if config.rollout.ignore_eos else tokenizer.stop_ids
    return own_ids | frozenset(config.rollout.stop_ids)


def turn_ends(config: Config, tokenizer: Tokenizer) -> TurnEnds:
    """Return the stop condition of turns and responses: the stop ids and the texts of rollout.stop."""
    r = config.rollout
    return TurnEnds(stop_ids(config, tokenizer), r.stop, tokenizer.decode, ignores_eos=r.ignore_eos)
