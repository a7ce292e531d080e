"""Definition of a patch, which edits a newly imported module in memory, and the check of its target."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

When = Literal["no-cuda", "no-te", "always"]
"""Condition of a patch.

    no-cuda    CUDA is not available
    no-te      Transformer Engine is not installed, or CUDA is not available
    always     every host
"""


class PatchError(RuntimeError):
    """The source of a patch's target differs from the expected one; the patch must be reviewed."""


@dataclass(frozen=True)
class Patch:
    """A patch.

    Attributes:
        name: Name, which is that of the patch's file.
        module: Megatron's module to edit.
        when: Condition of the patch.
        upstream: Versions of megatron-core that need the patch.
        symptom: The error or the cost without the patch, in one line.
        edit: Edits the module; called directly after the module's first import.
    """

    name: str
    module: str
    when: When
    upstream: str
    symptom: str
    edit: Callable[[ModuleType], None]


def target(patch: str, owner: Any, name: str, *fragments: str, package: str = "megatron_patches") -> Any:
    """Return the attribute of a module or class that a patch changes, after a check of its source.

    Args:
        patch: Name of the patch.
        owner: Module or class.
        name: Name of the attribute.
        fragments: Texts that the attribute's source must contain.
        package: Package of the patch, for errors.

    Raises:
        PatchError: The attribute is missing, or its source lacks a fragment.
    """
    path = f"{getattr(owner, '__name__', owner)}.{name}"
    attribute = getattr(owner, name, None)
    if attribute is None:
        raise PatchError(f"{package}.{patch}: {path} is missing; review the patch")
    source = inspect.getsource(attribute)
    for fragment in fragments:
        if fragment not in source:
            raise PatchError(f"{package}.{patch}: {path} no longer contains {fragment!r}; review the patch")
    return attribute
