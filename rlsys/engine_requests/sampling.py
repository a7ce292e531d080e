"""Sampling parameters by SGLang's names (0.5.23: sampling/sampling_params.py), with their ranges.

The ranges are those that SGLang verifies. For parameters that it does not verify, they prevent overflows of 32 and 64
bits, divisions by zero, and unlimited lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.engine_requests.fields import (
    MAX_IDS,
    Rule,
    check_fields,
    finite,
    flag,
    most_probable,
    not_served,
    number,
    refuse,
    short,
    texts,
    token_ids,
)
from rlsys.engine_requests.limits import Limits, RefusedPrompt

MAX_CHOICES = 128
"""Largest number of responses to one prompt."""
MAX_STOPS = 32
"""Largest number of stop texts: SGLang's MAX_STOP_COUNT."""
MAX_STOP_LENGTH = 1024
"""Largest length of a stop text, in characters."""
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_ID_DIGITS = 18
NO_GRAMMAR = (
    "grammars and patterns are not supported, because an interrupted response continues from its tokens, without the "
    "state of a grammar"
)


def min_p(limits: Limits, name: str, value: Any) -> None:
    """Check that the value is in [0, 1], and 0 for deterministic engines."""
    number(0, 1)(limits, name, value)
    if value and limits.deterministic:
        raise RefusedPrompt(
            f"{name} = {value!r}: expected 0, because the engine is deterministic, and SGLang does not support "
            "min_p with seeds",
            name,
        )


def top_k(limits: Limits, name: str, value: Any) -> None:
    """Check that the value is -1 (all tokens) or positive."""
    number(-1, _INT32, integer=True)(limits, name, value)
    if value == 0:
        raise refuse(name, value, "-1 (all tokens), or at least 1")


def logit_bias(limits: Limits, name: str, value: Any) -> None:
    """Check that the value maps ids of the vocabulary to biases in [-100, 100]."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "an object of token id -> number")
    if len(value) > MAX_IDS:
        raise RefusedPrompt(f"{name}: {len(value)} token ids; expected at most {MAX_IDS}", name)
    for key, bias in value.items():
        digits = str(key).removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _ID_DIGITS):
            raise RefusedPrompt(f"{name}: {short(key)}: expected a token id", name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not finite(bias):
            raise RefusedPrompt(f"{name} of token {key} = {short(bias)}: expected a finite number", name)
        if not -100 <= bias <= 100:
            raise RefusedPrompt(f"{name} of token {key} = {bias!r}: expected a value in [-100, 100]", name)
    limits.check_ids([int(key) for key in value])


_TOKENS = number(0, _INT32, integer=True)

SAMPLING: Mapping[str, Rule] = {
    "max_new_tokens": _TOKENS,
    "min_new_tokens": _TOKENS,
    "temperature": number(0, 100),
    "top_p": number(0, 1, above_low=True),
    "top_k": top_k,
    "min_p": min_p,
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 2),  # a logit is divided by it, in float32
    "n": number(1, MAX_CHOICES, integer=True),
    "sampling_seed": number(-(2**63), _INT64, integer=True),
    "stop": texts(MAX_STOPS, MAX_STOP_LENGTH),
    "stop_token_ids": token_ids,
    **dict.fromkeys(
        ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag"), not_served(NO_GRAMMAR, "", [])
    ),
    "logit_bias": logit_bias,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "stream_interval": number(1, _INT32, integer=True),
    "beam_width": not_served("there is no beam search", 1),
    "custom_params": not_served("these parameters are for logit processors, which clients must not send", {}),
    "watermark": not_served("there are no watermarks"),
}
"""Sampling parameter -> rule."""

ALIASES: Mapping[str, str] = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""OpenAI's name of a sampling parameter -> SGLang's."""


def check_sampling(limits: Limits, params: Mapping[str, Any], prefix: str = "sampling_params.") -> None:
    """Check sampling parameters.

    Args:
        limits: Limits of the model and the engines.
        params: Sampling parameter by SGLang's name -> value.
        prefix: Prefix of the parameters' names in messages.

    Raises:
        RefusedPrompt: A parameter is unknown, out of range, or contradicts another one.
    """
    check_fields(limits, params, SAMPLING, prefix)
    check_together(params)


def check_together(params: Mapping[str, Any]) -> None:
    """Check that sampling parameters do not contradict each other.

    Args:
        params: Sampling parameter by SGLang's name -> value; other keys are ignored.

    Raises:
        RefusedPrompt: min_new_tokens exceeds max_new_tokens.
    """
    min_tokens, max_tokens = params.get("min_new_tokens"), params.get("max_new_tokens")
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise RefusedPrompt(
            f"min_new_tokens = {min_tokens}: expected at most max_new_tokens = {max_tokens}", "min_new_tokens"
        )


def check_stop(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Check a value of `stop`, and return it as a tuple of texts.

    Args:
        value: A text, a list of texts, or None.
        name: Name of the field in messages.

    Raises:
        RefusedPrompt: The value is invalid.
    """
    if value is None:
        return ()
    SAMPLING["stop"](Limits(1, 1), name, value)
    return (value,) if isinstance(value, str) else tuple(value)


def check_turn(
    limits: Limits,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    temperature: float,
    seed: int,
    stop_texts: Sequence[str] = (),
    alternatives: int = 0,
) -> None:
    """Check a turn that the run itself requests, for training, evaluation, a judge or an agent.

    Args:
        limits: Limits of the model and the engines.
        prompt_ids: Ids of the sample's prompt.
        response_ids: Ids of earlier tokens of the model and its environment.
        temperature: Sampling temperature.
        seed: Sampling seed.
        stop_texts: Stop texts in addition to those of the run.
        alternatives: Number of most probable ids to return for each token.

    Raises:
        RefusedPrompt: The turn must not reach an engine.
    """
    limits.check_prompt(prompt_ids)
    limits.check_ids(response_ids)
    check_fields(limits, {"temperature": temperature, "sampling_seed": seed}, SAMPLING)
    most_probable(limits, "top_logprobs_num", alternatives)
    for text in stop_texts:
        check_stop(text)
