"""`rlsys explain` on one screen: what, how large, how long, where, and what is odd."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launch.diagram import Row, draw, group_nodes, ranges
from rlsys.cli import main
from rlsys.cli.explain import describe_run, render_plain, render_rich
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.flops import crossover_length, visited_parameters
from rlsys.core.machines import machines
from rlsys.obs.metrics import MetricsWriter
from rlsys.planner.capacity import forecast_step
from rlsys.planner.duration import describe_forecast, format_duration, measured_duration
from rlsys.planner.layout import lay_out

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
EXPERIMENTS = ROOT / "configs" / "experiments"


def config(name: str, *overrides: str) -> Config:
    return load_config(EXPERIMENTS / f"{name}.yaml", overrides)


def picture(made: Config) -> list[str]:
    folds = group_nodes(lay_out(made), [], made.launch.nodes)
    return [line.plain.rstrip() for line in draw(folds, made.launch.gpus_per_node)]


def test_equal_nodes_are_shown_once() -> None:
    assert picture(config("glm-4.5-air_64gpu_disaggregated")) == [
        "nodes 0-3: each of the 4",
        "  trainer    ■ ■ ■ ■ ■ ■ ■ ■   8 ranks",
        "nodes 4-7: each of the 4",
        "  engine     a a a a a a a a   1 engine of 8 ranks",
    ]


def test_engines_of_one_node_have_different_letters() -> None:
    configuration = config("qwen3-30b-a3b_8gpu_colocated", "engine.count=3", "engine.tp=2")
    assert picture(configuration)[-1] == "  engine     a a b b c c · ·   3 engines of 2 ranks"


def test_large_nodes_and_nodes_without_gpus_are_described_as_text() -> None:
    wide = config("qwen3-30b-a3b_8gpu_colocated", "launch.gpus_per_node=32", "engine.count=2", "engine.tp=4")
    assert picture(wide)[-1] == "  engine     2 engines of 4 ranks, GPU 0-7"
    assert picture(load_config(QUICKSTART)) == ["node 0", "  trainer    1 rank", "  engine     1 engine"]
    assert Row("reference", 1).label == "1 process"


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert ranges([]) == ""


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*gpu*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_fits_one_screen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    screen, _ = describe_run(load_config(path), 80.0)
    lines = render_plain(screen).splitlines()
    assert len(lines) <= 50
    assert [line for line in lines if line and not line.startswith(" ")][1:] == [
        "what", "size", "time", "where", "odd",
    ]  # fmt: skip
    assert any("H100s at 30%" in line for line in lines)


def test_the_screen_of_the_quickstart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Captured output is no terminal: plain lines, none of them wrapped."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlsys.cli.preflight.check_start", lambda _: ["NOT CHECKED: the moon"])
    assert main.main(["explain", str(QUICKSTART), f"run.dir={tmp_path / 'run'}"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "  one step trains      16 groups x 8 samples = 128 samples\n" in output
    assert "  algorithm            advantage grpo, loss clip, reducer token_mean, anchor mu\n" in output
    assert "  duration             not estimated without GPUs" in output
    assert "odd\n  NOT CHECKED: the moon\n" in output
    assert "python -P -m" not in output and "grace_seconds" not in output


def test_the_config_and_the_commands_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rlsys.cli.preflight.check_start", lambda _: [])
    assert main.main(["explain", str(QUICKSTART), "--config", "trainer.lr=0.5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["lr"] == 0.5
    assert main.main(["explain", str(QUICKSTART), "--commands"]) == 0
    output = capsys.readouterr().out
    assert (
        "python -P -m rlsys.rollout.service" in output
        and "(port 0: a free port is chosen at the start)" in output
    )


def test_terminal_output_has_colours_and_wrapped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    screen, _ = describe_run(config("qwen3-30b-a3b_16gpu_disaggregated"), 80.0)
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=100, color_system="standard").print(render_rich(screen))
    assert "\x1b[35m■" in out.getvalue(), "the trainer's GPUs"
    assert len(out.getvalue().splitlines()) <= 60


def test_explain_reports_the_measured_step_time_of_a_started_run(tmp_path: Path) -> None:
    configuration = load_config(QUICKSTART, [f"run.dir={tmp_path}", "trainer.steps=10"])
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    for n in (1, 2, 3):
        writer.write("step", n, time_step=20.0 + n)
    writer.close()
    screen, _ = describe_run(configuration, 80.0)
    (fact,) = dict(screen.parts)["time"]
    assert fact[1] == "steps take 22 s each; the remaining 7 take about 2.57 minutes"


def test_durations_by_hand() -> None:
    expected = ["0.12 s", "60 s", "2.5 minutes", "2.5 hours", "10 days"]
    assert [format_duration(s) for s in (0.123, 59.6, 150, 9000, 864000)] == expected
    assert measured_duration([], 3) is None
    configuration = config("qwen3-30b-a3b_8gpu_colocated")
    hf = HFConfig.read(ROOT / "configs" / "models" / "Qwen3-30B-A3B")
    tokens = configuration.rollout.max_response_tokens
    # 3.3 B parameters see a token, without the embedding's 0.3; attention comes on top.
    assert visited_parameters(hf) == pytest.approx(3.04e9, rel=0.02)
    assert crossover_length(hf) == pytest.approx(2 * 3.04e9 / (48 * 32 * 256), rel=0.02)
    forecast, two_epoch_forecast = (
        describe_forecast(c, forecast_step(c, hf, machines()["h100"]))
        for c in (configuration, config("qwen3-30b-a3b_8gpu_colocated", "algo.epochs=2"))
    )
    assert forecast != two_epoch_forecast
    assert f"responses of 1362 tokens on average and up to {tokens}" in forecast
