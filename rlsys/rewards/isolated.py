"""Runs inside a sandbox: `python -I -S isolated.py ROLE LIMITS [DESCRIPTOR ...]`. Standard library only.

    run     the program, as `python program.py`
    serve   the program, then calls of what it has defined, for a checker
    check   tests, whose calls of the program go to such a process; ends with 0 when they pass
    both    the program and then the tests in one process, which the program can deceive

Tests and program exchange plain values as JSON, over a socket. A value of another type stays where it is, and the
tests hold a reference to it (`Remote`), which is equal to no plain value. So the program can change a verdict only by
what its functions return.
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

UNPLAIN = 77
"""Exit code: the tests give the program something that cannot cross, a function for example."""
LONGEST_LINE = 2**24
MOST_OF_AN_ITERATOR = 10**5
KNOWN = {
    "isclose": math.isclose,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
}
"""What tests use without importing it is Python's, not the program's."""
_CONTAINERS: dict[str, Any] = {
    "l": list,
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": collections.deque,
    "n": iter,
}
_SPECIAL = (
    "len", "getitem", "setitem", "delitem", "contains", "str", "repr", "bool", "int", "float", "index", "neg", "abs",
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "enter", "exit", "next", "call",
)  # fmt: skip


class Channel(NamedTuple):
    """To the other process: a line of JSON for each question and each answer."""

    lines: BinaryIO
    out: BinaryIO

    def send(self, message: Any) -> None:
        self.out.write(json.dumps(message).encode() + b"\n")
        self.out.flush()


_BUILTIN: dict[str, Any] = {
    "__call__": lambda target, *args, **named: target(*args, **named),
    "__bool__": bool,
    "__iter__": iter,
}
"""What works also for objects whose type does not define it."""


def encode(value: Any, objects: list[Any]) -> Any:
    """As JSON. What is not plain is added to `objects`, and sent as its place there."""
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
        items = [item for item, _ in zip(value, range(MOST_OF_AN_ITERATOR), strict=False)]
        return {"n": [encode(item, objects) for item in items]}
    objects.append(value)
    return {"o": len(objects) - 1}


def decode(data: Any, object_at: Any) -> Any:
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
    """Run a file as `python FILE` does. Returns what it has defined."""
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    module = types.ModuleType("__main__")
    module.__file__ = program
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    return module.__dict__


# -- the program's side -------------------------------------------------------------------------------------------


def serve(program: str, channel: Channel) -> None:
    objects: list[Any] = [execute(program)]
    for line in channel.lines:
        try:
            answer = _answered(json.loads(line), objects)
        except Exception as e:  # noqa: BLE001  (of the program: the tests hear of it)
            answer = {"raises": type(e).__name__, "words": str(e)[:1000]}
        channel.send(answer)


def _answered(asked: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    target, name = objects[asked["target"]], asked["name"]
    args = [decode(arg, objects.__getitem__) for arg in asked["args"]]
    named = {key: decode(arg, objects.__getitem__) for key, arg in asked["named"].items()}
    if asked["what"] == "name":
        value = target[name]
    elif asked["what"] == "attribute":
        value = getattr(target, name)
    elif name in _BUILTIN:
        value = _BUILTIN[name](target, *args, **named)
    else:
        value = getattr(type(target), name)(target, *args)
    return {"value": encode(value, objects), "args": [encode(arg, objects) for arg in args]}


# -- the tests' side ----------------------------------------------------------------------------------------------


class Program:
    """The other process, as tests see it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, what: str, target: int, name: str, args: tuple[Any, ...] = (), named: Any = None) -> Any:
        given: list[Any] = []
        sent = [encode(arg, given) for arg in args]
        sent_named = {key: encode(arg, given) for key, arg in (named or {}).items()}
        if not all(isinstance(each, Remote) for each in given):
            os._exit(UNPLAIN)
        places = [object.__getattribute__(each, "_place") for each in given]
        body = {"what": what, "target": target, "name": name, "args": sent, "named": sent_named}
        try:
            self._channel.send(_placed(body, places))
            line = self._channel.lines.readline(LONGEST_LINE)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):  # the program has ended, or says too much: no test may catch that
            os._exit(1)
        answer = json.loads(line)
        if "raises" in answer:
            kind = getattr(builtins, str(answer["raises"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = Exception
            raise kind(str(answer.get("words")))
        for arg, after in zip(args, answer["args"], strict=True):
            if isinstance(arg, list | dict | set | collections.deque):
                _update(arg, decode(after, self._object))
        return decode(answer["value"], self._object)

    def _object(self, place: int) -> Remote:
        return Remote(self, int(place))


def _placed(data: Any, places: list[int]) -> Any:
    """With the other side's places of its objects."""
    if isinstance(data, list):
        return [_placed(item, places) for item in data]
    if isinstance(data, dict):
        if data.keys() == {"o"}:
            return {"o": places[data["o"]]}
        return {key: _placed(value, places) for key, value in data.items()}
    return data


def _update(held: Any, after: Any) -> None:
    """What a function has changed in its argument is changed here."""
    if type(held) is not type(after) or held == after:
        return
    held.clear()
    if isinstance(held, list | collections.deque):
        held.extend(after)
    else:
        held.update(after)


class Remote:
    """An object of the program. It is equal to no plain value, whatever it says."""

    def __init__(self, program: Program, place: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_place", place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _of(self).ask("attribute", _place(self), name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(
            _of(self).ask("call", _place(self), "__eq__", (other,)) is True
        )

    def __hash__(self) -> int:
        return _place(self)

    def __iter__(self) -> Any:
        return iter(_of(self).ask("call", _place(self), "__iter__"))


def _of(remote: Remote) -> Program:
    program: Program = object.__getattribute__(remote, "_program")
    return program


def _place(remote: Remote) -> int:
    place: int = object.__getattribute__(remote, "_place")
    return place


def _forwarded(name: str) -> Any:
    def method(self: Remote, *args: Any, **named: Any) -> Any:
        return _of(self).ask("call", _place(self), name, args, named)

    return method


for _name in _SPECIAL:
    setattr(Remote, f"__{_name}__", _forwarded(f"__{_name}__"))


def check(tests: str, channel: Channel) -> None:
    """Raises what the tests raise."""
    program = Program(channel)
    program.ask("call", 0, "__len__")  # the program has come to its end, also where tests ask nothing of it
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in sorted(free_names(tests)):
        if name in KNOWN:
            names[name] = KNOWN[name]
        elif name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        else:
            try:
                names[name] = program.ask("name", 0, name)
            except KeyError:
                continue  # a NameError where it is used
    exec(compile(tests, "tests", "exec"), names)


def free_names(tests: str) -> set[str]:
    """What tests use, and neither they nor Python define."""
    used, defined = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return used - defined


# -- both in one process --------------------------------------------------------------------------------------


def both(program: str, tests: BinaryIO, answers: BinaryIO) -> None:
    """The first line of `tests` is written to `answers` when they have passed. It is read after the program."""
    names = execute(program)
    done = tests.readline()
    exec(compile(tests.read(), "tests", "exec"), names)
    answers.write(done)
    answers.flush()


def limit(limits: dict[str, int]) -> None:
    """By RLIMIT_NAME; within the sandbox, because a user's other processes count before it."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def main() -> None:
    role, limits, program, *descriptors = sys.argv[1:]
    limit(json.loads(limits))
    sys.argv = [program]
    if role == "run":
        execute(program)
    elif role == "both":
        tests, answers = (int(each) for each in descriptors)
        both(program, os.fdopen(tests, "rb"), os.fdopen(answers, "wb"))
    else:
        connection = socket.socket(fileno=int(descriptors[0]))
        channel = Channel(connection.makefile("rb"), connection.makefile("wb"))
        if role == "serve":
            serve(program, channel)
        else:
            with open(program, encoding="utf-8") as file:
                check(file.read(), channel)


if __name__ == "__main__":
    main()
