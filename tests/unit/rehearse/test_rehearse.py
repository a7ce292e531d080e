"""Parts of a rehearsal, by hand. That it is what a real step does shows in tests/integration/test_rehearse.py."""

from __future__ import annotations

import gc
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
from megatron_patches import PatchError
from rlsys.cli import main, rehearse
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from rlsys.rehearse import kernels, stand_ins
from rlsys.rehearse.figures import HOST, PHASES, Collective, Figures, Phase
from rlsys.rehearse.kinds import (
    Request,
    kinds_of_rank,
    micro_batches,
    name_of_kind,
    node_of,
    one_rank,
    stage_of,
)
from rlsys.rehearse.memory import Memory
from rlsys.rehearse.meter import Meter
from rlsys.rehearse.report import describe, group_name, problems, ranks_in_words
from rlsys.rehearse.routes import routing_map
from rlsys.rehearse.tensors import BIG, FakeTensors

ROOT = Path(__file__).resolve().parents[3]
DEEPSEEK = HFConfig.read(ROOT / "configs/models/DeepSeek-V3")


def config(*overrides: str) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", overrides)


# -- which ranks ------------------------------------------------------------------------------------------------


def test_one_rank_represents_each_kind_of_stage() -> None:
    """256 ranks in 8 stages of 32. DeepSeek's first stage has three dense layers, so stage 1 is the fullest."""
    v3 = load_config(ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml")
    assert kinds_of_rank(v3, DEEPSEEK) == [0, 32, 224]
    assert kinds_of_rank(v3, DEEPSEEK, every_stage=True) == [0, 32, 64, 96, 128, 160, 192, 224]
    assert [stage_of(v3, r) for r in (0, 31, 32, 255)] == [0, 0, 1, 7]
    assert [name_of_kind(s, 8) for s in (0, 1, 7)] == ["first stage", "stage 1", "last stage"]
    assert node_of(v3)(7) == 0 and node_of(v3)(8) == 1
    assert micro_batches(v3, Request(0)) == 8  # the first stage keeps so many


def test_layouts_without_middle_stages() -> None:
    hf = HFConfig.read(ROOT / "configs/models/quickstart-moe")
    assert kinds_of_rank(config(), hf) == [0]
    assert name_of_kind(0, 1) == "only stage"
    assert kinds_of_rank(config("parallel.pp=2", "parallel.tp=2"), hf) == [0, 2]
    assert micro_batches(config(), Request(0)) == 2
    assert micro_batches(config("parallel.pp=3", "parallel.vpp=2"), Request(0)) == 6
    assert node_of(config("parallel.tp=2"))(1) == 0


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=rf"--rank {rank}: expected 0 to 3, the ranks of parallel"):
        one_rank(config("parallel.tp=4"), rank)


# -- routes ------------------------------------------------------------------------------------------------------


def test_routes_are_uniform_or_as_skewed_as_requested() -> None:
    even = routing_map(64, 8, 2)
    assert even.sum(0).tolist() == [16] * 8
    assert (even.sum(1) == 2).all()
    skewed = routing_map(6400, 8, 2, skew=3.0)
    assert skewed.sum(0)[0] / skewed.sum(0).float().mean() == pytest.approx(3.0, rel=0.25)
    assert (skewed.sum(1) == 2).all()
    assert routing_map(10, 8, 2, skew=100.0).sum(0).tolist() == [10, 10, 0, 0, 0, 0, 0, 0]


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_counts_storages_once_and_until_they_are_freed() -> None:
    memory = Memory(HOST)
    a = torch.zeros(10)
    memory.record(a)
    memory.record(a[2:4])  # a view has the same storage
    assert memory.nonzero == {"weights": 40}
    memory.kind = "activations"
    b = torch.zeros(100)
    memory.record(b)
    memory.record(b, "communication")
    assert memory.nonzero == {"weights": 40, "communication": 400}
    del b
    gc.collect()
    assert memory.nonzero == {"weights": 40}
    assert sum(memory.peak.values()) == 440
    memory.new_peak()
    assert memory.peak == {"weights": 40}


def test_the_hosts_memory_is_no_part_of_the_peak() -> None:
    memory = Memory(HOST)
    host_tensor = torch.zeros(1000)
    memory.record(host_tensor, HOST)
    small = torch.zeros(10)
    memory.record(small)
    assert memory.peak == {HOST: 4000, "weights": 40}
    assert Phase("passes", memory.peak, 0, 0.0, 0).total == 40


# -- fake tensors ------------------------------------------------------------------------------------------------


def under(fake: FakeTensors) -> Meter:
    return Meter(lambda rank: 0, fake)


def test_floating_tensors_are_fake_and_small_integers_are_real() -> None:
    with under(FakeTensors()) as meter:
        assert isinstance(torch.zeros(4), FakeTensor)
        assert torch.zeros(3, dtype=torch.int64).tolist() == [0, 0, 0]
        assert isinstance(torch.empty(BIG, dtype=torch.uint8), FakeTensor)
        product = torch.zeros(1 << 20, 1 << 14) @ torch.zeros(1 << 14, 8)  # 64 GB that nobody allocates
    assert product.shape == (1 << 20, 8)
    meter.begin("")
    assert meter.memory.current["weights"] >= 4 * (1 << 20) * 8


def test_a_real_mask_determines_shapes_and_guessed_values_are_recorded() -> None:
    fake = FakeTensors()
    with under(fake):
        values = torch.zeros(4, 2)
        mask = torch.tensor([True, False, True, True])
        assert values[mask].shape == (3, 2)
        assert values[:, 0].masked_select(mask).shape == (3,)
        assert float(values.sum()) == 1.0
    assert fake.guessed == {"build: item() of a float32": 1}


def test_flops_and_phases_of_a_real_step() -> None:
    meter = Meter(lambda rank: 0, None)
    with meter:
        weights = torch.ones(8, 16)
        meter.begin("passes")
        out = torch.ones(4, 8) @ weights
        meter.begin("update")
        weights.mul_(out.sum())
        meter.begin("")
    passes, update = meter.phases
    assert (passes.name, passes.flops, update.flops) == ("passes", 2 * 4 * 8 * 16, 0)
    assert passes.peak == {"weights": 4 * 8 * 16, "activations": 4 * (4 * 8 + 4 * 16)}


@pytest.mark.parametrize(("queries", "masked"), [(5, False), (3, True)])
def test_attention_of_shared_tokens_keeps_no_scores(
    queries: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a causal square is computed, and all of a mask."""
    monkeypatch.setattr(kernels, "_ring", lambda *_: None)
    rows, heads, keys, d = 2, 4, 5, 8
    q, k = torch.ones(rows, heads, queries, d, requires_grad=True), torch.ones(rows, heads, keys, d)
    counted: list[int] = []
    mask = torch.ones(queries, keys, dtype=torch.bool) if masked else None
    with Meter(lambda rank: 0, None) as meter:
        meter.begin("passes")
        out = kernels.padded_attention(counted.append)(q, k, k, mask, 1.0)
        meter.begin("")
    assert out.shape == q.shape
    assert counted == [rows * heads * queries * keys * 2 * d * (2 if masked else 1)]
    floats = (queries + keys) * d + queries * (d + 1)  # inputs, output, one number for each query
    assert meter.phases[0].peak == {"activations": 4 * rows * heads * floats}


# -- report ------------------------------------------------------------------------------------------------------


def figures(rank: int = 32, stage: int = 1, passes: int = 50) -> Figures:
    """Bytes in GB: 10 of weights, 20 of gradients, and activations in the passes."""
    gb = 10**9
    base = {"weights": 10 * gb, "gradients": 20 * gb}
    phases = [Phase(name, dict(base), 0, 1.0, 1) for name in PHASES]
    phases[1].peak["activations"] = passes * gb
    phases[1].flops = 3 * 10**12
    calls = [
        Collective(
            "passes", "alltoall_base_", "EXPERT_MODEL_PARALLEL_GROUP", list(range(0, 32, 4)), True, "bfloat16",
            10, 5 * gb,
        ),
        Collective("passes", "allreduce_", "TENSOR_MODEL_PARALLEL_GROUP", [32], False, "float32", 1, gb),
    ]  # fmt: skip
    return Figures(
        rank, 256, stage, 8, 8, 3_000_000_000, 8, 16384, 8192, {**base, "activations": gb // 2}, phases, calls,
        {"update: item() of a float32": 1}, gb,
    )  # fmt: skip


def test_the_report_shows_memory_and_traffic_by_category() -> None:
    text = describe(
        load_config(ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml"), [figures()], 0.0
    )
    rows = {
        line[: line.rindex("  ")].strip(): line.split("  ")[-1].strip()
        for line in text.splitlines()
        if "  " in line
    }
    assert rows["memory at its peak, GB"] == "80"
    assert rows["that is while"] == "forward and backward"
    assert rows["activations"] == "50"
    assert rows["left over after the step, GB"] == "0.5"
    assert rows["traffic across nodes, GB"] == "5" and rows["traffic inside nodes, GB"] == "0"
    assert (
        "alltoall_base  expert model parallel  8: 0-28 by 4  across nodes  bfloat16     10      500   5"
        in text
    )
    assert "allreduce" not in text  # in a group of one rank nothing travels


def test_a_rank_that_exceeds_gpu_memory_is_reported_once() -> None:
    assert problems([figures()], 80.0, 0.0) == []
    assert problems([figures()], None, 1e12) == []
    assert problems([figures()], 79.0, 0.0) == [
        "stage 1 (rank 32): forward and backward needs 80 GB, a GPU has 79 GB; the largest part is activations, 50 GB"
    ]
    (problem,) = problems([figures()], 80.0, 55e9)
    assert "scoring pass needs 30 GB beside an engine of 55 GB, a GPU has 80 GB; " in problem


def test_rank_and_group_descriptions() -> None:
    assert ranks_in_words([0, 1, 2, 3]) == "4: 0-3"
    assert ranks_in_words([0, 8, 16]) == "3: 0-16 by 8"
    assert ranks_in_words([0, 1, 8, 9]) == "4: 0, 1 ... 9"
    assert group_name("EXPERT_MODEL_PARALLEL_GROUP") == "expert model parallel"
    assert group_name("default_pg") == "all ranks"


def test_figures_survive_json() -> None:
    rank_figures = figures()
    assert Figures.of_json(json.loads(json.dumps(rank_figures.as_json()))) == rank_figures
    assert rank_figures.worst.name == "passes"


# -- command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "0"], "--gpu-memory 0.0: expected a finite number of GB above 0"),
        (["--skew", "0.5"], "--skew 0.5: expected 1 or more, and finite"),
        (["--rank", "7"], "--rank 7: expected 0 to 0, the ranks of parallel"),
        (["parallel.pp=5"], "parallel.pp = 5: expected at most the 3 layers of"),
    ],
)
def test_bad_requests_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["rehearse", str(ROOT / "configs/quickstart.yaml"), *arguments]) == 2
    assert f"rlsys: error: {message}" in capsys.readouterr().err


def test_a_rank_that_fails_and_one_that_is_too_big_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(path: Path, overrides: list[str], request: Request) -> Figures:
        if request.rank == 1:
            raise rehearse.RankFailed(["File trainer.py, line 1", "RuntimeError: shapes differ"], "passes")
        return figures(0, 0)

    monkeypatch.setattr(rehearse, "run_rank", run)
    code = main.main(
        ["rehearse", str(ROOT / "configs/quickstart.yaml"), "parallel.pp=2", "--gpu-memory", "60", "--json"]
    )
    captured = capsys.readouterr()
    assert code == 1
    assert len(json.loads(captured.out)["ranks"]) == 1
    last = captured.err.splitlines()[-1]
    assert "last stage (rank 1) fails in passes: RuntimeError: shapes differ" in last
    assert "first stage (rank 0): forward and backward needs 80 GB, a GPU has 60 GB" in last


def test_stand_ins_refuse_an_upstream_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input: Any) -> None:
        """Not what it was."""

    monkeypatch.setattr(stand_ins.TopKRouter, "forward", forward)
    setting = stand_ins.Setting(under(FakeTensors()), 1.0, list, torch.float32)
    expected = r"rlsys.rehearse.stand_ins.routes: TopKRouter.forward no longer contains"
    with pytest.raises(PatchError, match=expected), stand_ins.installed({"always"}, setting):
        pass


def test_stand_ins_are_removed_with_their_context() -> None:
    setting = stand_ins.Setting(under(FakeTensors()), 1.0, list, torch.float32)
    upstream = {s.name: getattr(s.owner, s.attribute) for s in stand_ins.STAND_INS}
    with stand_ins.installed({"always"}, setting):
        assert any(getattr(s.owner, s.attribute) != upstream[s.name] for s in stand_ins.STAND_INS)
    assert {s.name: getattr(s.owner, s.attribute) for s in stand_ins.STAND_INS} == upstream


def test_neighbouring_experts_represent_the_other_local_experts() -> None:
    assert stand_ins.representatives(range(4, 8)) == {4: 3, 5: 1}
    assert stand_ins.representatives([0, 2, 3, 4]) == {2: 3, 3: 1}
    assert stand_ins.representatives([0, 2]) == {0: 1, 2: 1}
    assert stand_ins.representatives([7]) == {7: 1} and stand_ins.representatives([]) == {}


def test_every_stand_in_has_a_reason_and_an_upstream_target() -> None:
    registry = stand_ins.STAND_INS
    assert len({s.name for s in registry}) == len(registry)
    for stand_in in registry:
        assert stand_in.reason and stand_in.upstream and hasattr(stand_in.owner, stand_in.attribute)


@pytest.mark.parametrize("stand_in", stand_ins.STAND_INS, ids=lambda s: s.name)
def test_a_stand_in_matches_the_function_it_replaces(stand_in: stand_ins.StandIn) -> None:
    """A rehearsal installs some of them only: a layout, a family or a GPU decides which."""
    source = inspect.getsource(getattr(stand_in.owner, stand_in.attribute))
    missing = [fragment for fragment in stand_in.fragments if fragment not in source]
    assert not missing, f"{stand_in.owner.__name__}.{stand_in.attribute} has not {missing}"
