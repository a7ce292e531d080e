"""Error classes. The command line prints an error as one line, and ends with its exit code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_BREAK = re.compile("[ \\t]*[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\\s*")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that change the direction of text, and surrogates."""


class RlsysError(Exception):
    """Base class of the errors of rlsys.

    `str` returns one line: line breaks in the message become spaces, and control characters are escaped.
    """

    exit_code = 1
    origin = ""
    """The role of a run that reported the error, and its log; empty: this process."""

    def __str__(self) -> str:
        line = _BREAK.sub(" ", super().__str__())
        return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], line)


class UserError(RlsysError):
    """The user can correct the error, for example a wrong value, a missing file or a port in use. Exit code 2."""

    exit_code = 2


class RowError(UserError):
    """A data row is not a valid prompt. The message has file and line; in a run, the row's samples are censored."""


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
    """The run cannot continue, for example because attestation failed. Exit code 1; no data is lost."""


@contextlib.contextmanager
def disk_errors(path: Path, kind: type[RlsysError] = RunError) -> Iterator[None]:
    """Convert an OSError within the context, such as a full disk, into an error of one line that starts with `path`.

    Args:
        kind: class of the error.
    """
    try:
        yield
    except OSError as e:
        raise kind(f"{path}: {e.strerror or type(e).__name__}") from None


def error_text(error: BaseException) -> str:
    """Return the message of an exception, or the name of its class if the message is empty."""
    return str(error) or type(error).__name__
