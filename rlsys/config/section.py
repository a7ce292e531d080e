"""Base of all config sections. Imports pydantic only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

Positive = Annotated[int, Field(gt=0, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _not_empty(value: Any) -> Any:
    """Refuse an empty text, which Python takes for the current folder."""
    if value == "":
        raise ValueError("expected a path, found an empty text")
    return value


def _possible(path: Path) -> Path:
    """Refuse paths that no file system accepts, which would raise at the first use."""
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


NAME_BYTES, PATH_BYTES = 255, 4095
"""Linux's limits."""
FilePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_possible)]


class Section(BaseModel):
    """Base of config sections: frozen, without unknown keys, with field descriptions from attribute docstrings.

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

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number: Python takes True for 1; in a config it is a mistake."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_leaves(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, found {str(value).lower()}")
        return value


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types of an annotation: `int | None` -> int, None."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)
