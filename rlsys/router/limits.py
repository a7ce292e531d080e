"""Which prompts an engine may get: SGLang dies of a token id outside its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.engine.client import RESERVED_TOKENS


class RefusedPrompt(ValueError):
    """This prompt must not reach an engine; the message says why."""


class Limits:
    """Of the model and the engines. `room`: the most tokens of prompt and response together."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self.vocab_size = vocab_size
        self.room = context_length - RESERVED_TOKENS

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises RefusedPrompt: empty, no room for a response, or an id outside the vocabulary (it kills SGLang)."""
        if not ids:
            raise RefusedPrompt("the prompt is empty")
        if len(ids) >= self.room:
            raise RefusedPrompt(f"the prompt has {len(ids)} tokens; there is room for {self.room - 1}")
        self.check_ids(ids)

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether engines take this prompt."""
        try:
            self.check_prompt(ids)
        except RefusedPrompt:
            return False
        return True

    def check_ids(self, ids: Sequence[int]) -> None:
        if min(ids, default=0) < 0 or max(ids, default=0) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self.vocab_size}")
