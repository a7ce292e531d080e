"""Messages that name what strangers wrote: one line, and nothing in it that a terminal obeys."""

from __future__ import annotations

import pickle

import pytest

from rlsys.core.errors import RowError, RunError, UserError, error_text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("rows.jsonl:2: its keys: a\nb", "rows.jsonl:2: its keys: a b"),
        ("two \r\n lines", "two lines"),
        ("a\u2028b\u2029c\x85d\x0be", "a b c d e"),
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"),
        ("nul \x00, bell \x07, delete \x7f", "nul \\x00, bell \\x07, delete \\x7f"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
        ("half \ud83d", "half \\ud83d"),
        ("tab\tand  blanks, é, 你, \U0001f600", "tab\tand  blanks, é, 你, \U0001f600"),
    ],
)
@pytest.mark.parametrize("kind", [UserError, RowError, RunError])
def test_an_error_is_one_line(kind: type[Exception], raw: str, shown: str) -> None:
    assert str(kind(raw)) == shown
    assert str(pickle.loads(pickle.dumps(kind(raw)))) == shown
    assert str(kind()) == ""


def test_an_exception_without_a_message_has_the_name_of_its_type() -> None:
    assert error_text(TimeoutError()) == "TimeoutError"
    assert error_text(ValueError("no digits")) == "no digits"
