"""What must not reach an engine: pure checks of prompts and requests, each refusal one clear line.

SGLang refuses most nonsense by itself, but dies of a token id outside its vocabulary, and some of the rest it finds
only after the request has waited in its queue.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.router.limits import Limits, RefusedPrompt

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
_TOP = ("top_logprobs_num", "top_logprobs", "logprobs")
"""How many alternatives of each token are wanted; an engine takes the top of its vocabulary without a check."""
_ID_DIGITS = 18
MOST_STOPS = 64
LONGEST_STOP = 1024
"""Characters of a stop text or pattern. To parse a pattern takes the event loop's time, and it is other people's."""


def check_request(limits: Limits, body: Mapping[str, Any]) -> None:
    """A body of /generate, /v1/completions or /v1/chat/completions. Raises RefusedPrompt.

    Prompts as text are measured by the engine's own tokenizer, whose refusal is a 400 as well.
    """
    for ids in _prompts_of_ids(body):
        limits.check_prompt(ids)
    for value in (body.get("text"), body.get("prompt")):
        if value == "" or (isinstance(value, list) and (not value or "" in value)):
            raise RefusedPrompt("the prompt is empty")  # a text without a token kills SGLang's scheduler
    sampling = body.get("sampling_params")
    for params in (body, *(sampling if isinstance(sampling, list) else [sampling or {}])):
        if not isinstance(params, Mapping):
            raise RefusedPrompt(f"sampling_params = {str(params)[:80]!r}: expected an object")
        check_sampling(params)
        _check_texts("stop", params.get("stop"))
        _check_texts("stop_regex", params.get("stop_regex"))
        _check_patterns(params.get("stop_regex"))
        for name in ("stop_token_ids", "token_ids_logprob"):
            limits.check_ids(_whole_numbers(name, params.get(name)))
        limits.check_ids(_biased_ids(params.get("logit_bias")))
        for name in _TOP:
            _check_top(limits.vocab_size, name, params.get(name))


def _check_top(vocab_size: int, name: str, value: Any) -> None:
    """One number, or one a prompt; chats say with true and false whether they want any."""
    counts = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
    for count in _whole_numbers(name, [c for c in counts if c is not None]):
        if not 0 <= count <= vocab_size:
            raise RefusedPrompt(f"{name} = {count}: expected 0 to {vocab_size}, the vocabulary")


def samples_of(body: Mapping[str, Any]) -> int:
    """Responses that a request asks for, prompts times `n`; no prompt is looked at. A malformed number counts as one:
    it is for check_request to refuse."""
    prompts = max(_rows(body.get(name)) for name in ("input_ids", "text", "prompt"))
    sampling = body.get("sampling_params")
    params = [body, *(sampling if isinstance(sampling, list) else [sampling])]
    choices = [p.get(name) for p in params if isinstance(p, Mapping) for name in ("n", "best_of")]
    return prompts * max((c for c in choices if type(c) is int and 0 < c <= MOST_CHOICES), default=1)


def _rows(value: Any) -> int:
    """How many prompts: a list of texts or of lists is so many."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], str | list) else 1


def check_sampling(params: Mapping[str, Any]) -> None:
    """Raises RefusedPrompt for a value that is no number, not finite or out of its range."""
    for name, (low, high) in _RANGES.items():
        value = params.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise RefusedPrompt(f"{name} = {short(value)}: expected a finite number")
        if not low <= value <= high or (name in _POSITIVE and value == 0):
            bracket = "(" if name in _POSITIVE else "["
            raise RefusedPrompt(f"{name} = {value!r}: expected a value in {bracket}{low:g}, {high:g}]")
        if name in _WHOLE and value != int(value):
            raise RefusedPrompt(f"{name} = {value!r}: expected a whole number")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def short(value: Any) -> str:
    """For a message; a client's value may be megabytes long."""
    try:
        return repr(value)[:80]
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"


def _whole_numbers(name: str, value: Any) -> list[int]:
    """A list of whole numbers, or of such lists, flat."""
    if value is None:
        return []
    rows = value if isinstance(value, list) else [value]
    flat = [i for row in rows for i in (row if isinstance(row, list) else [row])]
    if not isinstance(value, list) or any(type(i) is not int for i in flat):
        raise RefusedPrompt(f"{name} = {short(value)}: expected whole numbers")
    return flat


def _check_texts(name: str, value: Any) -> None:
    """Text, or a list of texts."""
    texts = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) for text in texts):
        raise RefusedPrompt(f"{name} = {short(value)}: expected text, or a list of texts")
    if len(texts) > MOST_STOPS:
        raise RefusedPrompt(f"{name}: {len(texts)} texts, expected at most {MOST_STOPS}")
    if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
        raise RefusedPrompt(f"{name}: a text of {longest} characters, expected at most {LONGEST_STOP}")


def _check_patterns(value: str | list[str] | None) -> None:
    """An engine answers a pattern that does not parse with a fault of its own, which would count against it."""
    for pattern in value if isinstance(value, list) else [value or ""]:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as e:
            raise RefusedPrompt(f"stop_regex = {short(pattern)}: not a regular expression: {e}") from None


def _biased_ids(bias: Any) -> list[int]:
    if bias is None:
        return []
    if not isinstance(bias, Mapping):
        raise RefusedPrompt(f"logit_bias = {short(bias)}: expected an object of token id -> number")
    for key, value in bias.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _ID_DIGITS):
            raise RefusedPrompt(f"logit_bias: {short(key)}: expected a token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
            raise RefusedPrompt(f"logit_bias of token {key} = {short(value)}: expected a finite number")
    return [int(key) for key in bias]


def _prompts_of_ids(body: Mapping[str, Any]) -> Iterator[list[int]]:
    """Every prompt that is given as token ids, in each place where an API takes one."""
    for name in ("input_ids", "prompt"):
        value = body.get(name)
        if name == "input_ids" and value is not None and not isinstance(value, list):
            raise RefusedPrompt(f"input_ids = {short(value)}: expected whole numbers")
        if not isinstance(value, list) or not value:
            if value == []:
                yield []
            continue
        rows = value if any(isinstance(row, list) for row in value) else [value]
        for row in rows:
            if not isinstance(row, list):
                raise RefusedPrompt(f"{name}: expected lists of whole numbers, or one list of them")
            if all(type(i) is int for i in row):
                yield row
            elif name == "input_ids" or any(not isinstance(i, str) for i in row):
                raise RefusedPrompt(f"{name}: expected whole numbers")
