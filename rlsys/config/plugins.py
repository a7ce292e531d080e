"""Checked calls of plug-ins, functions that the config names (rlsys/core/imports.py)."""

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
    """Return `function(*args, **params)`.

    Args:
        field: config field with `params`, for the message.

    Raises:
        UserError: the function does not accept these arguments.
    """
    try:
        inspect.signature(function).bind(*args, **params)
    except (TypeError, ValueError) as e:  # ValueError: the function has no signature
        raise UserError(f"{field}: {e}") from None
    return function(*args, **params)


def expect_function(
    field: str, maker: Callable[..., Any], result: Any, arguments: str, expected: str
) -> None:
    """Check that a plug-in factory returned a function.

    Args:
        field: config field that names the factory, for the message.
        maker: the factory.
        result: return value of the factory.
        arguments: arguments of the factory as text, for the message.
        expected: description of the expected return value, for the message.

    Raises:
        UserError: `result` is not callable.
    """
    if callable(result):
        return
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns about a coroutine that was never awaited
    call_text = f"{getattr(maker, '__name__', 'it')}({arguments}) returned a {type(result).__name__}"
    raise UserError(f"{field}: {call_text}; expected {expected}")


@contextmanager
def one_line_errors(field: str, kind: type[RlsysError] = UserError) -> Iterator[None]:
    """Convert an exception of a plug-in within the context to an error of one line, with its location in the source.

    Errors of rlsys are not converted.

    Args:
        field: config field that names the plug-in; the message starts with it.
        kind: class of the error.
    """
    try:
        yield
    except RlsysError:
        raise
    except Exception as e:  # user code may raise exceptions of any class
        raise kind(f"{field}: {type(e).__name__}: {' '.join(str(e).split())}{source_location(e)}") from e


def parse_params(field: str, model: type[Params], params: Mapping[str, Any]) -> Params:
    """Validate the parameters of a built-in plug-in.

    Args:
        field: config field with the parameters, for the message.
        model: class of the parsed parameters.
        params: the parameters in the config.

    Raises:
        UserError: a parameter is invalid or unknown.
    """
    try:
        return model.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{field}.{explain_error(e, model)}") from None
