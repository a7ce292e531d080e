"""Buckets of tensors and their checksums, without an engine."""

from __future__ import annotations

import hashlib
import random
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.stack import part_of, stack_experts
from rlsys.convert.table import entries, stacked_names
from rlsys.weights.buckets import Bucket, FlatBucket, StagingBuffers, send_in_buckets, split_into_buckets
from rlsys.weights.checksums import EngineChecksums
from tests.helpers import tiny


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=30), st.integers(4, 400))
def test_buckets_hold_every_tensor_in_order_within_their_size(
    shapes: list[tuple[int, bool]], max_bytes: int
) -> None:
    tensors = [
        (f"t{i}", torch.full((n,), i, dtype=torch.bfloat16 if half else torch.float32))
        for i, (n, half) in enumerate(shapes)
    ]
    buckets = list(split_into_buckets(iter(tensors), max_bytes))
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in buckets:
        size = sum(t.numel() * t.element_size() for _, t in bucket)
        assert size <= max_bytes or len(bucket) == 1
        assert len({t.dtype for _, t in bucket}) == 1


def test_neighbours_share_a_bucket() -> None:
    tensors = [(name, torch.zeros(10)) for name in "abcde"]
    assert [[name for name, _ in b] for b in split_into_buckets(tensors, 80)] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_a_bucket_stays_unchanged_until_the_second_next_bucket(shared: bool) -> None:
    areas = StagingBuffers(shared=shared)
    first = areas.flatten([("a", torch.arange(6.0)), ("b", torch.ones(2, 3, dtype=torch.float32).T)])
    second = areas.flatten([("c", torch.zeros(9, dtype=torch.bfloat16))])
    assert first.parts[1] == ("b", torch.float32, torch.Size([3, 2]))
    assert first.memory.view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1, 1, 1]
    assert (second.memory.is_shared(), len(second.memory)) == (shared, 18)
    third = areas.flatten([("d", torch.full((4,), 7.0))])
    assert third.memory.data_ptr() == first.memory.data_ptr(), "no fresh memory"
    assert not second.memory.any()


def test_a_stream_lays_the_next_bucket_out_while_one_is_on_its_way() -> None:
    laid, sent_buckets = Event(), []

    class Watched(StagingBuffers):
        def flatten(self, bucket: Bucket) -> FlatBucket:
            if bucket[0][0] == "t1":
                laid.set()
            return super().flatten(bucket)

    def send(flat: FlatBucket) -> None:
        assert laid.wait(60), "the second bucket waited for the first"
        sent_buckets.append((flat.parts[0][0], flat.memory.view(torch.float32).tolist()))

    tensors = [(f"t{i}", torch.full((2,), float(i))) for i in range(5)]
    assert send_in_buckets(tensors, 8, Watched(shared=False), send) == 40
    assert sent_buckets == [(f"t{i}", [float(i)] * 2) for i in range(5)]


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
    (digests,) = checksums.digests()
    experts = [t[f"{LAYER}mlp.experts.{e}.{x}_proj.weight"] for e in range(2) for x in ("gate", "up")]
    assert digests[LAYER + "mlp.experts.w13_weight"] == sha(torch.cat(experts))
    attention = [t[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv"]
    assert digests[LAYER + "self_attn.qkv_proj.weight"] == sha(torch.cat(attention))
    assert digests["model.norm.weight"] == sha(t["model.norm.weight"])
    assert digests["lm_head.weight"] == sha(torch.cat([t["lm_head.weight"], torch.zeros(56, 8)]))
    assert len(digests) == 3 + 9


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


def test_an_incomplete_tensor_gets_no_checksum() -> None:
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
    bucket_names = [[name for name, _ in b] for b in split_into_buckets([*tensors, *scales], 40)]
    assert sorted(name for b in bucket_names for name in b) == sorted(name for name, _ in tensors + scales)
    for name in (n for b in bucket_names for n in b if ".q_a_proj." in n):
        (bucket,) = (b for b in bucket_names if name in b)
        assert name.replace("q_a_proj", "kv_a_proj_with_mqa") in bucket, f"{name} is alone in {bucket}"


GPT_OSS = HFConfig.of(tiny.raw_config(tiny.TINY["gpt-oss"]), "config.json")


def experts_of(hf: HFConfig) -> dict[str, Tensor]:
    """Each expert's tensors, as the trainer has them."""
    torch.manual_seed(0)
    return {
        name: torch.randn(shape)
        for entry in entries(hf)
        for name, shape in entry.hf.items()
        if entry.expert is not None
    }


def test_stacked_experts_are_transposed_and_interleaved() -> None:
    experts = experts_of(GPT_OSS)
    stacked_tensors = dict(stack_experts(experts.items(), GPT_OSS))
    prefix = "model.layers.1.mlp.experts."
    gate_up, bias = stacked_tensors[prefix + "gate_up_proj"], stacked_tensors[prefix + "gate_up_proj_bias"]
    assert (gate_up.shape, bias.shape) == ((8, 64, 64), (8, 64))
    stack = stacked_names(GPT_OSS)[prefix + "gate_up_proj"]
    for i, part in enumerate(("gate", "up")):
        assert torch.equal(gate_up[3][:, i::2].t(), experts[f"{prefix}3.{part}_proj.weight"])
        assert torch.equal(part_of(gate_up[3], i, stack), experts[f"{prefix}3.{part}_proj.weight"])
        assert torch.equal(bias[3][i::2], experts[f"{prefix}3.{part}_proj.bias"])
    assert torch.equal(stacked_tensors[prefix + "down_proj"][5].t(), experts[prefix + "5.down_proj.weight"])
    assert len(stacked_tensors) == 4 * GPT_OSS.layers


def test_experts_stacked_part_by_part_are_cut_in_each_part() -> None:
    """Gate, then up; each engine rank has its part of both, under a name without the folder's prefix."""
    hf = HFConfig.of(tiny.raw_config(tiny.TINY["qwen3-vl-moe"]), "config.json")
    experts, prefix = experts_of(hf), "model.language_model.layers.1.mlp.experts."
    stacked_tensors = dict(stack_experts(experts.items(), hf))
    gate, up, down = (
        torch.stack([experts[f"{prefix}{e}.{x}_proj.weight"] for e in range(8)])
        for x in ("gate", "up", "down")
    )
    assert torch.equal(stacked_tensors[prefix + "gate_up_proj"], torch.cat([gate, up], 1).transpose(1, 2))
    stack = stacked_names(hf)[prefix + "gate_up_proj"]
    assert torch.equal(part_of(stacked_tensors[prefix + "gate_up_proj"][3], 1, stack), up[3])
    checksums = EngineChecksums(hf, 2)
    for _ in checksums.watch(stacked_tensors.items()):
        pass
    second = checksums.digests()[1]
    assert second["model.layers.1.mlp.experts.w13_weight"] == sha(torch.cat([gate[:, 64:], up[:, 64:]], 1))
    assert second["model.layers.1.mlp.experts.w2_weight"] == sha(down[:, :, 64:])


def test_a_convolutions_channels_are_cut_in_each_part() -> None:
    """Queries', keys' and values': an engine rank has its heads of all three."""
    hf = HFConfig.of(tiny.raw_config(tiny.TINY["qwen3-next"]), "config.json")
    name, weight = "model.layers.0.linear_attn.conv1d.weight", torch.randn(128, 1, 4)
    checksums = EngineChecksums(hf, 2)
    for _ in checksums.watch([(name, weight)]):
        pass
    q, k, v = weight.split([32, 32, 64])
    assert checksums.digests()[1] == {name: sha(torch.cat([q[16:], k[16:], v[32:]]))}


def test_zero_centered_norms_get_a_second_checksum() -> None:
    hf = HFConfig.of(tiny.raw_config(tiny.TINY["qwen3-next"]), "config.json")
    weight, checksums = torch.randn(64), EngineChecksums(hf, 1)
    for _ in checksums.watch([("model.norm.weight", weight)]):
        pass
    assert checksums.digests() == [
        {"model.norm.weight": sha(weight), "model.norm.gemma_weight": sha(weight + 1)}
    ]


def test_a_missing_expert_is_no_stack() -> None:
    experts = experts_of(GPT_OSS)
    del experts["model.layers.2.mlp.experts.7.up_proj.bias"]
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.2\.mlp\.experts\.gate_up_proj_bias: .* tensors of experts; expected",
    ):
        dict(stack_experts(experts.items(), GPT_OSS))


@pytest.mark.parametrize("rank", [0, 1])
def test_checksums_of_stacked_experts_are_those_of_the_engines_layout(rank: int) -> None:
    """Experts' weights as [experts, out, in], cut over ranks along what is inside an expert."""
    stacked_tensors = dict(stack_experts(experts_of(GPT_OSS).items(), GPT_OSS))
    checksums = EngineChecksums(GPT_OSS, 2)
    for _ in checksums.watch(stacked_tensors.items()):
        pass
    digests, prefix = checksums.digests()[rank], "model.layers.0.mlp.experts."
    half = slice(32 * rank, 32 * rank + 32)
    assert digests[prefix + "w13_weight"] == sha(
        stacked_tensors[prefix + "gate_up_proj"].transpose(1, 2)[:, half]
    )
    assert digests[prefix + "w13_weight_bias"] == sha(stacked_tensors[prefix + "gate_up_proj_bias"][:, half])
    down = stacked_tensors[prefix + "down_proj"].transpose(1, 2)
    assert digests[prefix + "w2_weight"] == sha(down[:, :, 16 * rank : 16 * rank + 16])
    assert digests[prefix + "w2_weight_bias"] == sha(stacked_tensors[prefix + "down_proj_bias"])
