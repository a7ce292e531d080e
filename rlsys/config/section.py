"""Base of all config sections. Imports pydantic only."""

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
"""Duration of at most a year: a timer of the operating system takes no infinite one."""
Megabytes = Annotated[float, Field(gt=0, le=2**20)]
Gigabytes = Annotated[float, Field(gt=0, le=2**16)]
"""Sizes in MiB and GiB, of at most 1 and 64 TiB."""


def _not_empty(value: Any) -> Any:
    """Reject an empty text, which Python would interpret as the current folder."""
    if value == "":
        raise ValueError("expected a path, found an empty text")
    return value


def _possible(path: Path) -> Path:
    """Reject a path that no file system accepts, which would raise at its first use."""
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
    """Replace `~` and `$VARIABLE` in a path, as a shell does.

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


def _finite(value: Any, name: str) -> None:
    """Raise a ValueError for a number within `value` that is infinite or not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value}: expected a finite number")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _finite(inner, f"{name}.{index}")


NAME_BYTES, PATH_BYTES = 255, 4095
"""Linux's limits of a file name and of a path."""
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})", re.ASCII)
FilePath = Annotated[
    Path, BeforeValidator(expand_path), BeforeValidator(_not_empty), AfterValidator(_possible)
]


class Section(BaseModel):
    """Base of config sections: frozen, rejects unknown keys, takes field descriptions from attribute docstrings.

    Every field has a type, a bound if one exists, and one to three sentences: its effect, when to change it, its
    cost. A derived value is a property, not a field.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    deleted: ClassVar[Mapping[str, object]] = {}
    """Deleted fields and their former defaults, which config files of older runs contain."""

    @model_validator(mode="before")
    @classmethod
    def _without_deleted(cls, values: Any) -> Any:
        """Drop deleted fields that have their former default."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in cls.deleted or v != cls.deleted[k]}

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a boolean where a number is expected: pydantic would convert True to 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_leaves(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, found {str(value).lower()}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_infinite_parameter(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject infinite numbers in parameters of plug-ins, which have no types: JSON would turn them into null."""
        if info.field_name is not None and Any in set(_leaves(cls.model_fields[info.field_name].annotation)):
            _finite(value, "")
        return value


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types of an annotation: `int | None` -> int, None."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)
