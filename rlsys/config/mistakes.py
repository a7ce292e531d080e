"""A mistake in a config, told in one line: which field, what stands there, what was expected."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rlsys.errors import UserError


class ConfigError(UserError):
    """A user's mistake in the configuration: one clear line, exit code 2."""


_EXPECTED = {"Spec": "expected a name, or {name: NAME, parameter: value, ...}"}


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Message for a key that no section has, with the nearest known one."""
    *path, key = [str(x) for x in loc]
    at: Any = model
    for name in (n for n in path if n in at.model_fields):  # of a list, the place follows its field
        annotation = at.model_fields[name].annotation
        choices = (a for a in (annotation, *get_args(annotation)) if isinstance(a, type))
        at = next((a for a in choices if issubclass(a, BaseModel)), at)
    names = list(at.model_fields)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    dotted = ".".join([*path, key])
    hint = f"did you mean {'.'.join([*path, near[0]])}?" if near else f"known keys: {', '.join(names)}"
    return f"{dotted}: unknown key; {hint}"


def explain_error(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for the first mistake of a validation error: field, value, what was expected."""
    first = error.errors()[0]
    names = [str(x) for x in first["loc"]]
    loc = ".".join(n for n in names if not set("-[") & set(n))  # without the alternatives of a union
    if first["type"] == "extra_forbidden":
        return _unknown_key(first["loc"], model)
    if first["type"] == "missing":
        return f"{loc}: missing; it has no default"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{loc}: {message}" if loc else message
    value = repr(first["input"])[:200]
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{loc} = {value}: {_EXPECTED.get(first['ctx']['class_name'], 'expected a section, field: value')}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        known = re.findall("'([^']*)'", first["ctx"]["expected"])
        if near := difflib.get_close_matches(first["input"], known, n=1, cutoff=0.5):
            return f"{loc} = {value}: did you mean {near[0]}? (known: {', '.join(known)})"
    others = error.errors()[1:]
    if alternatives := [e["msg"] for e in others if len(e["loc"]) > 1 and e["loc"][:-1] == first["loc"][:-1]]:
        message = ", or: ".join([message, *alternatives])  # of a union: what each would have taken
    more = f" (and {len(others) - len(alternatives)} more)" if len(others) > len(alternatives) else ""
    return f"{loc} = {value}: {message}{more}"
