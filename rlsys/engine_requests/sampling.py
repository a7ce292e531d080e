"""Sampling parameters by SGLang's names (0.5.23: sampling/sampling_params.py), with their ranges.

Ranges are those that SGLang verifies, closed where it does not: 32 and 64 bits, divisions, and lists without an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.engine_requests.fields import (
    MOST_IDS,
    Rule,
    check_depth,
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

MOST_CHOICES = 128
"""Responses to one prompt."""
MOST_STOPS = 32
"""SGLang's own (MAX_STOP_COUNT)."""
LONGEST_STOP = 1024
"""Characters."""
LONGEST_GRAMMAR = 64 * 1024
"""Characters of a JSON schema. An engine compiles it beside all other requests."""
LARGEST_BOUND = 100_000
"""In a JSON schema: of lengths and counts, which the compiler unrolls."""
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_ID_DIGITS = 18
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMA_PATTERNS = ("pattern", "patternProperties")
_NEED = "the engine runs it beside all other requests; `rlsys router --allow-patterns` allows it"


def pattern(*, compiled: bool = False) -> Rule:
    """A regular expression or a grammar. `compiled`: one that Python's `re` must accept."""

    def check(limits: Limits, name: str, value: Any) -> None:
        if value in ("", []):
            return
        texts(MOST_STOPS if compiled else 1, LONGEST_STOP if compiled else LONGEST_GRAMMAR)(
            limits, name, value
        )
        if not limits.patterns:
            raise RefusedPrompt(f"{name} = {short(value)}: not served: {_NEED}", name)
        for one in value if compiled and isinstance(value, list) else [value] if compiled else []:
            try:
                re.compile(one)
            except (re.error, RecursionError, OverflowError) as e:
                raise RefusedPrompt(f"{name} = {short(one)}: not a regular expression: {e}", name) from None

    return check


def json_schema(limits: Limits, name: str, value: Any) -> None:
    """As text."""
    if value == "":
        return
    if not isinstance(value, str):
        raise refuse(name, value, "a JSON schema as text")
    if len(value) > LONGEST_GRAMMAR:
        raise RefusedPrompt(f"{name}: {len(value)} characters, expected at most {LONGEST_GRAMMAR}", name)
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        raise refuse(name, value, "a JSON schema as text") from None
    check_schema(limits, name, schema)


def check_schema(limits: Limits, name: str, schema: Any) -> None:
    """An object, no deeper than others, without what a compiler unrolls or runs as a regular expression."""
    if not isinstance(schema, dict):
        raise refuse(name, schema, "a JSON schema, an object")
    check_depth(name, schema)
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        if not isinstance(part, dict):
            continue
        pending += part.values()
        for word in _COUNTS:
            bound = part.get(word)
            if isinstance(bound, int | float) and not 0 <= bound <= LARGEST_BOUND:
                raise RefusedPrompt(f"{name}: {word} = {short(bound)}: expected 0 to {LARGEST_BOUND}", name)
        for word in _SCHEMA_PATTERNS:
            if not limits.patterns and isinstance(part.get(word), str if word == "pattern" else dict):
                raise RefusedPrompt(f"{name}: {word} = {short(part[word])}: not served: {_NEED}", name)


def min_p(limits: Limits, name: str, value: Any) -> None:
    number(0, 1)(limits, name, value)
    if value and limits.deterministic:
        raise RefusedPrompt(
            f"{name} = {value!r}: expected 0: the engine is deterministic, and SGLang cannot draw by min_p from a "
            "seed",
            name,
        )


def top_k(limits: Limits, name: str, value: Any) -> None:
    number(-1, _INT32, whole=True)(limits, name, value)
    if value == 0:
        raise refuse(name, value, "-1 (all tokens), or 1 and more")


def logit_bias(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise refuse(name, value, "an object of token id -> number")
    if len(value) > MOST_IDS:
        raise RefusedPrompt(f"{name}: {len(value)} token ids, expected at most {MOST_IDS}", name)
    for key, bias in value.items():
        digits = str(key).removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _ID_DIGITS):
            raise RefusedPrompt(f"{name}: {short(key)}: expected a token id", name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not finite(bias):
            raise RefusedPrompt(f"{name} of token {key} = {short(bias)}: expected a finite number", name)
        if not -100 <= bias <= 100:
            raise RefusedPrompt(f"{name} of token {key} = {bias!r}: expected a value in [-100, 100]", name)
    limits.check_ids([int(key) for key in value])


_TOKENS = number(0, _INT32, whole=True)

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
    "n": number(1, MOST_CHOICES, whole=True),
    "sampling_seed": number(-(2**63), _INT64, whole=True),
    "stop": texts(MOST_STOPS, LONGEST_STOP),
    "stop_token_ids": token_ids,
    "stop_regex": pattern(compiled=True),
    "json_schema": json_schema,
    "regex": pattern(),
    "ebnf": pattern(),
    "structural_tag": pattern(),
    "logit_bias": logit_bias,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "stream_interval": number(1, _INT32, whole=True),
    "beam_width": not_served("no beam search", 1),
    "custom_params": not_served("parameters of logit processors, of which clients may bring none", {}),
    "watermark": not_served("no watermarks"),
}
"""By name."""

ALIASES: Mapping[str, str] = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""OpenAI's names -> SGLang's."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_sampling(limits: Limits, params: Mapping[str, Any], inside: str = "sampling_params.") -> None:
    """Raises RefusedPrompt: not known, out of its range, or excluded by another one."""
    check_fields(limits, params, SAMPLING, inside)
    check_together(params)


def check_together(params: Mapping[str, Any]) -> None:
    """Rules about several sampling parameters, by SGLang's names."""
    fewest, most = params.get("min_new_tokens"), params.get("max_new_tokens")
    if fewest is not None and most is not None and fewest > most:
        raise RefusedPrompt(
            f"min_new_tokens = {fewest}: expected at most max_new_tokens = {most}", "min_new_tokens"
        )
    if len(grammars := [name for name in _GRAMMARS if params.get(name)]) > 1:
        raise RefusedPrompt(f"{' and '.join(grammars)}: expected one of them", grammars[0])


def check_stop(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Texts that end a response. Raises RefusedPrompt."""
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
    """A turn that a run itself asks for: of training, evaluation, a probe, a judge or an agent. Raises RefusedPrompt.

    Args:
        prompt_ids: Of the sample.
        response_ids: What the model and its environment have said since.
        stop_texts: Beside those of the run.
        alternatives: The most probable ids that are to be named in the place of each token.
    """
    limits.check_prompt(prompt_ids)
    limits.check_ids(response_ids)
    check_fields(limits, {"temperature": temperature, "sampling_seed": seed}, SAMPLING)
    most_probable(limits, "top_logprobs_num", alternatives)
    for text in stop_texts:
        check_stop(text)
