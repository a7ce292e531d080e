"""`rlsys plan`: simulated runs agree with what can be computed by hand, and with themselves."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli.main import main
from rlsys.config import Config, dump_config, load_config
from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from rlsys.core.machines import machines
from rlsys.ledger.reader import Length
from rlsys.planner import calibration
from rlsys.planner.costs import Costs, estimate_costs
from rlsys.planner.lengths import LengthDistribution, long_tail, read_trace
from rlsys.planner.settings import Setting, settings
from rlsys.planner.simulated_engine import FIRST_PROMPT, SimulatedEngine
from rlsys.planner.simulation import Forecast, simulate
from rlsys.planner.virtual_time import run_virtual
from tests.helpers.rollout_rig import Rig, make_config

ROOT = Path(__file__).resolve().parents[3]
BIG = ROOT / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml"
SMALL = {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 200}
COSTS = Costs(pass_overhead=0.01, decoded_token=0.001, prompt_token=0.001, trained_token=0.002, push=0.5)


def config(tmp_path: Path, **sections: Any) -> Config:
    rollout = {**SMALL, **sections.pop("rollout", {})}
    return make_config(tmp_path, rollout=rollout, **sections)


def forecast(made: Config, lengths: LengthDistribution, costs: Costs = COSTS, steps: int = 4) -> Forecast:
    return simulate(made, costs, lengths, prompt_tokens=10, steps=steps)


def test_a_synchronous_step_matches_the_hand_computed_time(tmp_path: Path) -> None:
    """16 responses of 50 tokens: one prefill that makes the first token, 49 passes, training, a push, and one pass
    over its canaries: four prompts, and four whole responses."""
    result = forecast(config(tmp_path), LengthDistribution([50], 200))
    by_hand = COSTS.prefill(16 * 10) + 49 * COSTS.decode(16, 0) + COSTS.train([(60, 0)] * 16)
    by_hand += COSTS.push + COSTS.prefill(4 * 10 + 4 * 60)
    assert result.step_seconds == pytest.approx(by_hand, rel=0.02)
    assert result.train_seconds == pytest.approx(COSTS.train([(60, 0)] * 16))
    assert result.tokens_per_s == pytest.approx(16 * 50 / result.step_seconds)
    assert (result.staleness, result.off_policy, result.recomputed, result.dropped) == (0, 0, 0, 0)


def test_engines_have_so_many_slots_and_wait_for_the_longest(tmp_path: Path) -> None:
    """16 responses in 8 slots: two waves."""
    run_config = config(tmp_path, engine={"max_running_requests": 8})
    result = forecast(run_config, LengthDistribution([50], 200))
    waves = 2 * (COSTS.prefill(8 * 10) + 49 * COSTS.decode(8, 0))
    assert result.rollout_seconds == pytest.approx(waves, rel=0.03)


def test_decoding_waits_during_the_prefill_of_another_request() -> None:
    """Two responses of ten tokens, a second for each pass; the second one comes when the first has four tokens."""
    engine = SimulatedEngine("http://e", Costs(pass_overhead=1.0), lambda _seed, _prompt: 10, 1, 8, 1000, 1)

    async def ended(at: float) -> float:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(at)
        sampling = {"max_new_tokens": 100, "sampling_seed": 0}
        body = {"rid": str(at), "input_ids": [FIRST_PROMPT], "sampling_params": sampling}
        assert len([chunk async for chunk in engine.stream(body)]) == 1
        return clock()

    async def both() -> list[float]:
        start, running = asyncio.get_running_loop().time(), asyncio.create_task(engine.run())
        end_times = await asyncio.gather(ended(0.0), ended(3.5))
        running.cancel()
        return [end - start for end in end_times]

    assert run_virtual(both()) == pytest.approx([11, 14])


def test_a_server_takes_requests_in_one_after_another(tmp_path: Path) -> None:
    """Sixteen of them, a tenth of a second each: the last one begins 1.6 s later, in an emptier engine."""
    run_config, lengths = config(tmp_path), LengthDistribution([50], 200)
    at_once, in_turn = (
        forecast(run_config, lengths, replace(COSTS, request=seconds)) for seconds in (0.0, 0.1)
    )
    assert 0.5 < in_turn.rollout_seconds - at_once.rollout_seconds < 1.6
    april = config(tmp_path, rollout={"over_provision": 2, "max_staleness": 8})
    result = forecast(april, lengths, replace(COSTS, request=0.1), steps=8)
    assert result.step_seconds > 1.6, "who is aborted before it was taken in holds up nobody"
    assert result.push_seconds < COSTS.push + COSTS.prefill(4 * 10 + 4 * 60) + 0.2


@pytest.mark.gate
def test_a_long_tail_leaves_slots_idle_and_over_provision_fills_them(tmp_path: Path) -> None:
    tail, costs = long_tail(200), replace(COSTS, prompt_token=2e-5, trained_token=1e-6, push=0.01)
    synchronous = forecast(config(tmp_path), tail, costs, steps=6)
    april = forecast(
        config(tmp_path, rollout={"over_provision": 2, "max_staleness": 32}), tail, costs, steps=12
    )
    assert april.tokens_per_s > 1.2 * synchronous.tokens_per_s
    assert april.idle_slots < synchronous.idle_slots - 0.2
    assert april.staleness > 0 and april.recomputed > 0 and april.off_policy > 0


@pytest.mark.gate
def test_tokens_that_grow_too_old_are_dropped_and_counted(tmp_path: Path) -> None:
    run_config = config(tmp_path, rollout={"over_provision": 3, "max_staleness": 1})
    assert forecast(run_config, long_tail(200), steps=8).dropped > 0.1


def test_a_disaggregated_trainer_overlaps_with_generation(tmp_path: Path) -> None:
    """As slow as the slower of the two, and not their sum."""
    slow = replace(COSTS, trained_token=0.002, push=0.01)
    lengths = LengthDistribution([40, 50, 60], 200)
    rollout = {"over_provision": 2, "max_staleness": 8}
    together = forecast(config(tmp_path, rollout=rollout), lengths, slow, steps=8)
    apart = forecast(
        config(tmp_path, rollout=rollout, launch={"placement": "disaggregated"}), lengths, slow, steps=8
    )
    assert apart.step_seconds < 0.8 * together.step_seconds
    assert apart.step_seconds > 0.95 * apart.train_seconds


@pytest.mark.parametrize("interruption", ["abort", "retract", "in_place"])
def test_every_way_to_interrupt_can_be_planned(tmp_path: Path, interruption: str) -> None:
    """What stays in its engine is not read again."""
    run_config = config(
        tmp_path,
        rollout={"over_provision": 2, "max_staleness": 16},
        router={"interruption": interruption},
        launch={"placement": "disaggregated"},
    )
    result = forecast(run_config, long_tail(200), steps=6)
    assert result.tokens_per_s > 0
    assert (result.recomputed == 0) == (interruption != "abort")


def test_the_same_question_has_the_same_answer(tmp_path: Path) -> None:
    run_config = config(tmp_path, rollout={"over_provision": 1.5, "max_staleness": 8})
    assert forecast(run_config, long_tail(200)) == forecast(run_config, long_tail(200))


@pytest.mark.gate
def test_long_responses_are_planned_in_larger_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_config, lengths = config(tmp_path, rollout={"max_response_tokens": 2000}), long_tail(2000)
    exact = forecast(run_config, lengths, steps=8)
    monkeypatch.setattr("rlsys.planner.simulation._MAX_UNITS", 500)
    rough = forecast(run_config, lengths, steps=8)
    assert rough.step_seconds == pytest.approx(exact.step_seconds, rel=0.05)
    assert rough.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=0.05)


def test_a_generator_that_cannot_be_simulated_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rollout.generator = tools cannot be simulated; expected single_turn"
    ):
        forecast(config(tmp_path, rollout={"generator": "tools"}), LengthDistribution([5], 200))


# -- pools ---------------------------------------------------------------------------------------------------------


def pooled(tmp_path: Path, pools: list[dict[str, Any]], **sections: Any) -> Config:
    return config(
        tmp_path,
        engine={"pools": pools, "max_running_requests": 16},
        launch={"placement": "disaggregated"},
        rollout={"groups_per_step": 8, "over_provision": 1.5, "max_staleness": 8},
        **sections,
    )


@pytest.mark.gate
def test_pools_are_planned_each_at_its_own_speed_and_price(tmp_path: Path) -> None:
    """A rank of the large engines costs twice as much, and they have two and are four times as fast."""
    pools = [{"name": "large", "count": 1, "tp": 2, "cost": 2.0}, {"name": "small", "count": 2}]
    run_config = pooled(tmp_path, pools, router={"strategy": "hardware_affinity"})
    slow = replace(COSTS, prompt_token=1e-4, trained_token=1e-6, push=0.01)
    fast = replace(slow, pass_overhead=slow.pass_overhead / 4, decoded_token=slow.decoded_token / 4)
    result = simulate(
        run_config,
        slow,
        LengthDistribution([40, 80], 200),
        prompt_tokens=20,
        steps=8,
        by_tp={1: slow, 2: fast},
    )
    large, small = result.pools["large"], result.pools["small"]
    assert large.tokens + small.tokens == pytest.approx(1)
    assert large.tokens > 0.6, "one of three"
    assert (large.cost, small.cost) == tuple(
        pytest.approx(1e6 * price / result.tokens_per_s, rel=0.01) for price in (4.0, 2.0)
    )
    alike = simulate(run_config, slow, LengthDistribution([40, 80], 200), prompt_tokens=20, steps=8)
    assert result.tokens_per_s > 1.2 * alike.tokens_per_s


@pytest.mark.gate
def test_tokens_of_exploring_engines_are_not_trained(tmp_path: Path) -> None:
    pools = [{"name": "main", "count": 1}, {"name": "scouts", "count": 1, "role": "explore"}]
    planner = {"name": "explore", "params": {"first": 2, "probes": 4}}
    result = forecast(
        pooled(tmp_path, pools, algo={"planners": [planner]}), LengthDistribution([40, 80], 200)
    )
    assert result.pools["scouts"].tokens > 0.2
    assert result.dropped < 0.27, "groups of equal rewards; what the scouts make is not counted"
    assert result.tokens_per_s > 0


# -- costs and lengths ---------------------------------------------------------------------------------------------


def test_costs_of_a_machine_by_hand() -> None:
    """Decoding one request reads the dense weights and the experts that one token visits; a full batch reads all."""
    run_config = load_config(BIG, ["parallel.pp=1"])
    hf = HFConfig.read(run_config.model.path)
    costs, gpu = estimate_costs(run_config, hf, machines()["h100"]), machines()["h100"]
    read = run_config.engine.tp * gpu.bandwidth * 1e12
    # Qwen3-30B-A3B in bfloat16: 30.5 B parameters, 29 B of them in experts, of which a token visits 8 of 128.
    assert costs.weights == pytest.approx(2 * 1.54e9 / (read * 0.73), rel=0.02)
    assert costs.experts == pytest.approx(2 * 28.99e9 / (read * 0.70), rel=0.01)
    assert costs.expert_fraction == 8 / 128
    flops = run_config.engine.tp * 989e12
    assert costs.prompt_token == pytest.approx(2 * (1.23e9 / 0.73 + 1.81e9 / 0.22) / flops, rel=0.02)
    single_cost, batch_cost = costs.decode(1, 0), costs.decode(10_000, 0)
    assert single_cost == pytest.approx(costs.pass_overhead + costs.weights + costs.experts / 16)
    assert batch_cost > single_cost
    assert costs.decode(64, 1e6) > costs.decode(64, 0)


def test_twice_the_gpus_train_twice_as_fast() -> None:
    run_config = load_config(BIG)
    hf = HFConfig.read(run_config.model.path)
    double = load_config(
        BIG, ["launch.nodes=2", "launch.backend=ray", f"parallel.dp={2 * run_config.parallel.data_parallel}"]
    )
    a, b = (estimate_costs(c, hf, machines()["h100"]).train([(1000, 0)] * 8) for c in (run_config, double))
    assert a == pytest.approx(2 * b)


def test_the_assumed_tail_is_that_of_the_bench() -> None:
    tail = sorted(long_tail(1024).values)
    bench = sorted(json.loads((ROOT / "bench/traces/long_tail.json").read_text())["lengths"])
    for share in (0.1, 0.5, 0.9, 0.99):
        assert tail[int(share * len(tail))] == pytest.approx(bench[int(share * len(bench))], rel=0.1, abs=3)


def test_a_trace_is_cut_at_the_cap_and_a_seed_has_one_length(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"lengths": [5, 500], "source": "mine"}')
    lengths = read_trace(tmp_path / "trace.json", 100)
    assert sorted(lengths.values) == [5, 100]
    assert lengths.sample(7, 1) == lengths.sample(7, 2)


def test_a_prompt_has_the_lengths_of_one_group() -> None:
    lengths = LengthDistribution([5, 6, 90, 80], 85, [[5, 6], [90, 80]])
    of_prompt = [{lengths.sample(seed, prompt) for seed in range(20)} for prompt in range(20)]
    assert {5, 6} in of_prompt and {85, 80} in of_prompt
    assert all(prompt_lengths in ({5, 6}, {85, 80}) for prompt_lengths in of_prompt)
    assert lengths.truncate(50).values == [5, 6, 50, 50]


@pytest.mark.gate
def test_grouping_long_responses_together_changes_the_throughput(tmp_path: Path) -> None:
    """The same lengths: mixed, nearly every group has a long one, and N'/N above 1 wins less."""
    rollout = {"groups_per_step": 8, "over_provision": 2, "max_staleness": 16}
    run_config = config(tmp_path, rollout=rollout)
    alike, mixed = [[20] * 4] * 3 + [[180] * 4], [[20, 20, 20, 180]] * 4
    costs = replace(COSTS, prompt_token=1e-5, trained_token=1e-6, push=0.01)
    together, apart = (
        forecast(run_config, LengthDistribution([n for g in groups for n in g], 200, groups), costs, steps=12)
        for groups in (alike, mixed)
    )
    assert together.tokens_per_s != pytest.approx(apart.tokens_per_s, rel=0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("[1]", "expected JSON"),
        ('{"lengths": []}', "at least one"),
        ('{"lengths": [0]}', "at least 1"),
    ],
)
def test_an_invalid_trace_is_an_error(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=why):
        read_trace(file, 100)


# -- calibration ---------------------------------------------------------------------------------------------------


def write_run(made: Config, steps: int, lines: list[str]) -> None:
    folder = made.run.dir
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "engine-0.log").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(dump_config(made))
    figures = [
        {"kind": "step", "step": i, "time": float(i), "tokens": 1000 + 100 * i, "time_rollout": 3.0,
         "time_sync": 2.25 + 10 * (i == 1),
         "time_train": 2.5 + 1e-3 * (1000 + 100 * i) + 30 * (i == 1)}
        for i in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(f) + "\n" for f in figures))


def decode_line(running: int, seconds: float) -> str:
    rate = running / seconds
    return (
        f"[2026-11-23 08:59:44] Decode batch, #running-req: {running}, #token: 63, token usage: 0.00, "
        f"cpu graph: False, gen throughput (token/s): {rate:.2f}, #queue-req: 0"
    )


@pytest.mark.gate
def test_costs_are_calibrated_from_a_run(tmp_path: Path) -> None:
    """The first step compiles, one line in five counts an idle time: neither moves what is fitted."""
    config = make_config(tmp_path)
    asyncio.run(take_one(config))
    lines = [decode_line(n, 0.02 + 0.0004 * n + 3.0 * (n % 5 == 0)) for n in range(1, 60)]
    lines += [
        "Prefill batch, #new-seq: 9, #new-token: 9000, #cached-token: 0, input throughput (token/s): 9000.0"
    ]
    write_run(config, 8, lines)
    result = calibration.calibrate(tmp_path)
    costs, prompts = result.costs(1), result.prompt_tokens * config.samples_per_step
    assert costs.pass_overhead == pytest.approx(0.02, rel=0.05)
    assert costs.decoded_token == pytest.approx(0.0004, rel=0.05)
    assert costs.prompt_token == pytest.approx((1.0 - costs.pass_overhead) / 9000)
    assert costs.trained_token == pytest.approx(1e-3)
    assert costs.train_step == pytest.approx(2.5 - 1e-3 * prompts)
    again = simulate(config, costs, result.lengths, prompt_tokens=result.prompt_tokens, steps=8)
    assert again.push_seconds == pytest.approx(2.25, rel=0.02)
    assert again.rollout_seconds == pytest.approx(3.0, rel=0.1), (
        "what no log tells is taken from the run's own steps"
    )
    assert set(result.lengths.values) == {7}
    with pytest.raises(
        UserError, match=r"engine\.tp = 2: expected a size of an engine of the --calibrate run, 1"
    ):
        result.costs(2)


async def take_one(config: Config) -> None:
    """Responses of seven tokens."""
    rig = Rig(config, lambda s: 7, _one)
    await rig.start()
    await rig.take(1)
    await rig.manager.close()
    rig.buffer.close()


async def _one(*_: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("steps", "lines", "why"),
    [(2, 50, "2 train steps"), (8, 1, "have 1 lines about decoding; expected at least 5")],
)
async def test_a_run_with_too_few_measurements_cannot_be_calibrated(
    tmp_path: Path, steps: int, lines: int, why: str
) -> None:
    config = make_config(tmp_path)
    rig = Rig(config, lambda s: 7, _one)
    await rig.start()
    rig.buffer.close()
    write_run(config, steps, [decode_line(3, 0.1)] * lines)
    with pytest.raises(UserError, match=why):
        calibration.calibrate(tmp_path)


def test_lengths_of_a_stopped_run_are_not_biased_short() -> None:
    """Of responses in flight one knows that they become longer; and the newest half of the groups counts."""
    old_groups = [[Length(1, True, 5)]] * 4
    new_groups = [
        [Length(10, True, 5), Length(30, True, 5)],
        [Length(60, True, 5)],
        [Length(20, False, None)],
        [],
    ]
    lengths = calibration.lengths_of([*old_groups, *new_groups])
    assert lengths.values[:3] == [10, 30, 60]
    assert lengths.values[3] in (30, 60)


# -- settings and the command --------------------------------------------------------------------------------------


def test_impossible_settings_are_listed_with_the_reason() -> None:
    run_config = load_config(BIG)
    hf = HFConfig.read(run_config.model.path)
    options = list(settings(run_config, hf, 16, machines()["h100"]))
    names = [s.name for s in options if isinstance(s, Setting)]
    assert any(name.startswith("colocated") for name in names)
    small = replace_memory(8.0)
    assert all(isinstance(s, str) for s in settings(run_config, hf, 16, small))
    assert any("GB" in s for s in settings(run_config, hf, 16, small) if isinstance(s, str))


def test_a_batch_that_does_not_divide_becomes_the_nearest_one() -> None:
    """3,000 GPUs: no multiple of 64 GPUs with the same parallelism; the other GPUs train nothing."""
    huge = load_config(ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml")
    options = [
        s
        for s in settings(huge, HFConfig.read(huge.model.path), 3000, machines()["h100"])
        if isinstance(s, Setting)
    ]
    assert options and options[0].config.parallel.world_size <= 3000
    for setting in options:
        c = setting.config
        assert c.samples_per_step % (c.parallel.data_parallel * c.algo.minibatches) == 0
        groups = c.rollout.groups_per_step
        assert (f", {groups} groups a step" in setting.name) == (groups != huge.rollout.groups_per_step)
    assert any("groups a step" in setting.name for setting in options)


def test_a_model_that_does_not_fit_as_written_gets_another_layout() -> None:
    """Float32, and one rank with all of it."""
    run_config = load_config(
        ROOT / "configs/quickstart.yaml", [f"model.path={ROOT}/configs/models/Qwen3-30B-A3B"]
    )
    options = list(settings(run_config, HFConfig.read(run_config.model.path), 8, machines()["h100"]))
    possible = [s for s in options if isinstance(s, Setting)]
    assert possible and "bfloat16" in possible[0].name and len(possible) < len(options)
    assert possible[0].config.parallel.world_size == 8


def replace_memory(gb: float) -> Any:
    gpu = machines()["h100"]
    return type(gpu)(gpu.tflops, gpu.bandwidth, gb, gpu.source)


TINY = [
    "rollout.groups_per_step=16",
    "rollout.group_size=2",
    "algo.minibatches=1",
    "rollout.max_response_tokens=64",
]


@pytest.mark.gate
def test_the_command_names_the_best_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BIG), *TINY, "--steps", "1"]) == 0
    output = capsys.readouterr().out
    assert "slots idle" in output and "best: " in output
    assert "H100 SXM data sheet" in output and "assumed: a long tail" in output


@pytest.mark.full
def test_placements_of_so_many_gpus_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BIG), *TINY, "--gpus", "8", "--gpu", "h200", "--steps", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    names = [s["name"] for s in answer["settings"]]
    assert answer["best"] in names
    assert any(name.startswith("colocated") for name in names)
    assert all(s["tokens_per_s"] > 0 for s in answer["settings"])


@pytest.mark.full
def test_three_thousand_gpus_at_a_reduced_size(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/planning.md with responses of 64 tokens, and few."""
    huge = ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml"
    few = ["rollout.groups_per_step=12", "rollout.max_response_tokens=64"]
    assert main(["plan", str(huge), *few, "--gpus", "3072", "--steps", "1", "--json"]) == 0
    step_seconds = {s["name"]: s["step_seconds"] for s in json.loads(capsys.readouterr().out)["settings"]}
    assert any(name.startswith("colocated, 48 engines, N'/N 1,") for name in step_seconds)
    assert any(name.startswith("disaggregated, 24 engines beside 1536 trainer GPUs") for name in step_seconds)


@pytest.mark.full
def test_the_forecast_for_3072_gpus_matches_the_documentation() -> None:
    """The first row of the table of docs/planning.md; the others take as long."""
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    row = re.search(
        r"^\| colocated, N'/N 1, on-policy \| (.*) s \| (.*) s \| (.*) s \| (.*) \| 1 \|$", page, re.M
    )
    assert row is not None
    run_config = load_config(
        ROOT / "configs/experiments/deepseek-v3_256gpu_colocated.yaml", ["rollout.groups_per_step=36"]
    )
    hf, h100 = HFConfig.read(run_config.model.path), machines()["h100"]
    setting = next(iter(settings(run_config, hf, 3072, h100)))
    assert isinstance(setting, Setting) and setting.name == "colocated, 48 engines, N'/N 1, 0 steps old"
    costs = estimate_costs(setting.config, hf, h100)
    result = simulate(setting.config, costs, long_tail(8192), prompt_tokens=512, steps=2)
    seconds = (result.step_seconds, result.rollout_seconds, result.push_seconds, result.tokens_per_s)
    assert seconds == pytest.approx([float(figure.replace(",", "")) for figure in row.groups()], rel=0.02)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["configs/quickstart.yaml"], "launch.gpus_per_node = 0: expected --gpus N, or --calibrate RUN"),
        ([str(BIG), "--steps", "0"], "--steps 0: expected 1 or more"),
        ([str(BIG), "--gpus", "12"], "--gpus 12: expected at most 8, or a multiple of 8"),
        ([str(BIG), "--gpus", "1"], "no setting can run; colocated, 0 engines"),
        ([str(BIG), "--calibrate", "nowhere"], "nowhere: contains no metrics.jsonl"),
        ([str(BIG), "--gpus", "8", "--calibrate", "runs/x"], "expected only one of them"),
        ([str(BIG), "--trace", "nowhere.json"], "nowhere.json: No such file"),
        (
            ["configs/quickstart_pools.yaml", "--gpus", "8"],
            "engine.pools = wide, small: --gpus lays out equal engines",
        ),
    ],
)
def test_mistakes_end_in_one_line(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *given]) == 2
    assert why in capsys.readouterr().err
