"""A hook into SGLang on CUDA: heads whose size its fused rope lacks keep their keys and values by the usual way.

Symptom: `save kv cache is not supported for fallback_rotary_embedding` at the first forward pass in bfloat16. The
fused kernel, which rotates and stores at once, takes head sizes of 64, 128, 256 and 512. For others SGLang
(rotary_embedding/base.py) takes a rotation that does not store, but the models ask it to store all the same
(models/utils.py: enable_fused_set_kv_buffer does not look at the size). Numbers stay equal: the attention layer
stores what the rotation returns.

To delete when enable_fused_set_kv_buffer looks at the head size; seen in 0.5.23 on an H200.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
FUSED_HEAD_SIZES = (64, 128, 256, 512)
"""As in SGLang's rotary_embedding/base.py."""


def fused_where_the_kernel_has_the_size(enabled: bool, forward_batch: Any) -> bool:
    """Called after SGLang's own answer `enabled`. The pool of keys and values has the head size."""
    if not enabled:
        return enabled
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return getattr(get_token_to_kv_pool(), "head_dim", 0) in FUSED_HEAD_SIZES
