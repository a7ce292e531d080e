"""Limits of the model and the settings of an engine. SGLang dies of a token id outside its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVED_TOKENS = 6
"""SGLang refuses a prompt that leaves fewer tokens than this of what it can hold (the context, or its KV pool)."""
DEATHS_POISONOUS = 2
"""Engine deaths under a client's request after which it is refused. Fewer than for a sample of a run
(router/failure_policy.py): a client may send what a check overlooks."""


class RefusedPrompt(ValueError):
    """Request that must not reach an engine; the message has the reason. `param`: the field of the request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Limits:
    """Limits of the model and the engines.

    Args:
        vocab_size: Number of token ids.
        context_length: Maximum tokens of prompt and response together, RESERVED_TOKENS included.
        deterministic: The engines sample from seeds; SGLang's scheduler asserts that such a request has no `min_p`.
    """

    vocab_size: int
    context_length: int
    deterministic: bool = False

    @property
    def room(self) -> int:
        """Maximum tokens of prompt and response together."""
        return self.context_length - RESERVED_TOKENS

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise RefusedPrompt: empty, no room for a response, or an id outside the vocabulary (it kills SGLang)."""
        if not ids:
            raise RefusedPrompt("the prompt is empty")
        if len(ids) >= self.room:
            raise RefusedPrompt(f"the prompt has {len(ids)} tokens; there is room for {self.room - 1}")
        self.check_ids(ids)

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether engines accept this prompt."""
        try:
            self.check_prompt(ids)
        except RefusedPrompt:
            return False
        return True

    def check_ids(self, ids: Sequence[int]) -> None:
        if min(ids, default=0) < 0 or max(ids, default=0) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self.vocab_size}")

    def strictest(self, limits: Limits) -> Limits:
        """Return the limits that engines of both kinds meet."""
        return Limits(
            min(self.vocab_size, limits.vocab_size),
            min(self.context_length, limits.context_length),
            self.deterministic or limits.deterministic,
        )


ANY_ENGINE = Limits(2**31 - 1, 2**31 - 1)
"""Limits where model and engine are unknown."""
