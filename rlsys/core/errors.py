"""Error classes, by who can correct the error. The command line prints each as one line, with an exit code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_BREAK = re.compile("[ \\t]*[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\\s*")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of terminals, characters that change the direction of text, and surrogates."""


class RlsysError(Exception):
    """Base class of all errors that rlsys raises on purpose.

    The text is one line: line breaks in names from outside become blanks, and control characters are escaped.
    """

    exit_code = 1
    origin = ""
    """The role of a run that reported the error, and its log."""

    def __str__(self) -> str:
        line = _BREAK.sub(" ", super().__str__())
        return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], line)


class UserError(RlsysError):
    """An error that the user can correct: a wrong value, a missing file, a port in use. Exit code 2."""

    exit_code = 2


class RowError(UserError):
    """A data row that is not a valid prompt; the message names file and line. In a run its samples are censored."""


class TooFewPrompts(UserError):
    """A prompt source holds out fewer different prompts than requested.

    Attributes:
        count: number of held-out prompts in the source; an upper bound for a mixture.
    """

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message, count)
        self.count = count

    def __str__(self) -> str:
        return str(UserError(self.args[0]))


class GeneratorError(UserError):
    """A user's generator would train on tokens that no engine generated. In a run the sample is censored."""


class RunError(RlsysError):
    """The run cannot continue: an engine died twice, or attestation failed. Exit code 1; no data is lost."""


@contextlib.contextmanager
def disk_errors(path: Path, kind: type[RlsysError] = RunError) -> Iterator[None]:
    """Convert OSError (disk full, read-only, no file descriptor left) into one line of `kind` that names `path`."""
    try:
        yield
    except OSError as e:
        raise kind(f"{path}: {e.strerror or type(e).__name__}") from None


def error_text(error: BaseException) -> str:
    """Return the message of an exception, or the name of its type where it has none, as `TimeoutError`."""
    return str(error) or type(error).__name__
