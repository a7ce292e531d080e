"""Definition of a patch, which edits a freshly imported module in memory, and the check of its target."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

When = Literal["no-cuda", "no-te", "always"]
"""no-cuda: only without CUDA. no-te: if Transformer Engine cannot run."""


class PatchError(RuntimeError):
    """Upstream differs from what a patch expects: review the patch rather than skipping it."""


@dataclass(frozen=True)
class Patch:
    """A patch. `edit(module)` runs directly after the first import of `module`."""

    name: str
    module: str
    when: When
    upstream: str
    symptom: str
    edit: Callable[[ModuleType], None]


def target(patch: str, owner: Any, name: str, *fragments: str, package: str = "megatron_patches") -> Any:
    """Return `owner.name`, whose source must contain each of `fragments`.

    Args:
        patch: name of the patch.
        owner: module or class.
        name: attribute to patch.
        fragments: expected parts of its source.
        package: package of the patch, for the message.

    Raises:
        PatchError: the attribute is missing or has changed.
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
