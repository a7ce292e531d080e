"""What a patch is, and which are there. A patch edits one freshly imported module of megatron.core in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

When = Literal["no-cuda", "no-te"]
"""no-cuda: only where CUDA is missing (never active with it). no-te: wherever Transformer Engine is missing."""


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


def expect(holds: bool, patch: str, what: str) -> None:
    """Raise PatchError unless the target still looks as expected."""
    if not holds:
        raise PatchError(
            f"megatron_patches.{patch}: {what}; look at the patch before using this megatron-core"
        )
