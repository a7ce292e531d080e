"""Import of functions that a config names as `package.module:function` or `path/to/file.py:function`.

While a named module is imported, the working directory is the first entry of sys.path; afterwards it is the last.
Standard library only, because agents are imported in the Python of their own venv.
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
    """Return the command that runs a module with this Python."""
    # Without -P, a file in the working directory, such as queue.py, would shadow a module of Python or rlsys.
    return [sys.executable, "-P", "-m", module, *arguments]


def resolve(field: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a built-in function by its name, or import a function.

    Args:
        field: config field that contains the name, for messages.
        name: a key of `registry`, `package.module:function` or `path/to/file.py:function`.
        registry: built-in functions by name.

    Raises:
        UserError: the name is unknown, the import failed, or the attribute is not a function.
    """
    if name in registry:
        return registry[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        matches = difflib.get_close_matches(name, registry, n=1, cutoff=0.5)
        package, dot, last = name.rpartition(".")
        if name.endswith(".py"):
            hint = f"did you mean {name}:FUNCTION?"
        elif dot:  # slime and verl write paths this way
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
    """Import a module, and return an attribute of it; None if the module does not have the attribute.

    Args:
        field: config field that contains the path, for messages.
        path: `package.module:attribute` or `path/to/file.py:attribute`.

    Raises:
        UserError: the import failed.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = (
            _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
        )
        return getattr(module, attribute, None)
    except (ImportError, ValueError, TypeError) as e:  # ValueError, TypeError: an invalid name of a module
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {' '.join(str(e).split())}"
        ) from None
    except Exception as e:  # the user's module may raise exceptions of any class
        message = " ".join(str(e).split())
        location = "" if isinstance(e, SyntaxError) else source_location(e)  # a SyntaxError has its location
        raise UserError(
            f"{field} = {path!r}: cannot import {module_name}: {type(e).__name__}: {message}{location}"
        ) from e


def _import_module(name: str) -> ModuleType:
    """Import a module with the working directory as first entry of sys.path, like `python -m`.

    Afterwards the working directory is the last entry.
    """
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
        if directory not in sys.path:
            sys.path.append(directory)  # for imports within functions


def _import_file(path: Path) -> ModuleType:
    """Import the module in a file, once per file.

    The folder of the file is added to sys.path, so the module can import its neighbours. If `import STEM` finds the
    file, the module has this name, so that processes that its code starts can import it.

    Raises:
        ImportError: the file does not exist.
    """
    path = path.resolve()
    if not path.is_file():
        raise ImportError(
            f"no such file; paths are relative to the directory in which rlsys was started, {Path.cwd()}"
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = path.stem if _is_module_of(path.stem, path) else f"rlsys_plugin_file_{digest}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # true for each file with the suffix .py
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _is_module_of(name: str, path: Path) -> bool:
    """Return whether `import NAME` imports the file `path`, and not another module with this name."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return file is not None and Path(file).resolve() == path
    if not name.isidentifier():
        return False
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path


def source_location(error: BaseException) -> str:
    """Return the innermost frame of the user's code in an error's traceback as " (FILE:LINE)".

    The user's code is neither Python's, nor an installed package's, nor rlsys's. If no frame is the user's, the
    innermost of all frames is returned; if there is no traceback, an empty text.
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
