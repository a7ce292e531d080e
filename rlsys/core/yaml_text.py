"""One safe reader of YAML for configs, overrides and files of strangers."""

from __future__ import annotations

from typing import Any

import yaml

from rlsys.core.errors import UserError


class _Loader(yaml.SafeLoader):
    """A key that is given twice is a mistake; YAML's own loader would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str, *, position: bool = True) -> Any:
    """Parse a YAML document.

    Args:
        text: the document.
        where: what the message begins with.
        position: add line and column to `where`.

    Raises:
        UserError: one line, for whatever the text may be.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        if mark is not None and position:
            where = f"{where}:{mark.line + 1}:{mark.column + 1}"
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise UserError(f"{where}: not valid YAML: {problem}") from None
    except ValueError as e:  # a date or a number that Python cannot hold
        raise UserError(f"{where}: a value cannot be read: {e}") from None
