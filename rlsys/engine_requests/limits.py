"""Limits of a model and its engines. A token id outside the vocabulary kills SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVED_TOKENS = 6
"""Number of tokens of the context, or of the KV pool, that SGLang does not give to prompt and response."""
DEATHS_POISONOUS = 2
"""A client's request is refused after this number of engine deaths during it.

The number is lower than for a sample of a run (router/failure_policy.py), because the checks may miss a harmful
request of a client.
"""


class RefusedPrompt(ValueError):
    """Raised for a request that must not reach an engine.

    Attributes:
        param: the field of the request that is at fault, if it is known.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Limits:
    """Limits of the model and the engines.

    Args:
        vocab_size: Number of token ids.
        context_length: Largest number of tokens of prompt and response, including RESERVED_TOKENS.
        deterministic: Whether the engines sample from seeds; SGLang's scheduler then asserts that `min_p` is 0.
    """

    vocab_size: int
    context_length: int
    deterministic: bool = False

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of prompt and response together."""
        return self.context_length - RESERVED_TOKENS

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Check a prompt.

        Raises:
            RefusedPrompt: The prompt is empty, too long for a response, or has an id outside the vocabulary.
        """
        if not ids:
            raise RefusedPrompt("the prompt is empty")
        if len(ids) >= self.max_tokens:
            raise RefusedPrompt(f"the prompt has {len(ids)} tokens; expected at most {self.max_tokens - 1}")
        self.check_ids(ids)

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether engines accept this prompt."""
        try:
            self.check_prompt(ids)
        except RefusedPrompt:
            return False
        return True

    def check_ids(self, ids: Sequence[int]) -> None:
        """Check that all ids are in the vocabulary.

        Raises:
            RefusedPrompt: An id is negative, or not below `vocab_size`.
        """
        if min(ids, default=0) < 0 or max(ids, default=0) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self.vocab_size} ids")

    def strictest(self, limits: Limits) -> Limits:
        """Return the largest limits that exceed neither these nor the given ones."""
        return Limits(
            min(self.vocab_size, limits.vocab_size),
            min(self.context_length, limits.context_length),
            self.deterministic or limits.deterministic,
        )


ANY_ENGINE = Limits(2**31 - 1, 2**31 - 1)
"""Limits if model and engine are unknown."""
