"""A plug-in is a plain function, which the config names (imports.py). It is tried before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlsys.config import explain_error
from rlsys.core.errors import RlsysError, UserError
from rlsys.core.imports import source_location

Params = TypeVar("Params", bound=BaseModel)


def call(field: str, function: Callable[..., Any], /, *args: Any, **params: Any) -> Any:
    """`function(*args, **params)`; parameters that it does not take are a UserError naming `field`."""
    try:
        inspect.signature(function).bind(*args, **params)
    except (TypeError, ValueError) as e:  # the latter: it has no signature to check
        raise UserError(f"{field}: {e}") from None
    return function(*args, **params)


def expect_function(field: str, maker: Callable[..., Any], made: Any, asked: str, expected: str) -> None:
    """Raises UserError when `made`, what `maker` returned when it was `asked`, is no function."""
    if callable(made):
        return
    if inspect.iscoroutine(made):
        made.close()  # else Python warns that nobody has awaited it
    told = f"{getattr(maker, '__name__', 'it')}({asked}) returned a {type(made).__name__}"
    raise UserError(f"{field}: {told}; expected {expected}")


@contextmanager
def tried(field: str) -> Iterator[None]:
    """A plug-in is tried before anything starts: whatever it raises becomes one line that names `field` (UserError),
    with the place in the source where it was raised."""
    try:
        yield
    except RlsysError:
        raise
    except Exception as e:  # anybody's code: all that it can raise is told in one line
        raise UserError(f"{field}: {type(e).__name__}: {' '.join(str(e).split())}{source_location(e)}") from e


def parse_params(field: str, model: type[Params], params: Mapping[str, Any]) -> Params:
    """Checked parameters of a built-in plug-in. Raises UserError: one line that starts with `field`."""
    try:
        return model.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{field}.{explain_error(e, model)}") from None
