"""Buckets of tensors and their checksums, without an engine."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.table import entries
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.sync import buckets


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=30), st.integers(4, 400))
def test_buckets_hold_every_tensor_in_order_within_their_size(
    shapes: list[tuple[int, bool]], max_bytes: int
) -> None:
    tensors = [
        (f"t{i}", torch.full((n,), i, dtype=torch.bfloat16 if half else torch.float32))
        for i, (n, half) in enumerate(shapes)
    ]
    made = list(buckets(iter(tensors), max_bytes))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in made:
        size = sum(t.numel() * t.element_size() for _, t in bucket)
        assert size <= max_bytes or len(bucket) == 1
        assert len({t.dtype for _, t in bucket}) == 1


def test_neighbours_share_a_bucket() -> None:
    tensors = [(name, torch.zeros(10)) for name in "abcde"]
    assert [[name for name, _ in b] for b in buckets(tensors, 80)] == [["a", "b"], ["c", "d"], ["e"]]


TINY = HFConfig.of(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 72, "hidden_size": 8, "intermediate_size": 6,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 4, "max_position_embeddings": 64,
    },
    "config.json",
)  # fmt: skip
LAYER = "model.layers.0."


def tiny_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for entry in entries(TINY) for name, shape in entry.hf.items()}


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_checksums_are_those_of_joined_tensors_in_any_order(seed: int | None) -> None:
    t, checksums = tiny_tensors(), EngineChecksums(TINY, 1)
    order = list(t.items())
    if seed is not None:
        random.Random(seed).shuffle(order)
    assert list(checksums.watch(order)) == order
    (found,) = checksums.digests()
    experts = [t[f"{LAYER}mlp.experts.{e}.{x}_proj.weight"] for e in range(2) for x in ("gate", "up")]
    assert found[LAYER + "mlp.experts.w13_weight"] == sha(torch.cat(experts))
    attention = [t[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert found[LAYER + "self_attn.qkv_proj.weight"] == sha(torch.cat(attention))
    assert found["model.norm.weight"] == sha(t["model.norm.weight"])
    assert found["lm_head.weight"] == sha(torch.cat([t["lm_head.weight"], torch.zeros(56, 8)]))
    assert len(found) == 3 + 9


def test_each_rank_has_its_part_and_ranks_share_a_head() -> None:
    t, checksums = tiny_tensors(), EngineChecksums(TINY, 4)
    for _ in checksums.watch(t.items()):
        pass
    third = checksums.digests()[2]
    q, k, v = (t[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv")
    assert third[LAYER + "self_attn.qkv_proj.weight"] == sha(torch.cat([q[4:6], k[2:4], v[2:4]]))
    assert third[LAYER + "self_attn.o_proj.weight"] == sha(t[LAYER + "self_attn.o_proj.weight"][:, 4:6])
    down = [t[f"{LAYER}mlp.experts.{e}.down_proj.weight"][:, 2:3] for e in range(2)]
    assert third[LAYER + "mlp.experts.w2_weight"] == sha(torch.stack(down))
    assert third["model.embed_tokens.weight"] == sha(
        torch.cat([t["model.embed_tokens.weight"][64:], torch.zeros(24, 8)])
    )


def test_a_tensor_that_did_not_come_whole_is_not_told() -> None:
    t, checksums = tiny_tensors(), EngineChecksums(TINY, 1)
    del t[LAYER + "self_attn.k_proj.weight"]
    for _ in checksums.watch(t.items()):
        pass
    assert LAYER + "self_attn.qkv_proj.weight" not in checksums.digests()[0]


def test_latent_attentions_two_first_projections_share_a_bucket() -> None:
    names = [
        f"model.layers.{i}.self_attn.{x}"
        for i in range(2)
        for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    ]
    tensors = [(f"{n}.weight", torch.zeros(10)) for n in names]
    scales = [(f"{n}.weight_scale_inv", torch.zeros(2)) for n in names]
    made = [[name for name, _ in b] for b in buckets([*tensors, *scales], 40)]
    assert sorted(name for b in made for name in b) == sorted(name for name, _ in tensors + scales)
    for name in (n for b in made for n in b if ".q_a_proj." in n):
        (bucket,) = (b for b in made if name in b)
        assert name.replace("q_a_proj", "kv_a_proj_with_mqa") in bucket, f"{name} is alone in {bucket}"
