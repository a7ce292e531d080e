"""Which of Megatron's fused kernels a trainer uses: those of Transformer Engine and Apex where there is CUDA."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.trainer.model import model
from tests.helpers.servers import ROOT

FUSIONS = ("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion")


def fields(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *overrides: str,
    cuda: bool = True,
    engine: bool = True,
    apex: bool = False,
) -> dict[str, Any]:
    """Of a model's TransformerConfig on a GPU of compute capability 9.0, or on a CPU."""
    real = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(model, "have_transformer_engine", lambda: cuda and engine)
    kernels = [(model.rope_utils, "fused_apply_rotary_pos_emb_thd"), (model.moe_utils, "fused_permute")]
    for module, kernel in kernels:
        monkeypatch.setattr(module, kernel, object() if engine else None, raising=False)
    for kind in ("TransformerConfig", "MLATransformerConfig", "YarnConfig"):
        monkeypatch.setattr(model, kind, dict)
    of_apex = {"fused_weight_gradient_mlp_cuda": object() if apex else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: of_apex.get(module) or real(module))
    config = load_config(ROOT / "configs/quickstart.yaml", ["model.dtype=bfloat16", *overrides])
    model_config: Any = model.transformer_config(config, HFConfig.read(ROOT / "configs/models" / name))
    return {fusion: model_config.get(fusion, False) for fusion in (*FUSIONS, "moe_grouped_gemm")}


@pytest.mark.parametrize(
    ("name", "overrides", "where", "used"),
    [
        ("Qwen3-30B-A3B", [], {}, FUSIONS),
        ("Qwen3-30B-A3B", ["trainer.lora.rank=8"], {}, ()),
        ("Qwen3-30B-A3B", [], {"engine": False}, ()),
        ("Qwen3-30B-A3B", [], {"engine": False, "apex": True}, FUSIONS[:1]),
        ("Qwen3-30B-A3B", [], {"cuda": False}, ()),
        ("Qwen3-30B-A3B", ["model.fp8=both"], {}, (*FUSIONS, "moe_grouped_gemm")),
        ("Qwen3-30B-A3B", ["model.dtype=float32"], {}, (*FUSIONS, "moe_grouped_gemm")),
        ("DeepSeek-V3", [], {}, ("gradient_accumulation_fusion", "moe_permute_fusion")),
    ],
    ids=["te", "lora", "neither", "apex", "cpu", "fp8", "float32", "latent"],
)  # fmt: skip
def test_kernels_are_used_where_something_gives_them(
    name: str,
    overrides: list[str],
    where: dict[str, bool],
    used: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts are torch's grouped GEMM, but for FP8 and float32, which Transformer Engine computes."""
    fusions = fields(monkeypatch, name, *overrides, **where)
    assert {fusion for fusion, on in fusions.items() if on} == set(used)
