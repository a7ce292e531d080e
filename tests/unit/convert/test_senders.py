"""Who sends what in a sharded push, held against Megatron's own numbering of ranks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it

# isort: split
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from pydantic import ValidationError

from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.planner.model_preflight import read_model
from rlsys.weights.shard_plan import SendersPlan, plan_senders
from tests.helpers import tiny

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENTS = sorted(p for p in (ROOT / "configs/experiments").glob("*.yaml") if p.stem != "base")
LARGEST = ["parallel.tp=2", "parallel.pp=16", "parallel.ep=64", "parallel.etp=null", "launch.nodes=512",
           "parallel.dp=64", "engine.count=256", "engine.tp=8", "rollout.groups_per_step=128"]  # fmt: skip
"""Of DeepSeek-V3: 2,048 trainer ranks and 256 engines."""
PARTNERS = (
    (".q_proj.", ".k_proj."),
    (".q_proj.", ".v_proj."),
    (".gate_proj.", ".up_proj."),
    (".q_a_proj.", ".kv_a_proj_with_mqa."),
)
FAMILIES = ("qwen3", "qwen3-moe", "deepseek-v3", "gpt-oss")


@cache
def model(family: str) -> HFConfig:
    return HFConfig.of(tiny.raw_config(tiny.TINY[family]), "config.json")


def names(plan: SendersPlan) -> dict[str, int]:
    """Tensor -> the rank that sends it."""
    return {
        name: sending.sender for sending in plan.schedules for part in sending.parts for name in part.entry.hf
    }


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Config, HFConfig]:
    hf = model(draw(st.sampled_from(FAMILIES)))
    sizes = {
        axis: draw(st.sampled_from(choices))
        for axis, choices in {
            "tp": (1, 2), "pp": (1, 2, 3, 4), "vpp": (1, 2), "cp": (1, 2), "ep": (1, 2, 4, 8), "etp": (1, 2),
            "dp": (1, 2, 4, 8),
        }.items()
    }  # fmt: skip
    try:
        config = Config.model_validate(
            {"model": {"path": "some/model"}, "run": {"dir": "some/run"}, "parallel": sizes,
             "rollout": {"groups_per_step": 64}}
        )  # fmt: skip
        check_layout(config, hf)
    except (ValidationError, UserError):
        assume(False)
    return config, hf


@pytest.mark.gate
@given(layouts(), st.booleans())
def test_every_parameter_is_sent_once_from_the_shards_that_make_it_up(
    layout: tuple[Config, HFConfig], together: bool
) -> None:
    config, hf = layout
    p = config.parallel
    plan = plan_senders(config, hf, experts_together=together)
    sent_names = [next(iter(part.entry.hf)) for sending in plan.schedules for part in sending.parts]
    assert Counter(sent_names) == Counter(next(iter(entry.hf)) for entry in entries(hf))
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(p.tp, 1, p.data_parallel, p.pp, p.cp, order)
    copies = p.world_size // (p.pp * p.ep * p.expert_tp)
    experts = RankGenerator(p.expert_tp, p.ep, copies, p.pp, 1, order)
    stage = {rank: i for group in dense.get_ranks("pp") for i, rank in enumerate(group)}
    owner = {rank: i for group in experts.get_ranks("ep") for i, rank in enumerate(group)}
    for sending in plan.schedules:
        for part in sending.parts:
            of_expert, sources = part.entry.expert is not None, list(part.sources)
            assert {stage[rank] for rank in sources} == {stage[sending.sender]}
            if of_expert:
                assert {owner[rank] for rank in sources} == {part.entry.expert // (hf.experts // p.ep)}
            elif len(sources) == 1:
                assert sources == [sending.sender]
            if part.entry.rule.shard_axis is not None:
                assert sources in (experts if of_expert else dense).get_ranks("tp")
            else:
                assert len(sources) == 1


@given(layouts(), st.booleans())
def test_parameters_fused_by_engines_have_one_sender(layout: tuple[Config, HFConfig], together: bool) -> None:
    config, hf = layout
    by = names(plan_senders(config, hf, experts_together=together))
    for name, sender in by.items():
        for part, partner in PARTNERS:
            assert by.get(name.replace(part, partner), sender) == sender
        if ".experts." in name and (together or hf.family.stacks):
            head, _, tail = name.partition(".experts.")
            assert by[f"{head}.experts.0.{tail.partition('.')[2]}"] == sender


@given(layouts())
def test_the_load_of_a_stage_is_even_up_to_its_largest_unit(layout: tuple[Config, HFConfig]) -> None:
    config, hf = layout
    plan, lanes = plan_senders(config, hf), config.parallel.world_size // config.parallel.pp
    passed: dict[int, float] = defaultdict(float)
    largest = Counter[int]()
    for sending in plan.schedules:
        for part in sending.parts:
            size = 4 * part.entry.elements
            largest[sending.sender] = max(largest[sending.sender], size if not hf.family.stacks else 8 * size)
            for source in part.sources:
                passed[source] += size / len(part.sources) if source != sending.sender else 0
    assert sum(plan.total_bytes) == pytest.approx(plan.received_bytes + sum(passed.values()))
    for rank, sent_bytes in enumerate(plan.total_bytes):
        stage = plan.total_bytes[rank // lanes * lanes : (rank // lanes + 1) * lanes]
        assert sent_bytes <= sum(stage) / lanes + 2 * largest[rank] + passed[rank] + 1


@pytest.mark.gate
@given(layouts(), st.booleans(), st.sampled_from([0.001, 0.01, 1.0]))
def test_a_bucket_contains_all_tensors_required_in_one_engine_call(
    layout: tuple[Config, HFConfig], together: bool, megabytes: float
) -> None:
    """And no more than weights.bucket_mb, but for what is larger by itself."""
    config, hf = layout
    small = config.model_copy(update={"weights": config.weights.model_copy(update={"bucket_mb": megabytes})})
    plan = plan_senders(small, hf, experts_together=together)
    buckets = [bucket for sending in plan.schedules for bucket in sending.buckets]
    bucket_index = {name: i for i, bucket in enumerate(buckets) for part in bucket for name in part.entry.hf}
    for name, bucket in bucket_index.items():
        assert bucket_index.get(name.replace(*PARTNERS[3]), bucket) == bucket
        if ".experts." in name and hf.family.stacks:
            head, _, tail = name.partition(".experts.")
            assert bucket_index[f"{head}.experts.0.{tail.partition('.')[2]}"] == bucket
    together_at_most = 2 * hf.experts if hf.family.stacks else 2
    for parts in buckets:
        size = sum(4 * part.entry.elements for part in parts)
        assert size <= megabytes * 2**20 or len(parts) <= together_at_most


def too_much(config: Config, plan: SendersPlan) -> list[int]:
    """Ranks that send more than twice the mean, but for one tensor that no rank could send less of."""
    ends = {name: sender for name, sender in names(plan).items() if "embed" in name or "lm_head" in name}
    tp = config.parallel.tp
    end_ranks = {
        rank for sender in ends.values() for rank in range(sender - sender % tp, sender - sender % tp + tp)
    }
    return [
        rank
        for rank, sent_bytes in enumerate(plan.total_bytes)
        if sent_bytes > 2 * plan.mean and rank not in end_ranks
    ]


@pytest.mark.gate
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_no_rank_of_an_experiment_sends_more_than_twice_the_mean(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert too_much(config, plan_senders(config, read_model(config))) == []


@pytest.mark.gate
def test_deepseek_v3_on_2048_ranks_is_planned_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding and the head, 1.85 GB each, are near twice the mean, and engines take them whole."""
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs/experiments/deepseek-v3_384gpu_disaggregated.yaml", LARGEST)
    hf, start = read_model(config), time.process_time()
    plan = plan_senders(config, hf)
    print(f"planned in {time.process_time() - start:.1f} s of the processor")
    assert config.parallel.world_size == len(plan.total_bytes) == len(plan.schedules) == 2048
    assert too_much(config, plan) == []
    assert plan.received_bytes == pytest.approx(2 * 671.026e9, rel=1e-5)
    assert max(plan.total_bytes) < 2.2 * plan.mean


def test_by_hand() -> None:
    """Two stages of one layer each; tp 2, so each stage has two ranks. Float32."""
    hf = HFConfig.of(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        },
        "config.json",
    )  # fmt: skip
    config = Config.model_validate(
        {"model": {"path": "m"}, "run": {"dir": "r"}, "parallel": {"tp": 2, "pp": 2}}
    )
    plan = plan_senders(config, hf)
    # A layer: qkv 48 numbers, output 16, gate and up 48, down 24, two norms of 4; embedding 32; on the last stage the
    # head 32 and a norm of 4. Largest first to who has least: rank 0 qkv, rank 1 gate and up, rank 0 the embedding
    # (both had 72 by then: 48 and half of the other's 48), and so on.
    by = names(plan)
    prefix = "model.layers.0."
    assert by[prefix + "self_attn.q_proj.weight"] == by[prefix + "self_attn.k_proj.weight"] == 0
    assert by[prefix + "mlp.gate_proj.weight"] == 1
    assert by["model.embed_tokens.weight"] == 0
    assert {by["lm_head.weight"], by["model.norm.weight"], by["model.layers.1.mlp.down_proj.weight"]} <= {
        2,
        3,
    }
    model_bytes = 4 * (144 * 2 + 32 + 32 + 4)
    assert plan.received_bytes == model_bytes
    cut = 4 * ((48 + 16 + 48 + 24) * 2 + 64)
    assert sum(plan.total_bytes) == model_bytes + cut / 2, (
        "of what is cut in two, half comes from the other rank"
    )
