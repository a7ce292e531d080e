"""Parameters by the names that Transformer Engine's layers give them."""

from __future__ import annotations

import pytest

from rlsys.trainer.model.weights import te_name

LAYER = "decoder.layers.3."


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("mlp.experts.local_experts.17.linear_fc1.weight", "mlp.experts.linear_fc1.weight17"),
        ("mlp.experts.local_experts.0.linear_fc2.weight", "mlp.experts.linear_fc2.weight0"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_fused_norms_and_grouped_experts(plain: str, expected: str) -> None:
    assert te_name(LAYER + plain) == LAYER + expected
