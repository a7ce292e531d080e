"""Safe YAML reader and writer for configs, overrides and files of other programs.

Both treat `1e-3` as a number, as YAML 1.2 and JSON do; PyYAML follows YAML 1.1, where it is a text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rlsys.core.errors import UserError


class _InvalidValue(yaml.constructor.ConstructorError):
    """Raised if Python cannot represent a scalar, such as February 30."""


class _Loader(yaml.SafeLoader):
    """Loader that rejects duplicate keys, of which PyYAML's loader uses the last one silently.

    It raises a YAMLError with a position where PyYAML's loader raises errors of Python.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as e:
            kind = node.tag.rpartition(":")[2]
            value = f" {node.value!r:.80}" if isinstance(node, yaml.ScalarNode) else ""
            reason = f": {e}" if isinstance(e, ValueError) else ""  # else an error of PyYAML's code
            problem = f"invalid {kind}{value}{reason}"
            raise _InvalidValue(None, None, problem, node.start_mark) from None

    def scan_flow_scalar(self, style: str) -> Any:
        mark = self.get_mark()
        try:
            return super().scan_flow_scalar(style)
        except (ValueError, OverflowError):
            problem = "an escape sequence beyond \\U0010FFFF, the last Unicode character"
            raise yaml.scanner.ScannerError(None, None, problem, mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value}", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes texts that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*|\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def dump_yaml(data: Any) -> str:
    """Return the YAML document that `parse_yaml` converts to `data`."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text


def parse_yaml(text: str, source: str, *, position: bool = True) -> Any:
    """Parse a YAML document.

    Args:
        text: the document.
        source: start of the error's message.
        position: whether the message has line and column.

    Raises:
        UserError: the document is not valid YAML, or Python cannot represent a value.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        if mark is not None and position:
            source = f"{source}:{mark.line + 1}:{mark.column + 1}"
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        if not isinstance(e, _InvalidValue):
            problem = f"not valid YAML: {problem}"
        raise UserError(f"{source}: {problem}") from None
