"""How a role process ends: one `rlsys: error:` line in its log, and an exit code that says who can mend it.

The line carries the exit code, because torchrun turns every failure of its ranks into 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from rlsys.errors import RlsysError

_LINE = re.compile(r"^rlsys: error: (?P<message>.*?)(?: \[exit (?P<code>\d+)\])?$")


def format_error(error: RlsysError) -> str:
    """`rlsys: error: MESSAGE [exit CODE]`, on one line."""
    return f"rlsys: error: {' '.join(str(error).split())} [exit {error.exit_code}]"


def parse_error(line: str) -> tuple[str, int | None] | None:
    """Message and exit code of such a line (None where it names none); None for any other line."""
    found = _LINE.match(line.strip())
    if found is None:
        return None
    code = found["code"]
    return found["message"], int(code) if code else None


def run_role(body: Callable[[], object]) -> None:
    """Run a role's main function. An RlsysError ends as that line and its code; a bug keeps its traceback."""
    try:
        body()
    except RlsysError as e:
        print(format_error(e), file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
