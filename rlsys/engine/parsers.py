"""Names of the parsers for tool calls and reasoning in the installed SGLang."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from rlsys.config import Config
from rlsys.core.errors import UserError

_LISTS = {
    "tool_call_parser": ("srt/function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
    "reasoning_parser": ("srt/parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
}


def check_parsers(config: Config) -> None:
    """Check that the installed SGLang has the parsers of `config.engine`.

    On a host without SGLang, such as a login node, nothing is checked.

    Raises:
        UserError: SGLang does not have a parser.
    """
    for field in _LISTS:
        name = getattr(config.engine, field)
        names = parser_names(field)
        if name is None or not names or name in names:
            continue
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
        raise UserError(f"engine.{field} = {name!r}: not one of SGLang's parsers; {hint}")


def parser_names(field: str) -> list[str]:
    """Return the names of SGLang's parsers for a config field; empty without SGLang.

    Import only the file with the names, because the package takes seconds and imports torch.

    Args:
        field: `tool_call_parser` or `reasoning_parser`.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return []
    file, attribute = _LISTS[field]
    spec = importlib.util.spec_from_file_location(f"_sglang_{field}s", Path(package.origin).parent / file)
    assert spec is not None and spec.loader is not None  # both exist for every .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(getattr(module, attribute))
