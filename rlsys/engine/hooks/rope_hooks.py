"""Hook into SGLang on CUDA: for head sizes without a fused rope kernel, the attention layer stores keys and values.

Symptom: `save kv cache is not supported for fallback_rotary_embedding` at the first forward pass in bfloat16. The
fused kernel, which rotates and stores in one pass, supports head sizes of 64, 128, 256 and 512. For others SGLang
(rotary_embedding/base.py) uses a rotation that does not store, but the models still request the store
(models/utils.py: enable_fused_set_kv_buffer does not check the size). Results are equal: the attention layer stores
the rotated keys.

Delete this when enable_fused_set_kv_buffer checks the head size; seen in 0.5.23 on an H200.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
FUSED_HEAD_SIZES = (64, 128, 256, 512)
"""Head sizes of the fused kernel, from SGLang's rotary_embedding/base.py."""


def check_fused_head_size(enabled: bool, forward_batch: Any) -> bool:
    """Return whether the fused kernel stores keys and values: False if it does not support the head size.

    Args:
        enabled: SGLang's own result.
    """
    if not enabled:
        return enabled
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return getattr(get_token_to_kv_pool(), "head_dim", 0) in FUSED_HEAD_SIZES
