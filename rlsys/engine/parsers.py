"""The names of SGLang's parsers for tool calls and reasoning, as the installed SGLang has them."""

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
    """Raises UserError for a name in `engine` that SGLang does not know. Nothing is checked where no SGLang is, as on
    a login node."""
    for field in _LISTS:
        name = getattr(config.engine, field)
        known = parser_names(field)
        if name is None or not known or name in known:
            continue
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"engine.{field} = {name!r}: not one of SGLang's parsers; {hint}")


def parser_names(field: str) -> list[str]:
    """Empty without SGLang. Its lists are files without imports, made to be read like this: to import the package
    takes seconds and brings torch."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        return []
    file, attribute = _LISTS[field]
    spec = importlib.util.spec_from_file_location(f"_sglang_{field}s", Path(found.origin).parent / file)
    assert spec is not None and spec.loader is not None  # of every file that ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(getattr(module, attribute))
