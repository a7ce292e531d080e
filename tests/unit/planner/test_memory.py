"""Memory of a layout: counts against real files and published sizes, bytes against sums done by hand."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from rlsys.algo.preflight import check
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.table import entries
from rlsys.planner.layout import lay_out
from rlsys.planner.memory import (
    Fact,
    _output_layer,
    budget,
    checkpoint_host,
    describe_memory,
    engine_samples,
    expected_staleness,
    memory_problems,
    model_size,
    samples_held,
    size_warnings,
    stage_budget,
)
from rlsys.planner.model_preflight import read_model
from rlsys.planner.weight_update_cost import push_rounds
from tests.helpers.tiny import TINY, raw_config

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"


def published(name: str) -> HFConfig:
    return HFConfig.read(ROOT / "configs/models" / name)


QUICKSTART = published("quickstart-moe")


def plain(facts: list[Fact]) -> str:
    return "\n".join(f"{name:<20} {text}" for name, text in facts)


def config(*overrides: str) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", overrides)


def test_parameters_are_those_of_the_file() -> None:
    with safe_open(MODEL / "model.safetensors", "np") as f:
        shapes = {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118
    size = model_size(QUICKSTART)
    assert size.total == sum(prod(shape) for shape in shapes.values())
    assert size.experts == sum(prod(s) for n, s in shapes.items() if ".experts." in n)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-7B-Instruct", 7.616),
        ("Qwen3-30B-A3B", 30.532),
        ("GLM-4.5-Air", 106.852),
        ("DeepSeek-V3", 671.026),
    ],
)
def test_parameters_of_known_models(name: str, billions: float) -> None:
    """As published: 7.61, 30.5, 106 and 671 B. Layers for multi-token prediction are left out, there and here."""
    assert model_size(published(name)).total / 1e9 == pytest.approx(billions, abs=0.001)


def test_bytes_by_hand() -> None:
    """Float32, EP 2 over two ranks: dense parts are whole on each, experts and all optimizer states halved."""
    size = model_size(QUICKSTART)
    b = budget(config("parallel.ep=2", "engine.max_total_tokens=1000"), size)
    local_parameters = size.dense + size.experts / 2
    assert b.weights == b.gradients == 4 * local_parameters
    assert b.optimizer == 8 * (size.dense / 2 + size.experts / 2)
    assert b.engine_weights == 4 * size.total
    assert b.kv_pool == 4 * 1000 * 3 * (2 * 2 * 32)
    halves = budget(config("parallel.ep=2", "model.dtype=bfloat16"), size)
    assert halves.weights == 2 * local_parameters
    assert halves.optimizer == 12 * (size.dense / 2 + size.experts / 2)


def test_a_rolling_push_shows_its_rounds() -> None:
    path = ROOT / "configs/experiments/deepseek-v3_384gpu_disaggregated.yaml"
    run_config = load_config(path, ["weights.rolling=3"])
    assert run_config.engine.count == 4
    text = plain(describe_memory(run_config, published("DeepSeek-V3")))
    expected = "2, of 3 engines each, while 1 or more continue; the trainer sends once per round"
    assert f"its rounds           {expected}" in text
    assert push_rounds(run_config) == 2 and push_rounds(load_config(path)) == 1


def test_a_sharded_push_shows_its_senders() -> None:
    """1,342 GB over 256 ranks are 5.24 GB each, and something to help others; over the 32 ranks of an engine 41.9."""
    path = ROOT / "configs/experiments/deepseek-v3_384gpu_disaggregated.yaml"
    run_config = load_config(path, ["weights.method=sharded"])
    text = plain(describe_memory(run_config, published("DeepSeek-V3")))
    assert "a weight push        1,342 GB to each engine, about 4.2 s at 10 GB/s per link (sharded)" in text
    assert (
        "its senders          256 of 256 trainer ranks; a rank sends 5.35 GB on average, at most 5.95 GB, with data "
        "for engines counted once; an engine rank's link receives 41.9 GB: 0.84 s or more at 50 GB/s per link"
    ) in text
    assert "its senders" not in plain(describe_memory(config(), QUICKSTART))


def problems_of(run: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    return [*memory_problems(run, hf, gpu_gb), *size_warnings(run, hf)]


def test_a_layout_that_does_not_fit_gets_a_warning() -> None:
    text = plain(describe_memory(config("model.dtype=bfloat16", "engine.tp=2"), published("Qwen3-30B-A3B")))
    assert "parameters           30.5 B, 29 B of them in routed experts" in text
    assert "a weight push        61.1 GB to each engine, about 3.1 s at 20 GB/s (memory)" in text
    assert "its hashes           61.1 GB per trainer rank, about 61 s" in text
    odd = problems_of(
        config("model.dtype=bfloat16", "engine.tp=2", "engine.max_running_requests=128"),
        published("Qwen3-30B-A3B"),
        80.0,
    )
    assert odd[0].startswith("a trainer rank needs")
    assert problems_of(config(), QUICKSTART, 80.0) == []


def test_engines_that_decode_less_than_their_pool_holds_are_a_warning() -> None:
    """128 of 256 samples in flight: waiting is unusual only where the pool has room for more."""
    few = ["model.dtype=bfloat16", "engine.tp=2", "engine.max_running_requests=128"]
    size = published("Qwen3-30B-A3B")
    (odd,) = size_warnings(config(*few, "engine.max_total_tokens=100000"), size)
    assert re.fullmatch(
        r"256 samples are in flight, but the engines decode 128 at once; the KV pool of an engine would hold \d+",
        odd,
    )
    pool_capacity = int(odd.rpartition(" ")[2])
    assert pool_capacity > 128
    assert size_warnings(config(*few, f"engine.max_total_tokens={100000 * 128 // pool_capacity}"), size) == []


def test_engines_that_rest_leave_room_for_the_trainer() -> None:
    bf16 = ["model.dtype=bfloat16", "parallel.ep=8", "engine.tp=2", "engine.max_running_requests=256"]
    bf16 += ["launch.gpus_per_node=8", "engine.count=4"]
    odd = problems_of(config(*bf16), published("Qwen3-30B-A3B"), 140.0)
    assert any("it has 140 GB; see launch.release_memory" in line for line in odd)
    turns = problems_of(config(*bf16, "launch.release_memory=true"), published("Qwen3-30B-A3B"), 140.0)
    assert not any("trainer and engine on one GPU" in line for line in turns)


def test_expected_staleness() -> None:
    assert expected_staleness(config("rollout.over_provision=1", "rollout.max_staleness=0")).startswith("0:")
    assert (
        expected_staleness(config("rollout.over_provision=3")) == "about 2 train steps on average, at most 8"
    )
    apart = config("rollout.over_provision=1.5", "launch.placement=disaggregated")
    assert expected_staleness(apart) == "about 1.5 train steps on average, at most 8"


EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*gpu_*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_experiments_fit_their_gpus(path: Path) -> None:
    """By the estimate, with 80 GB each and an engine that gives its KV pool back while the trainer works."""
    run_config = load_config(path)
    check(run_config)
    size, layout = model_size(read_model(run_config)), lay_out(run_config)
    words = path.stem.split("_")
    assert words[1:] == [
        f"{run_config.launch.nodes * run_config.launch.gpus_per_node}gpu",
        run_config.launch.placement,
    ]
    used = {
        (share.node, gpu)
        for group in (layout.trainer, *layout.engines)
        for share in group
        for gpu in share.gpus
    }
    assert len(used) == run_config.launch.nodes * run_config.launch.gpus_per_node, "a GPU is idle"
    b = budget(run_config, size)
    resting = b.engine_weights if run_config.launch.placement == "colocated" else 0.0
    assert (b.trainer + resting) / 1e9 < 76
    assert (b.engine + (b.weights + b.gradients + b.optimizer if resting else 0.0)) / 1e9 < 76
    odd = problems_of(run_config, read_model(run_config), 80.0)
    assert not [w for w in odd if "rank needs" in w or "in flight" in w]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_the_anchor_of_an_experiment_config_matches_its_placement(path: Path) -> None:
    """Not against log-probs that later weights would give them."""
    run_config = load_config(path)
    exact = run_config.launch.placement == "colocated"
    assert run_config.algo.anchor == ("behaviour" if exact else "interpolated")


REHEARSED = {
    # experiment, stage: weights, gradients, optimizer with the host's part, activations; GB, by `rlsys rehearse`
    ("deepseek-v3_256gpu_colocated", 0): (4.72, 9.42, 22.92, 4.56),
    ("deepseek-v3_256gpu_colocated", 1): (6.35, 12.68, 34.88, 4.40),
    ("deepseek-v3_256gpu_colocated", 7): (4.20, 8.39, 22.15, 2.96),
    ("glm-4.5-air_64gpu_colocated", 1): (8.16, 16.31, 20.44, 3.86),
    ("qwen3-30b-a3b_16gpu_colocated", 0): (4.40, 8.80, 22.91, 3.73),
    ("qwen3-30b-a3b_16gpu_colocated", 1): (4.40, 8.80, 22.91, 3.38),
}


@pytest.mark.parametrize(("name", "stage"), REHEARSED)
def test_the_formula_is_near_the_rehearsal(name: str, stage: int) -> None:
    """Parameters within 1 %, activations within 10 %."""
    run_config = load_config(ROOT / f"configs/experiments/{name}.yaml")
    b = stage_budget(run_config, model_size(read_model(run_config)), stage)
    weights, gradients, optimizer, activations = (1e9 * x for x in REHEARSED[name, stage])
    assert b.weights == pytest.approx(weights, rel=0.01)
    assert b.gradients == pytest.approx(gradients, rel=0.01)
    assert b.optimizer + b.host == pytest.approx(optimizer, rel=0.01)
    assert b.activations == pytest.approx(activations, rel=0.1)


def test_the_fullest_stage_counts() -> None:
    """DeepSeek's second stage has eight layers of experts, its first five: evenly spread they would be 5.9 GB."""
    run_config = load_config(ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml")
    assert budget(run_config, model_size(read_model(run_config))).weights == pytest.approx(6.35e9, rel=0.01)


def test_the_first_stage_keeps_most_micro_batches_and_the_last_has_the_logits() -> None:
    """Float32, 3 stages of one layer of 64 hidden units: 3, 2 and 1 inputs of 4 bytes kept; logits twice 4 bytes."""
    run_config = config("parallel.pp=3", "trainer.recompute=[layer]", "trainer.token_budget=1000")
    size = model_size(QUICKSTART)
    first, second, last = (stage_budget(run_config, size, s).activations for s in range(3))
    input_bytes = 1000 * 4 * size.hidden
    assert first - second == pytest.approx(input_bytes)
    assert last == pytest.approx(input_bytes + max(first - 3 * input_bytes, 1000 * 8 * size.vocab))
    halves = config("parallel.pp=3", "trainer.recompute=[layer]", "trainer.token_budget=500")
    assert stage_budget(halves, size, 0).activations == pytest.approx(first / 2)


def test_logits_of_a_large_micro_batch_are_computed_for_some_rows_at_a_time() -> None:
    """Twice the tokens need twice the hidden states and no more logits; below 1 GiB logits need twice as much."""
    size = model_size(published("Qwen3-30B-A3B"))

    def output_layer(tokens: int) -> tuple[float, float]:
        run_config = config(
            "model.dtype=bfloat16", f"trainer.token_budget={tokens}", "launch.gpus_per_node=1"
        )
        return _output_layer(run_config, size)

    rows, columns = 1664, size.vocab  # 128 * (2**30 // (4 * 151936) // 128)
    assert output_layer(1000) == pytest.approx((6 * 1000 * columns, 8 * 1000 * columns))
    training, scoring = output_layer(16384)
    gradient = 6 * columns * size.hidden  # of the weight: in float32, and that of some rows in bfloat16
    assert training == pytest.approx(6 * rows * columns + 2 * 2 * 16384 * size.hidden + gradient)
    assert scoring == pytest.approx(8 * rows * columns + 2 * 16384 * size.hidden)
    assert output_layer(32768)[0] - training == pytest.approx(2 * 2 * 16384 * size.hidden)


def test_recompute_and_offload_save_memory() -> None:
    size = model_size(published("Qwen3-30B-A3B"))
    full = budget(config("model.dtype=bfloat16"), size)
    lean = budget(
        config("model.dtype=bfloat16", "trainer.recompute=[layer]", "trainer.offload_optimizer=0.5"), size
    )
    assert lean.activations < full.activations / 4
    assert (lean.optimizer, lean.host) == (full.optimizer / 2, full.optimizer / 2)
    assert lean.weights == full.weights


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    """4 bytes less for each parameter of layers that is no norm."""
    size = model_size(published("Qwen3-30B-A3B"))
    adamw, muon = (budget(config(f"trainer.optimizer={name}"), size).optimizer for name in ("adamw", "muon"))
    assert adamw == pytest.approx(8 * size.total)
    assert muon == pytest.approx(adamw - 4 * (size.dense_of(range(size.layers))[0] + size.experts))


def test_teacher_weights_add_to_the_memory_of_policy_weights() -> None:
    size = model_size(QUICKSTART)
    policy_budget = budget(config("parallel.tp=2"), size)
    taught = budget(config("parallel.tp=2", "algo.teacher={path: configs/models/quickstart-moe}"), size)
    assert taught.weights == 2 * policy_budget.weights
    assert (taught.gradients, taught.optimizer) == (policy_budget.gradients, policy_budget.optimizer)


def test_the_host_memory_of_a_checkpoint_is_reported() -> None:
    """Twice float32 weight and moments of what the node's first ranks own, and the weights themselves."""
    run_config = load_config(ROOT / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml")
    size = model_size(published("Qwen3-30B-A3B"))
    assert checkpoint_host(run_config, size) == pytest.approx((24 + 2) * size.total)
    text = plain(describe_memory(run_config, published("Qwen3-30B-A3B")))
    assert "a checkpoint         about 794 GB of a node's host memory while it is written, beside 36" in text
    spread = load_config(ROOT / "configs/experiments/qwen3-30b-a3b_16gpu_colocated.yaml")
    assert checkpoint_host(spread, size) == pytest.approx((24 + 2) * size.total / 2), "a stage on each node"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_the_pools_of_experiments_hold_the_samples_in_flight(path: Path) -> None:
    run_config = load_config(path)
    assert run_config.engine.max_total_tokens is None
    b = budget(run_config, model_size(read_model(run_config)))
    assert samples_held(run_config, b.pool_tokens) == engine_samples(run_config)


def test_the_kv_pool_gets_the_memory_left_by_weights_and_trainer() -> None:
    """0.88 of 80 GB, less what the engine and the trainer hold; all of it, where engines keep it to themselves."""
    colocated = load_config(ROOT / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml")
    size = model_size(published("Qwen3-30B-A3B"))
    b = budget(colocated, size)
    free_bytes = 0.88 * 80e9 - b.engine_weights - b.graphs - b.idle_trainer
    assert 0 <= free_bytes - b.kv_pool < 1024 * b.token_bytes
    small = colocated.model_copy(
        update={"launch": colocated.launch.model_copy(update={"gpu_memory_gb": 60.0})}
    )
    assert budget(small, size).pool_tokens == 0
    assert "holds 0 tokens" in memory_problems(small, published("Qwen3-30B-A3B"), 60.0)[-1]
    fixed = load_config(
        ROOT / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml", ["engine.max_total_tokens=10000"]
    )
    assert budget(fixed, size).pool_tokens == 10_000
    few = load_config(
        ROOT / "configs/experiments/qwen3-30b-a3b_16gpu_disaggregated.yaml",
        ["rollout.groups_per_step=4", "rollout.group_size=4", "rollout.over_provision=1"],
    )
    assert budget(few, size).pool_tokens == 8 * (8192 + 2048), "no more than the samples in flight need"


def test_parameters_and_cache_of_a_hybrid_model(tmp_path: Path) -> None:
    """Layers with a gated delta net have other parameters than those with attention, and no KV cache."""
    (tmp_path / "config.json").write_text(json.dumps(raw_config(TINY["qwen3-next"])))
    hf = HFConfig.read(tmp_path)
    assert any(hf.linear_layers) and not all(hf.linear_layers)
    size = model_size(hf)
    assert size.total == sum(e.elements for e in entries(hf))
    assert size.kv_values == 2 * hf.kv_heads * hf.head_dim * (hf.layers - sum(hf.linear_layers))
