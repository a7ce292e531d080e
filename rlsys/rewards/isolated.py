"""Main program inside a sandbox: `python -I -S isolated.py ROLE LIMITS FILE [DESCRIPTOR ...]`.

    run     runs the program, as `python program.py` does
    serve   runs the program, then calls its definitions for a process of the role `check`
    check   runs tests, which call the program in a process of the role `serve`; exits with 0 if they pass
    both    runs the program and then the tests in one process, where the program can deceive the tests

Tests and program exchange plain values as JSON over a socket. An object of another type stays in the program's
process, and the tests get a reference to the object (`Remote`), which equals no plain value. Operators of a reference
accept no plain operand, because the operand may be the expected value (`f(x) - 0.5`). The exception are objects that
the tests create with a class of the program, whose name starts with a capital letter. Therefore the program can
change a verdict only by the values that its functions return.

This file needs only the standard library.
"""

from __future__ import annotations

import ast
import builtins
import collections
import decimal
import fractions
import importlib
import json
import math
import os
import resource
import socket
import sys
import types
from typing import Any, BinaryIO, NamedTuple

EXIT_NOT_PLAIN = 77
"""Exit code if the tests pass the program an object that cannot be encoded, such as a function."""
MAX_LINE_BYTES = 2**24
"""Largest size of an answer of the program's process, in bytes."""
MAX_ITERATOR_ITEMS = 10**5
"""Number of items that are read from an iterator of the program."""
BUILT_IN_NAMES = {
    "isclose": math.isclose,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
}
"""Names of the standard library that tests may use without an import. The program cannot redefine them."""
_CONTAINERS: dict[str, Any] = {
    "l": list,
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": collections.deque,
    "n": iter,
}
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_SPECIAL_METHODS = (
    *_OPERATORS, "len", "getitem", "setitem", "delitem", "str", "repr", "bool", "int", "float", "index", "neg", "abs",
    "enter", "exit", "next", "call",
)  # fmt: skip


class Channel(NamedTuple):
    """Connection to the other process. Each request and each answer is a line of JSON."""

    lines: BinaryIO
    out: BinaryIO

    def send(self, message: Any) -> None:
        """Send a message as one line of JSON."""
        self.out.write(json.dumps(message).encode() + b"\n")
        self.out.flush()


_BUILTIN_CALLS: dict[str, Any] = {
    "__call__": lambda target, *args, **keywords: target(*args, **keywords),
    "__bool__": bool,
    "__iter__": iter,
}
"""Special methods that are called through a built-in function, because a type need not define them."""


def encode(value: Any, objects: list[Any]) -> Any:
    """Encode a value for JSON.

    Args:
        value: the value.
        objects: objects that are not plain. The value, or items in it, that are not plain are appended, and encoded
            as their indices in this list.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return {"i": hex(value)}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return {type(value).__name__: str(value)}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {"d": [[encode(k, objects), encode(v, objects)] for k, v in value.items()]}
    for tag, kind in _CONTAINERS.items():
        if kind is not iter and isinstance(value, kind):
            return {tag: [encode(item, objects) for item in value]}
    if hasattr(value, "__next__") and not isinstance(value, Remote):
        items = [item for item, _ in zip(value, range(MAX_ITERATOR_ITEMS), strict=False)]
        return {"n": [encode(item, objects) for item in items]}
    objects.append(value)
    return {"o": len(objects) - 1}


def decode(data: Any, object_at: Any) -> Any:
    """Decode a value of `encode`. `object_at`: function that returns the object with an index."""
    if not isinstance(data, dict):
        return data
    ((tag, value),) = data.items()
    if tag == "o":
        return object_at(value)
    if tag == "i":
        return int(value, 16)
    if tag == "b":
        return bytes.fromhex(value)
    if tag == "c":
        return complex(*value)
    if tag == "r":
        return range(*value)
    if tag == "d":
        return {decode(k, object_at): decode(v, object_at) for k, v in value}
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(item, object_at) for item in value])
    return {"Decimal": decimal.Decimal, "Fraction": fractions.Fraction}[tag](value)


def execute(program: str) -> dict[str, Any]:
    """Run a file as `python FILE` does, and return the namespace with its definitions."""
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    module = types.ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    return module.__dict__


# -- the program's side -------------------------------------------------------------------------------------------


def serve(program: str, channel: Channel) -> None:
    """Run the file `program`, then answer requests of the tests until the channel closes."""
    objects: list[Any] = [execute(program)]
    for line in channel.lines:
        try:
            answer = _answer(json.loads(line), objects)
        except Exception as e:  # noqa: BLE001  (errors of the program are reported to the tests)
            answer = {"raises": type(e).__name__, "words": str(e)[:1000]}
        channel.send(answer)


def _answer(request: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    """Answer a request of Program.request. `objects`: the objects to which the tests have references, by handle."""
    target, name = objects[request["target"]], request["name"]
    args = [decode(arg, objects.__getitem__) for arg in request["args"]]
    keywords = {key: decode(arg, objects.__getitem__) for key, arg in request["named"].items()}
    if request["what"] == "name":
        value = target[name]
    elif request["what"] == "attribute":
        value = getattr(target, name)
    elif name in _BUILTIN_CALLS:
        value = _BUILTIN_CALLS[name](target, *args, **keywords)
    else:
        value = getattr(type(target), name)(target, *args)
    return {"value": encode(value, objects), "args": [encode(arg, objects) for arg in args]}


# -- the tests' side ----------------------------------------------------------------------------------------------


class Program:
    """Proxy of the program's process, for the tests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def request(
        self,
        kind: str,
        target: int,
        name: str,
        args: tuple[Any, ...] = (),
        keywords: Any = None,
        of_class: bool = False,
    ) -> Any:
        """Send a request to the program's process, and return the resulting value.

        Changes that a call makes to its arguments are applied to `args`. The process exits if the program has ended,
        or if an argument cannot be encoded.

        Args:
            kind: `name`, `attribute` or `call`.
            target: handle of the object; 0 is the program's namespace.
            name: name of the definition, attribute or method.
            args: arguments of a call.
            keywords: keyword arguments of a call.
            of_class: whether objects in the value are from a class that the tests name.

        Raises:
            Exception: the program raised an exception. The type is the same if it is built in, otherwise Exception.
        """
        objects: list[Any] = []
        encoded_args = [encode(arg, objects) for arg in args]
        encoded_keywords = {key: encode(arg, objects) for key, arg in (keywords or {}).items()}
        if not all(isinstance(item, Remote) for item in objects):
            os._exit(EXIT_NOT_PLAIN)
        handles = [object.__getattribute__(item, "_handle") for item in objects]
        body = {"what": kind, "target": target, "name": name, "args": encoded_args, "named": encoded_keywords}
        try:
            self._channel.send(_with_handles(body, handles))
            line = self._channel.lines.readline(MAX_LINE_BYTES)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):  # the program has ended, or its answer is too long
            os._exit(1)  # no exception, because the tests could catch it
        answer = json.loads(line)
        if "raises" in answer:
            error_type = getattr(builtins, str(answer["raises"]), None)
            if not (isinstance(error_type, type) and issubclass(error_type, Exception)):
                error_type = Exception
            raise error_type(str(answer.get("words")))
        for arg, after in zip(args, answer["args"], strict=True):
            if isinstance(arg, list | dict | set | collections.deque):
                _update(arg, decode(after, lambda handle: Remote(self, int(handle), False)))
        return decode(answer["value"], lambda handle: Remote(self, int(handle), of_class))


def _with_handles(data: Any, handles: list[int]) -> Any:
    """Return encoded data in which the indices of objects are replaced by their handles in the other process."""
    if isinstance(data, list):
        return [_with_handles(item, handles) for item in data]
    if isinstance(data, dict):
        if data.keys() == {"o"}:
            return {"o": handles[data["o"]]}
        return {key: _with_handles(value, handles) for key, value in data.items()}
    return data


def _update(value: Any, updated: Any) -> None:
    """Give a container the items of `updated`, its copy that a call in the other process has changed."""
    if type(value) is not type(updated) or value == updated:
        return
    value.clear()
    if isinstance(value, list | collections.deque):
        value.extend(updated)
    else:
        value.update(updated)


class Remote:
    """Reference to an object of the program. A reference equals no plain value, regardless of the object's `__eq__`.

    Args:
        program: proxy of the program's process.
        handle: number of the object in that process.
        of_class: whether the object is a class that the tests name, or was obtained from one.
    """

    def __init__(self, program: Program, handle: int, of_class: bool) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_of_class", of_class)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _program_of(self).request("attribute", _handle_of(self), name, of_class=_is_of_class(self))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(
            _program_of(self).request("call", _handle_of(self), "__eq__", (value,)) is True
        )

    def __hash__(self) -> int:
        return _handle_of(self)

    def __iter__(self) -> Any:
        of_class = _is_of_class(self)
        return iter(_program_of(self).request("call", _handle_of(self), "__iter__", of_class=of_class))

    def __contains__(self, value: object) -> bool:
        """Compare the items in this process, unless the object is from a class that the tests name."""
        if not _is_of_class(self):
            return any(item == value for item in self)
        return bool(_program_of(self).request("call", _handle_of(self), "__contains__", (value,)))


def _program_of(remote: Remote) -> Program:
    program: Program = object.__getattribute__(remote, "_program")
    return program


def _handle_of(remote: Remote) -> int:
    handle: int = object.__getattribute__(remote, "_handle")
    return handle


def _is_of_class(remote: Remote) -> bool:
    of_class: bool = object.__getattribute__(remote, "_of_class")
    return of_class


def _forward(name: str) -> Any:
    """Return a method of Remote that calls the object's special method `name`."""
    is_operator = name.strip("_") in _OPERATORS

    def method(self: Remote, *args: Any, **keywords: Any) -> Any:
        of_class = _is_of_class(self)
        if is_operator and not of_class and not all(isinstance(arg, Remote) for arg in args):
            raise TypeError(
                f"{name} of an object of the program: expected another object of the program as operand"
            )
        return _program_of(self).request("call", _handle_of(self), name, args, keywords, of_class)

    return method


for _name in _SPECIAL_METHODS:
    setattr(Remote, f"__{_name}__", _forward(f"__{_name}__"))


def check(tests: str, channel: Channel) -> None:
    """Run the source `tests`. Raises the exceptions of the tests."""
    program = Program(channel)
    program.request("call", 0, "__len__")  # waits until the program has run, even if the tests do not call it
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in sorted(free_names(tests)):
        if name in BUILT_IN_NAMES:
            names[name] = BUILT_IN_NAMES[name]
        elif name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        else:
            try:
                names[name] = program.request("name", 0, name, of_class=name[0].isupper())
            except KeyError:
                continue  # the use of this name raises a NameError
    exec(compile(tests, "tests", "exec"), names)


def free_names(tests: str) -> set[str]:
    """Return the names that the source `tests` uses, and that neither it nor Python defines."""
    loaded, defined = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return loaded - defined


# -- both in one process --------------------------------------------------------------------------------------


def run_in_one_process(program: str, tests: BinaryIO, answers: BinaryIO) -> None:
    """Run the program, then the tests. If they pass, write their token to `answers`.

    Args:
        program: file of the program.
        tests: a line with the token, and the source of the tests.
        answers: file that gets the token.
    """
    names = execute(program)
    token = tests.readline()  # after the program has run, so that it does not know the token
    exec(compile(tests.read(), "tests", "exec"), names)
    answers.write(token)
    answers.flush()


def limit(limits: dict[str, int]) -> None:
    """Set resource limits, by the name after RLIMIT_.

    Must be called in the sandbox, because outside of it other processes of the user count towards the limits.
    """
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def main() -> None:
    role, limits, source_file, *descriptors = sys.argv[1:]
    limit(json.loads(limits))
    sys.argv = [source_file]
    if role == "run":
        execute(source_file)
    elif role == "both":
        tests, answers = (int(descriptor) for descriptor in descriptors)
        run_in_one_process(source_file, os.fdopen(tests, "rb"), os.fdopen(answers, "wb"))
    else:
        connection = socket.socket(fileno=int(descriptors[0]))
        channel = Channel(connection.makefile("rb"), connection.makefile("wb"))
        if role == "serve":
            serve(source_file, channel)
        else:
            with open(source_file, encoding="utf-8") as file:
                check(file.read(), channel)


if __name__ == "__main__":
    main()
