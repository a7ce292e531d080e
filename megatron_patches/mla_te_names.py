"""Multi-head latent attention without Transformer Engine.

Symptom: TypeError: isinstance() arg 2 must be a type, in MultiLatentAttention.__init__.
Upstream: 0.16.1.
Why numbers stay equal: The module regards upstream's placeholders as Transformer Engine's classes. With HAVE_TE =
False, it only skips a memory setting for FP8 in Transformer Engine's layers.
Delete when: The module's HAVE_TE is False without Transformer Engine.
"""

from __future__ import annotations

from types import ModuleType

from megatron_patches.registry import Patch, target

_NAME = "mla_te_names"


def _edit(module: ModuleType) -> None:
    target(_NAME, module, "MultiLatentAttention", "and isinstance(self.linear_proj, TELinear)")
    module.HAVE_TE = False  # type: ignore[attr-defined]


PATCH = Patch(
    _NAME, "megatron.core.transformer.multi_latent_attention", "no-te", "0.16.1",
    "TypeError: isinstance() arg 2 must be a type, in latent attention", _edit,
)  # fmt: skip
