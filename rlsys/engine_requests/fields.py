"""Rules for the values of a request's fields. A rule raises RefusedPrompt with field, value and expectation.

A null value counts as absent, because SGLang has a default for each field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.engine_requests.limits import Limits, RefusedPrompt

Rule = Callable[[Limits, str, Any], None]
"""A check of a value other than null. Arguments: limits, name of the field, value."""

MAX_NAME_LENGTH = 1024
"""Largest length in characters of a name, such as the key of a cache, an adapter or a session."""
MAX_DEPTH = 64
"""Largest depth of nested lists and objects. At 1,000, Python's JSON parser fails in the engine's event loop."""
MAX_IDS = 1024
"""Largest number of token ids in a field other than the prompt. Each id becomes a column of a tensor."""


def short(value: Any) -> str:
    """Return at most 80 characters of a value for a message, because a client's value may have megabytes."""
    try:
        return repr(value)[:80]
    except ValueError:  # more digits than Python converts
        return "a number of thousands of digits"


def finite(value: float) -> bool:
    """Return whether a number is finite and fits into a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def refuse(name: str, value: Any, expected: str) -> RefusedPrompt:
    """Return the error for a value.

    Args:
        name: name of the field.
        expected: description of valid values.
    """
    return RefusedPrompt(f"{name} = {short(value)}: expected {expected}", name)


def number(low: float, high: float, *, integer: bool = False, above_low: bool = False) -> Rule:
    """Return the rule for numbers in `[low, high]`, or `(low, high]` with `above_low`."""
    bracket = "(" if above_low else "["

    def check(limits: Limits, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not finite(value):
            raise refuse(name, value, "a finite number")
        if not low <= value <= high or (above_low and value == low):
            raise refuse(name, value, f"a value in {bracket}{low:.16g}, {high:.16g}]")
        if integer and type(value) is not int:
            raise refuse(name, value, "a whole number")

    return check


def flag(limits: Limits, name: str, value: Any) -> None:
    """Check that the value is a boolean."""
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")


def text(limits: Limits, name: str, value: Any) -> None:
    """Check that the value is a text of at most MAX_NAME_LENGTH characters."""
    if not isinstance(value, str):
        raise refuse(name, value, "text")
    if len(value) > MAX_NAME_LENGTH:
        raise RefusedPrompt(
            f"{name}: a text of {len(value)} characters; expected at most {MAX_NAME_LENGTH}", name
        )


def texts(max_count: int, max_length: int) -> Rule:
    """Return the rule for one text or a list of texts. An empty text, which ends a response at once, is refused.

    Args:
        max_count: largest number of texts.
        max_length: largest length of a text, in characters.
    """

    def check(limits: Limits, name: str, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise refuse(name, value, "text, or a list of texts")
        if len(items) > max_count:
            raise RefusedPrompt(f"{name}: {len(items)} texts; expected at most {max_count}", name)
        if (length := max(map(len, items), default=0)) > max_length:
            raise RefusedPrompt(f"{name}: a text of {length} characters; expected at most {max_length}", name)
        if "" in items:
            raise RefusedPrompt(
                f"{name} = {short(value)}: an empty text; expected at least one character", name
            )

    return check


def token_ids(limits: Limits, name: str, value: Any) -> None:
    """Check that the value is a list of at most MAX_IDS ids of the vocabulary."""
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise refuse(name, value, "whole numbers")
    if len(value) > MAX_IDS:
        raise RefusedPrompt(f"{name}: {len(value)} token ids; expected at most {MAX_IDS}", name)
    limits.check_ids(value)


def most_probable(limits: Limits, name: str, value: Any) -> None:
    """Check a number of most probable ids per token, which an engine does not compare with the vocabulary."""
    if isinstance(value, bool) or type(value) is not int:
        raise refuse(name, value, "a whole number")
    if not 0 <= value <= limits.vocab_size:
        raise RefusedPrompt(
            f"{name} = {value}: expected 0 to {limits.vocab_size}, the size of the vocabulary", name
        )


def not_served(reason: str, *neutral: Any) -> Rule:
    """Return the rule for a field that is not supported. It accepts only values without effect.

    Args:
        reason: why the field is not supported.
        *neutral: values that have no effect.
    """

    def check(limits: Limits, name: str, value: Any) -> None:
        if not any(value == item and type(value) is type(item) for item in neutral):
            raise RefusedPrompt(f"{name} = {short(value)}: not served: {reason}", name)

    return check


def any_of(*rules: Rule) -> Rule:
    """Return the rule for values that one of `rules` accepts. It raises the error of the first rule."""

    def check(limits: Limits, name: str, value: Any) -> None:
        refusals = []
        for rule in rules:
            try:
                return rule(limits, name, value)
            except RefusedPrompt as e:
                refusals.append(e)
        raise refusals[0]

    return check


def json_value(kind: type, expected: str) -> Rule:
    """Return the rule for an object or a list of at most MAX_DEPTH levels, whose content the engine checks.

    Args:
        kind: dict or list.
        expected: description of valid values.
    """

    def check(limits: Limits, name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise refuse(name, value, expected)
        check_depth(name, value)

    return check


def inert(limits: Limits, name: str, value: Any) -> None:
    """Accept any value of a field that has no effect on sampling. Engines do not get the field."""


def check_depth(name: str, value: Any) -> None:
    """Check that lists and objects are nested in at most MAX_DEPTH levels."""
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RefusedPrompt(
                f"{name}: lists and objects are nested too deeply; expected at most {MAX_DEPTH} levels",
                name,
            )
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def check_fields(
    limits: Limits, body: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str = ""
) -> None:
    """Check each field by its rule.

    Args:
        limits: limits of the model and the engines.
        body: field -> value.
        rules: field -> rule.
        prefix: prefix of the fields' names in messages.

    Raises:
        RefusedPrompt: a value is refused, or a field is unknown.
    """
    for name, value in body.items():
        if name not in rules:
            raise unknown(name, rules, prefix)
        if value is not None:
            rules[name](limits, name, value)


def unknown(name: str, rules: Mapping[str, Rule], prefix: str = "") -> RefusedPrompt:
    """Return the error for an unknown field, which lists the known ones.

    Args:
        rules: field -> rule.
        prefix: prefix of the field's name in the message.
    """
    return RefusedPrompt(
        f"{prefix}{short(name)[1:-1]}: unknown field; accepted: {', '.join(sorted(rules))}", name
    )
