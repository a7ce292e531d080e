"""What every section of a config is made of. Imports pydantic only."""

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
    """Python takes an empty text for the current folder."""
    if value == "":
        raise ValueError("expected a path, found an empty text")
    return value


def _possible(path: Path) -> Path:
    """What no file system takes raises at its first use, and not as a file that is missing does."""
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
    """Frozen, knows all its keys, and takes each field's sentences from the docstring below it.

    Every field has a type, a bound where one exists, and one to three sentences: what it does, when to change it,
    what it costs. What can be derived is a property, not a field.
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
        """Python takes True for 1; in a config it is a slip."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(_leaves(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, found {str(value).lower()}")
        return value


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of: `int | None` -> int, None."""
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)
