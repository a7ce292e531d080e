"""Text from outside, made valid where it comes in. Standard library only.

JSON can carry half of a character outside the basic plane: a lone UTF-16 surrogate, as is left of an emoji that was
cut in two. Python's json reads it; tokenizers, sqlite and every encoder of UTF-8 raise for it.
"""

from __future__ import annotations

import json
import re
import traceback
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_valid_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    return text.isascii() or _SURROGATE.search(text) is None


def valid_text(text: str) -> str:
    """The same, with U+FFFD in the place of each lone surrogate; the two halves of one character become it."""
    if is_valid_text(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def valid_json(value: Any) -> Any:
    """The same value, each text in it and each key made valid."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_json(key): valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    return value


def load_json(text: str | bytes) -> Any:
    """A JSON value with valid texts. Raises ValueError for what is no JSON, or is nested too deeply."""
    try:
        return valid_json(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def error_text(error: BaseException) -> str:
    """What `str` gives for it, or `<exception str() failed>` where its own `__str__` raises."""
    return str(traceback.TracebackException(type(error), error, None, limit=0))


def shortened(text: str, most: int) -> str:
    """At most `most` characters of it, with a mark where something was left out."""
    if len(text) <= most:
        return text
    mark = f" ... ({len(text)} characters)"
    return text[: max(0, most - len(mark))] + mark
