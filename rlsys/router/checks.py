"""What must not reach an engine: pure checks of prompts and requests, each refusal one clear line.

SGLang refuses most nonsense by itself, but dies of a token id outside its vocabulary, and some of the rest it finds
only after the request has waited in its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.engine.client import RESERVED_TOKENS

MOST_CHOICES = 128
"""Responses to one prompt that one HTTP request may ask for."""
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2), "repetition_penalty": (0, 2), "top_k": (-1, 2**31 - 1), "n": (1, MOST_CHOICES),
    "seed": (-(2**63), 2**63 - 1), "sampling_seed": (-(2**63), 2**63 - 1), "max_new_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1), "max_completion_tokens": (1, 2**31 - 1), "min_new_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1), "best_of": (1, MOST_CHOICES),
}  # fmt: skip
_WHOLE = {"top_k", "n", "seed", "sampling_seed", "best_of"} | {k for k in _RANGES if k.endswith("_tokens")}
_POSITIVE = {"top_p", "repetition_penalty"}


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

    def check_ids(self, ids: Sequence[int]) -> None:
        if min(ids, default=0) < 0 or max(ids, default=0) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RefusedPrompt(f"token id {bad} is outside the vocabulary of {self.vocab_size}")

    def check_request(self, body: Mapping[str, Any]) -> None:
        """A body of /generate, /v1/completions or /v1/chat/completions. Raises RefusedPrompt.

        Prompts as text are measured by the engine's own tokenizer, whose refusal is a 400 as well.
        """
        for ids in _prompts_of_ids(body):
            self.check_prompt(ids)
        sampling = body.get("sampling_params")
        for params in (body, *(sampling if isinstance(sampling, list) else [sampling or {}])):
            if not isinstance(params, Mapping):
                raise RefusedPrompt(f"sampling_params = {str(params)[:80]!r}: expected an object")
            check_sampling(params)
            for name in ("stop_token_ids", "token_ids_logprob"):
                ids = params.get(name) or []
                self.check_ids([i for i in ids if isinstance(i, int)])
            bias = params.get("logit_bias") or {}
            self.check_ids([int(k) for k in bias if str(k).lstrip("-").isdecimal()])


def check_sampling(params: Mapping[str, Any]) -> None:
    """Raises RefusedPrompt for a value that is no number, not finite or out of its range."""
    for name, (low, high) in _RANGES.items():
        value = params.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RefusedPrompt(f"{name} = {value!r}: expected a finite number")
        if not low <= value <= high or (name in _POSITIVE and value == 0):
            bracket = "(" if name in _POSITIVE else "["
            raise RefusedPrompt(f"{name} = {value!r}: expected a value in {bracket}{low:g}, {high:g}]")
        if name in _WHOLE and value != int(value):
            raise RefusedPrompt(f"{name} = {value!r}: expected a whole number")


def _prompts_of_ids(body: Mapping[str, Any]) -> Iterator[list[int]]:
    """Every prompt that is given as token ids, in each place where an API takes one."""
    for name in ("input_ids", "prompt"):
        value = body.get(name)
        if not isinstance(value, list) or not value:
            if value == []:
                yield []
            continue
        rows = value if isinstance(value[0], list) else [value]
        for row in rows:
            if all(type(i) is int for i in row):
                yield row
            elif name == "input_ids" or any(not isinstance(i, str) for i in row):
                raise RefusedPrompt(f"{name}: expected whole numbers")
