"""Kinds of values of a request's fields. Each check raises RefusedPrompt, which names field, value and expectation.

A field without a value (null) is as good as absent: SGLang has a default for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.engine_requests.limits import Limits, RefusedPrompt

Rule = Callable[[Limits, str, Any], None]
"""Of a value that is not null: limits, the field's name, the value."""

LONGEST_NAME = 1024
"""Characters of a text that names something: a key of a cache, an adapter, a session."""
DEEPEST = 64
"""Lists and objects inside one another; Python's own JSON reader gives up at 1,000, in the engine's event loop."""
MOST_IDS = 1024
"""Token ids in one field beside the prompt: each becomes a column of a tensor, or an element of a set."""


def short(value: Any) -> str:
    """For a message; a client's value may be megabytes long."""
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


def number(low: float, high: float, *, whole: bool = False, above_low: bool = False) -> Rule:
    """`[low, high]`, or `(low, high]` with `above_low`."""
    bracket = "(" if above_low else "["

    def check(limits: Limits, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not finite(value):
            raise refuse(name, value, "a finite number")
        if not low <= value <= high or (above_low and value == low):
            raise refuse(name, value, f"a value in {bracket}{low:.16g}, {high:.16g}]")
        if whole and type(value) is not int:
            raise refuse(name, value, "a whole number")

    return check


def flag(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")


def text(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise refuse(name, value, "text")
    if len(value) > LONGEST_NAME:
        raise RefusedPrompt(
            f"{name}: a text of {len(value)} characters, expected at most {LONGEST_NAME}", name
        )


def texts(most: int, longest: int) -> Rule:
    """One text, or a list of at most `most`, none of them empty: an empty text ends a response at its first token."""

    def check(limits: Limits, name: str, value: Any) -> None:
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in found):
            raise refuse(name, value, "text, or a list of texts")
        if len(found) > most:
            raise RefusedPrompt(f"{name}: {len(found)} texts, expected at most {most}", name)
        if (length := max(map(len, found), default=0)) > longest:
            raise RefusedPrompt(f"{name}: a text of {length} characters, expected at most {longest}", name)
        if "" in found:
            raise RefusedPrompt(
                f"{name} = {short(value)}: an empty text, expected at least one character", name
            )

    return check


def token_ids(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise refuse(name, value, "whole numbers")
    if len(value) > MOST_IDS:
        raise RefusedPrompt(f"{name}: {len(value)} token ids, expected at most {MOST_IDS}", name)
    limits.check_ids(value)


def most_probable(limits: Limits, name: str, value: Any) -> None:
    """How many alternatives of each token; an engine takes the top of its vocabulary without a check."""
    if isinstance(value, bool) or type(value) is not int:
        raise refuse(name, value, "a whole number")
    if not 0 <= value <= limits.vocab_size:
        raise RefusedPrompt(f"{name} = {value}: expected 0 to {limits.vocab_size}, the vocabulary", name)


def not_served(reason: str, *neutral: Any) -> Rule:
    """A known field; only values that ask for nothing are taken."""

    def check(limits: Limits, name: str, value: Any) -> None:
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise RefusedPrompt(f"{name} = {short(value)}: not served: {reason}", name)

    return check


def any_of(*rules: Rule) -> Rule:
    """The first rule's refusal where none agrees."""

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
    """An object or a list that the engine reads itself, no deeper than DEEPEST."""

    def check(limits: Limits, name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise refuse(name, value, expected)
        check_depth(name, value)

    return check


def inert(limits: Limits, name: str, value: Any) -> None:
    """Asks for nothing in sampling; engines do not get it."""


def check_depth(name: str, value: Any) -> None:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise RefusedPrompt(f"{name}: lists and objects in more than {DEEPEST} levels", name)
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def check_fields(
    limits: Limits, body: Mapping[str, Any], known: Mapping[str, Rule], inside: str = ""
) -> None:
    """Each field by its rule. Raises RefusedPrompt for a field that is not known, too. `inside`: the field that holds
    these."""
    for name, value in body.items():
        if name not in known:
            raise unknown(name, known, inside)
        if value is not None:
            known[name](limits, name, value)


def unknown(name: str, known: Mapping[str, Rule], inside: str = "") -> RefusedPrompt:
    return RefusedPrompt(
        f"{inside}{short(name)[1:-1]}: unknown field; accepted: {', '.join(sorted(known))}", name
    )
