"""One-line messages for errors in a config: the field, its value, the expected value."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlsys.core.errors import UserError


class ConfigError(UserError):
    """A user's mistake in the configuration: one clear line, exit code 2."""


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
"""Removed options, and the reasons."""
_DELETED_VALUES = {("weights.method", "tensor"): "auto"}
"""Removed values of options, and the values that replace them."""
_RENAMED = {
    ("EvalConfig", "every"): "interval",
    ("SyncReference", "every"): "interval",
    ("Aoi", "shown"): "failed_responses",
    ("AgentParams", "patience"): "idle_seconds",
    ("LatrParams", "behind"): "max_gap",
}
"""(section or plug-in, former name of a field) -> its name."""
_SYNONYMS = {
    "learning_rate": "lr",
    "num_generations": "group_size",
    "max_new_tokens": "max_response_tokens",
    "max_response_length": "max_response_tokens",
    "max_completion_length": "max_response_tokens",
    "train_batch_size": "groups_per_step",
}
"""Names of TRL, verl and Transformers -> ours."""
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
"""Kind of pydantic's errors -> expected value, with names of the error's context."""


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return the message for an unknown key, with the most similar known key."""
    *path, key = [str(x) for x in loc]
    section: Any = model
    for name in (n for n in path if n in section.model_fields):  # in a list, the index follows its field
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
    """Return the names of the sections that have this field."""
    sections = {name: field.annotation for name, field in model.model_fields.items()}
    return [
        name
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields
    ]


def _expected(error: ErrorDetails) -> str:
    """Describe the expected value: our text if there is one, else pydantic's."""
    if (expectation := _KINDS.get(error["type"])) is not None:
        bounds = {
            k: int(v) if isinstance(v, float) and v.is_integer() else v
            for k, v in error.get("ctx", {}).items()
        }
        return f"expected {expectation.format(**bounds)}"
    return error["msg"].removeprefix("Value error, ")


def explain_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line for the first entry of a validation error: field, value, expected value."""
    first = error.errors()[0]
    names = [str(x) for x in first["loc"]]
    loc = ".".join(n for n in names if not set("-[") & set(n))  # without the alternatives of a union
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
    if alternatives := [
        _expected(e) for e in later_errors if len(e["loc"]) > 1 and e["loc"][:-1] == first["loc"][:-1]
    ]:  # of a union: the expectation of each alternative
        message = " or ".join([message, *(text.removeprefix("expected ") for text in alternatives)])
    suffix = (
        f" (and {len(later_errors) - len(alternatives)} more)"
        if len(later_errors) > len(alternatives)
        else ""
    )
    return f"{loc} = {value}: {message}{suffix}"
