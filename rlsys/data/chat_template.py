"""Renderer of the chat templates of Hugging Face model folders: jinja2's sandbox with limits on time and size.

A template is an untrusted program. It may use `SECONDS` of CPU time for a chat, and none of its values may be larger
than `MAX_LENGTH`. Loops and macros check the time; operators, filters and calls check sizes before and after they
run. Templates can call the functions that transformers offers them.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlsys.core.texts import joined_text

SECONDS = 2.0
"""Maximum CPU time in seconds to render one chat; real templates take milliseconds."""
MAX_LENGTH = 2**24
"""Maximum number of characters of a text and of items of a list, and maximum numeric argument of a call."""
MAX_BITS = 2**14
"""Maximum size of an integer in bits."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
"""Errors that a template raises for messages that it does not support."""
_STEP, _SIZED, _PRINTED = "rlsys_step", "rlsys_sized", "rlsys_printed"
_PRINTERS = frozenset(
    {"do_join", "sync_do_join", "_to_json", "soft_str", "do_pprint", "do_urlencode", "do_xmlattr"}
)
"""Names of the functions of filters that convert a whole list or mapping to text."""
_WIDE = re.compile(r"\d{7}")


class ChatTemplate:
    """A compiled template."""

    def __init__(self, text: str) -> None:
        """Compile a template.

        Raises:
            jinja2.TemplateError: the syntax is invalid.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters = {
            name: _bounded(function) for name, function in {**environment.filters, "tojson": _to_json}.items()
        }
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _format_now}
        tree = environment.parse(text)
        self.variables = jinja2.meta.find_undeclared_variables(tree) - set(environment.globals)
        """Names of the variables that the template reads."""
        self._template = environment.from_string(_add_checks(tree, environment))

    def render(self, **variables: Any) -> str:
        """Render the template with these variables.

        Raises:
            TEMPLATE_ERRORS: the template rejects the variables, exceeds a limit, or writes invalid Unicode.
        """
        deadline = time.thread_time() + SECONDS

        def check_time() -> str:
            if time.thread_time() > deadline:
                raise jinja2.TemplateRuntimeError(f"it takes more than {SECONDS:g} s of CPU time")
            return ""

        pieces, size = [], 0
        checks: dict[str, Any] = {_STEP: check_time, _SIZED: _sized, _PRINTED: _check_printed}
        for piece in self._template.generate(**variables, **checks):
            check_time()
            pieces.append(piece)
            size += len(piece)
            if size > MAX_LENGTH:
                raise jinja2.TemplateRuntimeError(f"it writes more than {MAX_LENGTH:,} characters")
        try:
            return joined_text("".join(pieces))
        except ValueError as e:
            raise jinja2.TemplateRuntimeError(f"its output is invalid: {e}") from None


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, first: Any, second: Any) -> Any:
        if operator == "*":
            _check_product(first, second)
        elif operator == "**" and isinstance(first, int) and first.bit_length() * abs(second) > MAX_BITS:
            _too_large()
        elif operator == "+":
            _check_size(_length(first) + _length(second))
        elif operator == "%" and isinstance(first, str):
            _check_format(first)
            _check_printed(second)
        return _sized(super().call_binop(context, operator, first, second))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner := getattr(__obj, "__self__", None), str):
            if __obj.__name__.startswith("format"):
                _check_format(owner)
            _check_printed((args, kwargs))
        _check_numbers(args, kwargs)
        return _sized(super().call(__context, __obj, *args, **kwargs))


def _add_checks(tree: nodes.Template, environment: _Environment) -> nodes.Template:
    """Insert calls of the checks into a template's syntax tree, in place, and return the tree.

    Each iteration of a loop and each call of a macro checks the CPU time. Each output and each assignment checks the
    size of its value.
    """

    def call(name: str, *arguments: Any) -> nodes.Expr:
        return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)

    constants = (nodes.TemplateData, nodes.Const)
    all_nodes = [tree, *tree.find_all(nodes.Node)]
    for node in all_nodes:
        if isinstance(node, nodes.Output | nodes.Concat):
            node.nodes = [n if isinstance(n, constants) else call(_PRINTED, n) for n in node.nodes]
        elif isinstance(node, nodes.Assign):
            node.node = call(_SIZED, node.node)
        elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            node.body.insert(0, nodes.Output([call(_STEP)]))
    for node in tree.find_all(nodes.Node):
        for child in node.iter_child_nodes():
            child.set_lineno(node.lineno or 1)
    tree.set_environment(environment)
    return tree


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with checks: it raises TemplateError if a numeric argument or its result is too large."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if function.__name__ == "do_format":
            _check_format(str(arguments[0]))
            _check_printed(arguments[1:])
        elif isinstance(arguments[0], list | tuple | dict) and function.__name__ in _PRINTERS:
            _check_printed(arguments[0])
        _check_numbers(arguments[1:], kwargs)
        return _sized(function(*args, **kwargs))

    return call


def _check_product(first: Any, second: Any) -> None:
    if isinstance(first, int) and isinstance(second, int):
        if first.bit_length() + second.bit_length() > MAX_BITS:
            _too_large()
    elif isinstance(first, int):
        _check_size(_length(second) * first)
    elif isinstance(second, int):
        _check_size(_length(first) * second)


def _check_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int | float) and abs(value) > MAX_LENGTH:
            _too_large()


def _check_format(text: str) -> None:
    """Reject a format whose width or precision has seven or more digits: the result would have as many characters.

    Raises:
        jinja2.TemplateRuntimeError: the format has such a number.
    """
    if _WIDE.search(text):
        _too_large()


def _check_printed(value: Any) -> Any:
    """Return `value`, whose text a template needs.

    The text may be larger than the value, because a list may contain another list many times.

    Raises:
        jinja2.TemplateRuntimeError: the text would be too large.
    """
    if isinstance(value, list | tuple | dict):
        size, items = 0, [value]
        while items:
            item = items.pop()
            size += 1
            if isinstance(item, dict):
                items += [*item, *item.values()]
            elif isinstance(item, list | tuple):
                items += item
            elif isinstance(item, str):
                size += len(item)
            _check_size(size + len(items))
        return value
    return _sized(value)


def _sized(value: Any) -> Any:
    """Return `value`.

    Raises:
        jinja2.TemplateRuntimeError: the value is too large.
    """
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        _too_large()
    _check_size(_length(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_LENGTH:
        _too_large()


def _too_large() -> NoReturn:
    raise jinja2.TemplateRuntimeError(f"it creates a value larger than {MAX_LENGTH:,} characters or items")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Generation(jinja2.ext.Extension):
    """Parser of the tag `{% generation %}`, which some templates write around the assistant's text; it has no
    effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it on the instance)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
