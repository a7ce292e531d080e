"""A plug-in is a plain function, named in the config by a short name or by its import path."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlsys.config import explain_error
from rlsys.errors import RlsysError, UserError

Params = TypeVar("Params", bound=BaseModel)


def resolve(field: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """`name` from `known`, or the function at `package.module:function`. Raises UserError naming `field`."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        raise UserError(
            f"{field} = {name!r}: unknown name; {hint} (or an import path package.module:function)"
        )
    found = imported(field, name)
    if not callable(found):
        raise UserError(f"{field} = {name!r}: {module_name} has no function {attribute!r}")
    return found


def imported(field: str, path: str) -> Any:
    """The attribute at `package.module:attribute`, None where there is none. Raises UserError naming `field`."""
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except (ImportError, ValueError, TypeError) as e:  # the latter two: no name of a module
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {' '.join(str(e).split())}"
        ) from None
    except Exception as e:  # anybody's module: all that it can raise is told in one line
        told = " ".join(str(e).split())
        raise UserError(f"{field} = {path!r}: cannot import {module_name}: {type(e).__name__}: {told}") from e


def call(field: str, function: Callable[..., Any], /, *args: Any, **params: Any) -> Any:
    """`function(*args, **params)`; parameters that it does not take are a UserError naming `field`."""
    try:
        inspect.signature(function).bind(*args, **params)
    except (TypeError, ValueError) as e:  # the latter: it has no signature to check
        raise UserError(f"{field}: {e}") from None
    return function(*args, **params)


@contextmanager
def tried(field: str) -> Iterator[None]:
    """A plug-in is tried before anything starts: whatever it raises becomes one line that names `field` (UserError),
    with the place in the source where it was raised."""
    try:
        yield
    except RlsysError:
        raise
    except Exception as e:  # anybody's code: all that it can raise is told in one line
        at = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        raise UserError(f"{field}: {type(e).__name__}: {' '.join(str(e).split())} ({where})") from e


def parse_params(field: str, model: type[Params], params: Mapping[str, Any]) -> Params:
    """Checked parameters of a built-in plug-in. Raises UserError: one line that starts with `field`."""
    try:
        return model.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{field}.{explain_error(e, model)}") from None
