"""What a patch is, and how it makes sure of its target. A patch edits a freshly imported module in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

When = Literal["no-cuda", "no-te", "always"]
"""no-cuda: only where CUDA is missing, never beside it. no-te: wherever Transformer Engine cannot run."""


class PatchError(RuntimeError):
    """Upstream no longer looks as a patch expects: the patch must be looked at, not skipped."""


@dataclass(frozen=True)
class Patch:
    """`edit(module)` runs right after `module` was first imported."""

    name: str
    module: str
    when: When
    upstream: str
    symptom: str
    edit: Callable[[ModuleType], None]


def target(patch: str, owner: Any, name: str, *fragments: str, of: str = "megatron_patches") -> Any:
    """`owner.name`, whose source must contain each of `fragments`. Raises PatchError otherwise.

    `of`: whose patch it is, for the message.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    found = getattr(owner, name, None)
    if found is None:
        raise PatchError(f"{of}.{patch}: {where} is gone; look at the patch before going on")
    source = inspect.getsource(found)
    for fragment in fragments:
        if fragment not in source:
            raise PatchError(
                f"{of}.{patch}: {where} no longer says {fragment!r}; look at the patch before going on"
            )
    return found
