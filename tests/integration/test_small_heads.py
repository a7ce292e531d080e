"""Heads whose size SGLang's fused rope lacks, as an engine on CUDA treats them (shared finding G1): the branch that
CUDA takes, up to the kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlsys.engine.cpu.platform import declare_torchvision_ops
from rlsys.engine.hooks.rope_hooks import FUSED_HEAD_SIZES, TARGET, check_fused_head_size

pytestmark = pytest.mark.integration

SIZES = (16, 32, 64, 80, 96, 128, 192, 256, 512)


@pytest.mark.parametrize("size", SIZES)
def test_a_model_requests_fused_kv_storage_only_if_the_rope_supports_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_torchvision_ops()
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.models import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pool = SimpleNamespace(dtype=torch.bfloat16, head_dim=size)
    for module in (base, utils):
        monkeypatch.setattr(module, "_is_cuda", True)
        monkeypatch.setattr(module, "_is_cpu", False)
    monkeypatch.setattr(base, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr("sglang.srt.model_executor.forward_context.get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(utils, "is_cp_active", lambda batch: False)
    original = utils.enable_fused_set_kv_buffer
    assert original(SimpleNamespace()), "SGLang looks at the size now: the hook can go"
    HookRegistry.register(TARGET, check_fused_head_size, HookType.AFTER)
    try:
        HookRegistry.apply_hooks()
        fused = utils.enable_fused_set_kv_buffer(SimpleNamespace())
    finally:
        utils.enable_fused_set_kv_buffer = original
        HookRegistry._hooks.pop(TARGET)
        HookRegistry._patched.discard(TARGET)
    rope = base.RotaryEmbedding(size, size, 64, 10000, True, torch.bfloat16)
    assert fused is not rope.use_fallback_kernel, "the fallback rotation refuses to store"
    assert fused is (size in FUSED_HEAD_SIZES)
