"""Sanitising of text from outside. Standard library only.

JSON can contain a lone UTF-16 surrogate, for example half of an emoji that was cut in two. Python's json accepts it,
but tokenizers, sqlite and each UTF-8 encoder raise an error.
"""

from __future__ import annotations

import json
import re
import traceback
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_valid_text(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8."""
    return text.isascii() or _SURROGATE.search(text) is None


def valid_text(text: str) -> str:
    """Return the text with surrogate pairs joined, and U+FFFD for each lone surrogate."""
    return text if is_valid_text(text) else _join_surrogates(text, "replace")


def joined_text(text: str) -> str:
    """Return the text with surrogate pairs joined.

    Raises:
        ValueError: the text has a lone surrogate.
    """
    try:
        return text if is_valid_text(text) else _join_surrogates(text, "strict")
    except UnicodeDecodeError:
        raise ValueError(
            f"the text contains a lone UTF-16 surrogate: {text!a:.80}; expected valid Unicode"
        ) from None


def _join_surrogates(text: str, errors: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", errors)


def valid_json(value: Any) -> Any:
    """Return a copy of a JSON value in which each text and each key is `valid_text` of the original."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_json(key): valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    return value


def load_json(text: str | bytes) -> Any:
    """Parse JSON, and return its `valid_json`.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return valid_json(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or `<exception str() failed>` if that raises."""
    return str(traceback.TracebackException(type(error), error, None, limit=0))


def shorten(text: str, limit: int) -> str:
    """Return the text, truncated to `limit` characters; a truncated text ends with its original length."""
    if len(text) <= limit:
        return text
    suffix = f" ... ({len(text)} characters)"
    return text[: max(0, limit - len(suffix))] + suffix
