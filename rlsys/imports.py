"""What a config names as a function is imported: `package.module:function` (the working folder counts), or
`path/to/file.py:function`.

Needs the standard library only: agents are imported in the Python of their own venv.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsys.errors import UserError


def resolve(field: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """`name` from `known`, or the function at `package.module:function`. Raises UserError naming `field`."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        package, dot, last = name.rpartition(".")
        if name.endswith(".py"):
            hint = f"did you mean {name}:FUNCTION?"
        elif dot:  # as slime and verl write it
            hint = f"did you mean {package}:{last}?"
        else:
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        raise UserError(
            f"{field} = {name!r}: unknown name; {hint} (or package.module:function, or path/to/file.py:function)"
        )
    found = imported(field, name)
    if not callable(found):
        raise UserError(f"{field} = {name!r}: {module_name} has no function {attribute!r}")
    return found


def imported(field: str, path: str) -> Any:
    """The attribute at `package.module:attribute` or `file.py:attribute`, None where there is none. Raises UserError
    naming `field`."""
    module_name, _, attribute = path.partition(":")
    try:
        module = _of_file(Path(module_name)) if module_name.endswith(".py") else _of_path(module_name)
        return getattr(module, attribute, None)
    except (ImportError, ValueError, TypeError) as e:  # the latter two: no name of a module
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {' '.join(str(e).split())}"
        ) from None
    except Exception as e:  # anybody's module: all that it can raise is told in one line
        told = " ".join(str(e).split())
        at = "" if isinstance(e, SyntaxError) else place(e)  # it names file and line itself
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {type(e).__name__}: {told}{at}"
        ) from e


def _of_path(name: str) -> ModuleType:
    """As `python -m` does it, the working folder comes first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _of_file(path: Path) -> ModuleType:
    """The module in a file; the same one for the same file. Raises ImportError when there is none."""
    path = path.resolve()
    if not path.is_file():
        raise ImportError(
            f"no such file; a path is seen from the folder where rlsys starts, here {Path.cwd()}"
        )
    name = f"rlsys_plugin_file:{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # of every file that ends in .py
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # what lies beside it can be imported, as beside a script
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def place(error: BaseException) -> str:
    """` (FILE:LINE)` of the user's own code that raised it: the innermost frame that is neither Python's, nor an
    installed package's, nor ours. Where there is none, the innermost of all; empty without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    own = [f for f in frames if not f.filename.startswith((*_INSTALLED, "<"))]
    at = own[-1] if own else frames[-1]
    path = Path(at.filename)
    with contextlib.suppress(ValueError, OSError):  # the latter: the working folder is gone
        path = path.relative_to(Path.cwd())
    return f" ({path if own else path.name}:{at.lineno})"


_OURS = Path(__file__).parent
_INSTALLED = tuple(
    f"{folder}/"
    for folder in (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix)
)
