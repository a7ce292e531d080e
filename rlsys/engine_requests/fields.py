"""Kinds of values of a request's fields. Each check raises RefusedPrompt, which names field, value and expectation.

A field without a value (null) is as good as absent: SGLang has a default for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.engine_requests.limits import Limits, RefusedPrompt

Rule = Callable[[Limits, str, Any], None]
"""Check of a value that is not null. Arguments: limits, the field's name, the value."""

MAX_NAME_LENGTH = 1024
"""Characters of a text that names something: a key of a cache, an adapter, a session."""
MAX_DEPTH = 64
"""Lists and objects inside one another; Python's own JSON reader gives up at 1,000, in the engine's event loop."""
MAX_IDS = 1024
"""Token ids in one field beside the prompt: each becomes a column of a tensor, or an element of a set."""


def short(value: Any) -> str:
    """Shorten a value for a message; a client's may be megabytes long."""
    try:
        return repr(value)[:80]
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"


def finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def refuse(name: str, value: Any, expected: str) -> RefusedPrompt:
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
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")


def text(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise refuse(name, value, "text")
    if len(value) > MAX_NAME_LENGTH:
        raise RefusedPrompt(
            f"{name}: a text of {len(value)} characters, expected at most {MAX_NAME_LENGTH}", name
        )


def texts(max_count: int, max_length: int) -> Rule:
    """Return the rule for one text, or a list of at most `max_count`, none of them empty.

    An empty text would end a response at its first token.
    """

    def check(limits: Limits, name: str, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise refuse(name, value, "text, or a list of texts")
        if len(items) > max_count:
            raise RefusedPrompt(f"{name}: {len(items)} texts, expected at most {max_count}", name)
        if (length := max(map(len, items), default=0)) > max_length:
            raise RefusedPrompt(f"{name}: a text of {length} characters, expected at most {max_length}", name)
        if "" in items:
            raise RefusedPrompt(
                f"{name} = {short(value)}: an empty text, expected at least one character", name
            )

    return check


def token_ids(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise refuse(name, value, "whole numbers")
    if len(value) > MAX_IDS:
        raise RefusedPrompt(f"{name}: {len(value)} token ids, expected at most {MAX_IDS}", name)
    limits.check_ids(value)


def most_probable(limits: Limits, name: str, value: Any) -> None:
    """Check the number of alternatives of each token; an engine takes the top of its vocabulary unchecked."""
    if isinstance(value, bool) or type(value) is not int:
        raise refuse(name, value, "a whole number")
    if not 0 <= value <= limits.vocab_size:
        raise RefusedPrompt(f"{name} = {value}: expected 0 to {limits.vocab_size}, the vocabulary", name)


def not_served(reason: str, *neutral: Any) -> Rule:
    """Return the rule for a known field without effect: only neutral values are accepted."""

    def check(limits: Limits, name: str, value: Any) -> None:
        if not any(
            value == neutral_value and type(value) is type(neutral_value) for neutral_value in neutral
        ):
            raise RefusedPrompt(f"{name} = {short(value)}: not served: {reason}", name)

    return check


def any_of(*rules: Rule) -> Rule:
    """Return the rule that any of the rules accepts; the first rule's refusal where none does."""

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
    """Return the rule for an object or a list that the engine reads itself, at most MAX_DEPTH deep."""

    def check(limits: Limits, name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise refuse(name, value, expected)
        check_depth(name, value)

    return check


def inert(limits: Limits, name: str, value: Any) -> None:
    """Accept any value: the field has no effect on sampling, and engines do not get it."""


def check_depth(name: str, value: Any) -> None:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RefusedPrompt(f"{name}: lists and objects in more than {MAX_DEPTH} levels", name)
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def check_fields(
    limits: Limits, body: Mapping[str, Any], rules: Mapping[str, Rule], inside: str = ""
) -> None:
    """Check each field by its rule.

    Args:
        inside: the field that contains these.

    Raises:
        RefusedPrompt: a value is refused, or a field is unknown.
    """
    for name, value in body.items():
        if name not in rules:
            raise unknown(name, rules, inside)
        if value is not None:
            rules[name](limits, name, value)


def unknown(name: str, rules: Mapping[str, Rule], inside: str = "") -> RefusedPrompt:
    return RefusedPrompt(
        f"{inside}{short(name)[1:-1]}: unknown field; accepted: {', '.join(sorted(rules))}", name
    )
