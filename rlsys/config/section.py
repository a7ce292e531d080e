"""Base class of all config sections, and types of their fields. Imports pydantic only."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Positive = Annotated[int, Field(gt=0, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]
"""Duration in seconds, at most a year, because timers of the operating system do not accept infinity."""
Megabytes = Annotated[float, Field(gt=0, le=2**20)]
"""Size in MiB, at most 1 TiB."""
Gigabytes = Annotated[float, Field(gt=0, le=2**16)]
"""Size in GiB, at most 64 TiB."""


def _check_not_empty(value: Any) -> Any:
    """Return `value`, and raise ValueError for an empty text, which Path would interpret as the current folder."""
    if value == "":
        raise ValueError("expected a path, found an empty text")
    return value


def _check_path(path: Path) -> Path:
    """Return `path`, and raise ValueError if no file system accepts it."""
    try:
        sizes = [len(os.fsencode(part)) for part in path.parts]
    except UnicodeEncodeError:
        raise ValueError(f"expected a path, found {str(path)!r:.80}, which is not text") from None
    if "\0" in str(path):
        raise ValueError(f"expected a path, found {str(path)!r:.80} with a NUL character in it")
    if max(sizes, default=0) > NAME_BYTES or sum(sizes) + len(sizes) > PATH_BYTES:
        raise ValueError(
            f"expected names of at most {NAME_BYTES} bytes, {PATH_BYTES} in all, found {str(path)!r:.80}..."
        )
    return path


def expand_path(value: Any) -> Any:
    """Replace `~` and `$VARIABLE` in a path, like a shell. Values of other types are returned unchanged.

    Raises:
        ValueError: a variable is not set, or a user does not exist.
    """
    if not isinstance(value, str | Path):
        return value
    text = os.path.expanduser(str(value))
    if text.startswith("~"):
        raise ValueError(f"expected a path, found {text!r:.80}: this user does not exist")
    missing = [name for name in _VARIABLE.findall(text) if name.strip("{}") not in os.environ]
    if missing:
        raise ValueError(
            f"expected a path, found {text!r:.80}; the variable {missing[0].strip('{}')} is not set"
        )
    return os.path.expandvars(text)


def _check_finite(value: Any, name: str) -> None:
    """Raise ValueError if a number in `value`, at any depth, is infinite or NaN.

    Args:
        name: path of `value`, for the message.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value}: expected a finite number")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_finite(inner, f"{name}.{index}")


NAME_BYTES, PATH_BYTES = 255, 4095
"""Linux's limits of a file name and of a path."""
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})", re.ASCII)
FilePath = Annotated[
    Path, BeforeValidator(expand_path), BeforeValidator(_check_not_empty), AfterValidator(_check_path)
]


class Section(BaseModel):
    """Base class of config sections. A section is immutable, and unknown keys are errors.

    Each field has a type, bounds if there are any, and an attribute docstring of one to three sentences: the effect
    of the field, when to change it, and its cost. A derived value is a property, not a field.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    deleted: ClassVar[Mapping[str, object]] = {}
    """Deleted field -> its former default, which the config.yaml of an older run contains."""

    @model_validator(mode="before")
    @classmethod
    def _without_deleted(cls, values: Any) -> Any:
        """Remove deleted fields that have their former default."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in cls.deleted or v != cls.deleted[k]}

    @field_validator("*", mode="before")
    @classmethod
    def _check_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a boolean for a field that expects a number; pydantic would convert True to 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_leaves(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, found {str(value).lower()}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _check_parameters(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject numbers that are not finite in fields of type Any (parameters); JSON would convert them to null."""
        if info.field_name is not None and Any in set(_leaves(cls.model_fields[info.field_name].annotation)):
            _check_finite(value, "")
        return value


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation consists of: int and None for `int | None`."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)
