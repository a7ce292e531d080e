"""Import of functions that a config names: `package.module:function` or `path/to/file.py:function`.

The working directory is on the import path, behind everything else, and first while a module that the config names
is imported. Standard library only: agents are imported in the Python of their own venv.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsys.core.errors import UserError


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this Python.

    With `-P`, a user's file in the working directory (`launch.py`, `queue.py`) shadows no module of rlsys or Python.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def resolve(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return `name` from the registry, or the function at an import path.

    Args:
        field: config field that contains the name, for error messages.
        name: a key of `registry`, `package.module:function` or `path/to/file.py:function`.
        registry: built-in functions by name.

    Raises:
        UserError: the name is unknown, the import failed, or the attribute is no function.
    """
    if name in registry:
        return registry[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        matches = difflib.get_close_matches(name, registry, n=1, cutoff=0.5)
        package, dot, last = name.rpartition(".")
        if name.endswith(".py"):
            hint = f"did you mean {name}:FUNCTION?"
        elif dot:  # as slime and verl write it
            hint = f"did you mean {package}:{last}?"
        else:
            hint = f"did you mean {matches[0]}?" if matches else f"known: {', '.join(sorted(registry))}"
        raise UserError(
            f"{field} = {name!r}: unknown name; {hint} (or package.module:function, or path/to/file.py:function)"
        )
    function = import_attribute(field, name)
    if not callable(function):
        raise UserError(f"{field} = {name!r}: {module_name} has no function {attribute!r}")
    return function


def import_attribute(field: str, path: str) -> Any:
    """Return the attribute at `package.module:attribute` or `file.py:attribute`; None if it does not exist.

    Raises:
        UserError: the import failed; the message starts with `field`.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = (
            _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
        )
        return getattr(module, attribute, None)
    except (ImportError, ValueError, TypeError) as e:  # the latter two: the name cannot be a module's
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {' '.join(str(e).split())}"
        ) from None
    except Exception as e:  # a user's module: any exception becomes one line
        message = " ".join(str(e).split())
        location = (
            "" if isinstance(e, SyntaxError) else source_location(e)
        )  # a SyntaxError names file and line itself
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {type(e).__name__}: {message}{location}"
        ) from e


def _import_module(name: str) -> ModuleType:
    """Import a module with the working directory first on sys.path, as `python -m` does; afterwards it is last."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
        if directory not in sys.path:
            sys.path.append(directory)  # for imports within functions


def _import_file(path: Path) -> ModuleType:
    """Import the module in a file, once per file. Processes that its code starts can import it by its name.

    Raises:
        ImportError: the file does not exist.
    """
    path = path.resolve()
    if not path.is_file():
        raise ImportError(
            f"no such file; paths are relative to the directory in which rlsys was started, {Path.cwd()}"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # modules beside the file can be imported, as beside a script
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = path.stem if _is_module_of(path.stem, path) else f"rlsys_plugin_file_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # true for every file that ends in .py
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _is_module_of(name: str, path: Path) -> bool:
    """Return whether `import name` imports the file, and not another module of the same name."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return file is not None and Path(file).resolve() == path
    if not name.isidentifier():
        return False
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path


def source_location(error: BaseException) -> str:
    """Return ` (FILE:LINE)` of the user's code that raised the error.

    That is the innermost frame that belongs neither to Python, nor to an installed package, nor to rlsys;
    without such a frame the innermost of all. Empty without a traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    user_frames = [f for f in frames if not f.filename.startswith((*_INSTALLED, "<"))]
    frame = user_frames[-1] if user_frames else frames[-1]
    path = Path(frame.filename)
    with contextlib.suppress(ValueError, OSError):  # OSError: the working directory was deleted
        path = path.relative_to(Path.cwd())
    return f" ({path if user_frames else path.name}:{frame.lineno})"


_PACKAGE = Path(__file__).parents[1]
_INSTALLED = tuple(
    f"{folder}/"
    for folder in (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix)
)
