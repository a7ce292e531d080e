"""Safe YAML reader and writer for configs, overrides and files of other programs.

Both treat `1e-3` as a number, as YAML 1.2 and JSON do; PyYAML follows YAML 1.1, where it is a text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rlsys.core.errors import UserError


class _Loader(yaml.SafeLoader):
    """Loader that rejects duplicate keys. PyYAML's loader uses the last one silently."""

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
        UserError: the document is not valid YAML.
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
        raise UserError(f"{source}: not valid YAML: {problem}") from None
    except ValueError as e:  # a date or a number that Python cannot represent
        raise UserError(f"{source}: a value cannot be read: {e}") from None
