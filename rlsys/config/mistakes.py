"""Messages for errors in a config, one line each: the field, its value and the expected value."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlsys.core.errors import UserError


class ConfigError(UserError):
    """A config is invalid. The message is one line; exit code 2."""


_EXPECTED = {"Spec": "expected a name, or {name: NAME, parameter: value, ...}"}
_NUMBER, _INTEGER, _SWITCH = "a number", "a whole number", "true or false"
_DELETED = {
    "weights.uncompared": "it follows from model.fp8 and engine.extra_args, which choose the kernels that rearrange "
    "weights",
    "weights.canary_p999": "it follows from weights.canary_mean, in proportion",
    "rollout.auto_hold": "over_provision = auto always steers the share of off-policy tokens to rollout.auto_share",
    "trainer.equal_lengths": "micro-batches have equal lengths with parallel.dispatcher = allgather",
    "launch.silence_seconds": "it is 1.5 times rollout.stall_timeout",
}
"""Deleted field -> the reason."""
_DELETED_VALUES = {("weights.method", "tensor"): "auto"}
"""(field, deleted value) -> the value that replaces it."""
_RENAMED = {
    ("EvalConfig", "every"): "interval",
    ("SyncReference", "every"): "interval",
    ("Aoi", "shown"): "failed_responses",
    ("AgentParams", "patience"): "idle_seconds",
    ("LatrParams", "behind"): "max_gap",
}
"""(class of the section or parameters, former name of a field) -> its present name."""
_SYNONYMS = {
    "learning_rate": "lr",
    "num_generations": "group_size",
    "max_new_tokens": "max_response_tokens",
    "max_response_length": "max_response_tokens",
    "max_completion_length": "max_response_tokens",
    "train_batch_size": "groups_per_step",
}
"""Name of a field in TRL, verl or Transformers -> its name in rlsys."""
_KINDS = {
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "int_type": _INTEGER,
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "int_from_float": _INTEGER,
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "string_type": "a text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values, {{key: value, ...}}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_long": "at most {max_length} of them",
    "too_short": "at least {min_length} of them",
}
"""Type of pydantic's error -> the expected value; names in braces are keys of the error's context."""


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return the message for an unknown key: its new name, the reason of its deletion, or a similar key.

    Args:
        loc: path of the key.
        model: class of the config or parameters that the path starts from.
    """
    *path, key = [str(x) for x in loc]
    section: Any = model
    for name in (n for n in path if n in section.model_fields):  # the path also has indices of lists
        annotation = section.model_fields[name].annotation
        choices = (a for a in (annotation, *get_args(annotation)) if isinstance(a, type))
        section = next((a for a in choices if issubclass(a, BaseModel)), section)
    names = list(section.model_fields)
    similar_names = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    dotted = ".".join([*path, key])
    if (reason := _DELETED.get(dotted)) is not None:
        return f"{dotted}: deleted; {reason}"
    if (new_key := _RENAMED.get((section.__name__, key))) is not None:
        return f"{dotted}: renamed; use {'.'.join([*path, new_key])}"
    for name in (key, _SYNONYMS.get(key, key)):
        if sections := _sections_with(name, model):
            return f"{dotted}: unknown key; did you mean {' or '.join(f'{s}.{name}' for s in sections)}?"
    hint = (
        f"did you mean {'.'.join([*path, similar_names[0]])}?"
        if similar_names
        else f"known keys: {', '.join(names)}"
    )
    return f"{dotted}: unknown key; {hint}"


def _sections_with(key: str, model: type[BaseModel]) -> list[str]:
    """Return the names of the sections of `model` that have the field `key`."""
    sections = {name: field.annotation for name, field in model.model_fields.items()}
    return [
        name
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields
    ]


def _expected(error: ErrorDetails) -> str:
    """Return the expected value for the message: the text of _KINDS, or else pydantic's."""
    if (expectation := _KINDS.get(error["type"])) is not None:
        bounds = {
            k: int(v) if isinstance(v, float) and v.is_integer() else v
            for k, v in error.get("ctx", {}).items()
        }
        return f"expected {expectation.format(**bounds)}"
    return error["msg"].removeprefix("Value error, ")


def explain_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the message for the first entry of a validation error, and the number of further ones.

    Args:
        model: class of the validated object.
    """
    first = error.errors()[0]
    names = [str(x) for x in first["loc"]]
    loc = ".".join(
        n for n in names if not set("-[") & set(n)
    )  # without pydantic's names of union alternatives
    if first["type"] == "extra_forbidden":
        return _unknown_key(first["loc"], model)
    if first["type"] == "missing":
        return f"{loc}: missing; it has no default"
    message = _expected(first)
    if first["type"] == "value_error":
        return f"{loc}: {message}" if loc else message
    value = repr(first["input"])[:200]
    if first["input"] in ("None", "none", "nil"):
        message += "; an unset field is null in YAML"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{loc} = {value}: {_EXPECTED.get(first['ctx']['class_name'], 'expected a section, field: value')}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        if replacement := _DELETED_VALUES.get((loc, first["input"])):
            return f"{loc} = {value}: deleted; use {replacement}"
        choices = re.findall("'([^']*)'", first["ctx"]["expected"])
        if similar_choices := difflib.get_close_matches(first["input"], choices, n=1, cutoff=0.5):
            return f"{loc} = {value}: did you mean {similar_choices[0]}? (known: {', '.join(choices)})"
    later_errors = error.errors()[1:]
    # For a union, pydantic reports an error of each alternative.
    alternatives = [
        _expected(e) for e in later_errors if len(e["loc"]) > 1 and e["loc"][:-1] == first["loc"][:-1]
    ]
    message = " or ".join([message, *(text.removeprefix("expected ") for text in alternatives)])
    n_more = len(later_errors) - len(alternatives)
    suffix = f" (and {n_more} more)" if n_more else ""
    return f"{loc} = {value}: {message}{suffix}"
