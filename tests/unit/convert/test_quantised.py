"""Folders with quantised weights: hand-made numbers, and what transformers makes of the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_requirements
from rlsys.convert.hf import HFTensors
from rlsys.convert.quantised import from_fp8, from_mxfp4
from rlsys.convert.stack import join_parts
from rlsys.convert.table import entries, stacked_names
from rlsys.core.errors import UserError
from tests.helpers import tiny

GENERATOR = torch.Generator().manual_seed(0)


def some_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR, dtype=torch.uint8)


def test_four_bits_and_a_shared_exponent() -> None:
    """0x2 is 1, 0x7 is 6, 0x9 is -0.5; exponent 128 doubles. The low half of a byte comes first."""
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 1] = 0x72, 0x09
    values = from_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    assert values[0, :4].tolist() == [2.0, 12.0, -1.0, 0.0]
    assert values.shape == (1, 32)


def test_blocks_of_eight_bits_have_a_scale_each() -> None:
    """Blocks of two rows and columns; the last ones are cut."""
    weight = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [8.0, 8.0, 8.0]]).to(torch.float8_e4m3fn)
    values = from_fp8(weight, torch.tensor([[1.0, 10.0], [0.5, 2.0]]), 2)
    assert values.tolist() == [[1, 2, 40], [1, 2, 40], [4, 4, 16]]


def raw_of(family: str, **quantised: Any) -> dict[str, Any]:
    return {**tiny.raw_config(tiny.TINY[family]), "quantization_config": quantised}


def folder_of(tmp_path: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[HFTensors, HFConfig]:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    hf = HFConfig.read(tmp_path)
    return HFTensors(tmp_path, hf), hf


def plain_tensors(hf: HFConfig) -> dict[str, Tensor]:
    shapes = {name: shape for entry in entries(hf) for name, shape in entry.hf.items()}
    return {
        name: torch.randn(shape, generator=GENERATOR).to(torch.bfloat16) for name, shape in shapes.items()
    }


def test_gpt_oss_as_it_is_published_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    raw = raw_of("gpt-oss", quant_method="mxfp4")
    hf = HFConfig.of(raw, "config.json")
    tensors = plain_tensors(hf)
    expected = dict(tensors)
    for name, stack in stacked_names(hf).items():
        parts = [[part.format(e=e) for part in stack.parts] for e in range(hf.experts)]
        if name.endswith("bias"):
            tensors[name] = torch.stack(
                [join_parts([tensors.pop(p) for p in part_names], stack) for part_names in parts]
            )
            continue
        rows, columns = tensors[parts[0][0]].shape
        rows *= len(stack.parts)
        blocks = some_bytes(hf.experts, rows, columns // 32, 16)
        scales = some_bytes(hf.experts, rows, columns // 32, low=118, high=130)
        reference = convert_moe_packed_tensors(blocks, scales)  # [experts, columns, rows]
        for e, part_names in enumerate(parts):
            for i, part in enumerate(part_names):
                del tensors[part]
                expected[part] = reference[e].t()[i :: len(part_names)]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    read, _ = folder_of(tmp_path, raw, {name: t.contiguous() for name, t in tensors.items()})
    assert read.names == expected.keys()
    assert all(torch.equal(read.read(name), tensor) for name, tensor in expected.items())


def test_fp8_blocks_are_read_under_their_own_names(tmp_path: Path) -> None:
    raw = raw_of("kimi-k2", quant_method="fp8", weight_block_size=[128, 128])
    hf = HFConfig.of(raw, "config.json")
    tensors = plain_tensors(hf)
    expected = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name].to(torch.float8_e4m3fn)
        rows, columns = (torch.arange(n) // 128 for n in weight.shape)
        scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1, generator=GENERATOR) + 0.5
        tensors |= {name: weight, f"{name}_scale_inv": scale}
        expected[name] = (weight.float() * scale[rows][:, columns]).to(torch.bfloat16)
    read, hf = folder_of(tmp_path, raw, tensors)
    assert read.names == expected.keys()
    assert all(torch.equal(read.read(name), tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match=r"quantised \(fp8\), and engines .*rlsys convert hf-to-megatron"):
        check_requirements(Config.model_validate({"model": {"path": tmp_path}}), hf)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "awq"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "mxfp4"},
    ],
)
def test_other_kinds_are_refused(quantised: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"the weights are quantised \({quantised['quant_method']}\)"):
        HFConfig.of(raw_of("kimi-k2", **quantised), "config.json")
