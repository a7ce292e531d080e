"""What can go wrong, by who can mend it. The command line turns each into one line and an exit code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_BREAK = re.compile("[ \\t]*[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\\s*")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, what turns the direction of text, and halves of characters."""


class RlsysError(Exception):
    """Base of every error we raise on purpose. Its text is one line, whatever names of strangers are in it: line
    breaks become blanks, and controls are written as escapes."""

    exit_code = 1

    def __str__(self) -> str:
        line = _BREAK.sub(" ", super().__str__())
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], line)


class UserError(RlsysError):
    """The user can mend it: a wrong value, a missing file, a port in use. Exit code 2."""

    exit_code = 2


class RowError(UserError):
    """A row of the data that is no prompt; the message names its file and line. In a run its samples are censored."""


class GeneratorError(UserError):
    """What a generator of the user's does would train other tokens than engines made. In a run the sample is
    censored."""


class RunError(RlsysError):
    """The run cannot go on: an engine died twice, a push failed attestation. Exit code 1, nothing lost."""


@contextlib.contextmanager
def disk_errors(path: Path, kind: type[RlsysError] = RunError) -> Iterator[None]:
    """What a disk refuses (full, gone, read-only, no descriptor left) becomes one line that names `path`."""
    try:
        yield
    except OSError as e:
        raise kind(f"{path}: {e.strerror or type(e).__name__}") from None
