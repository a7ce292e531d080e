"""What Prometheus reads of a run; the shipped rules and the dashboard ask for nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from launch.exporter import Exporter, serve_metrics, targets_path
from launch.process import RoleStatus
from rlsys.core.errors import UserError
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.supervisor_stage import free_port, wait_until

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "configs" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: apt-get install prometheus")
STEP = {
    "kind": "step", "step": 3, "time": 990.0, "reward": 0.5, "response_len_p50": 12, "response_len_p99": 90,
    "mismatch_mean": 1e-7, "mismatch_p999": 1e-6, "effective_groups": 4, "time_rollout": 2.0, "time_train": 1.0,
    "time_sync": 0.5, "off_policy_share": 0.25, "mismatch_hist": [1, 2], "kl": None,
}  # fmt: skip
EVAL = {"kind": "eval", "step": 3, "time": 995.0, "accuracy": 0.75, "prompts": 4}


class Quiet:
    """A display."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def phase(self, text: str) -> None:
        self.heard.append("phase")

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        self.heard.append("entry")

    def status(self, status: dict[str, Any]) -> None:
        self.heard.append("status")


async def rig_status(folder: Path) -> dict[str, Any]:
    """As a real manager gives it, with the engines as a router does."""
    folder.mkdir()
    async with rig(make_config(folder), lambda s: 3) as r:
        status = r.manager.status()
    engine = {
        "state": "version 4",
        "serving": True,
        "requests": 2,
        "tokens": 30,
        "weight_version": 4,
        "deaths": 0,
    }
    return {
        **status,
        "engine_figures": {
            "http://127.0.0.1:1": engine,
            "http://127.0.0.1:2": {**engine, "state": "dead", "serving": False},
        },
    }


@pytest.fixture
async def exporter(tmp_path: Path) -> Exporter:
    metrics_exporter = Exporter(Quiet(), clock=lambda: 1000.0)
    metrics_exporter.roles = lambda: {"engine-0": RoleStatus(True, 2), "trainer": RoleStatus(False, 1)}
    metrics_exporter.status({**await rig_status(tmp_path / "rig"), "received_tokens": 100})
    metrics_exporter.entry(STEP, live=True)
    metrics_exporter.entry(EVAL, live=True)
    return metrics_exporter


def scrape(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_all_roles_are_exported(exporter: Exporter, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    with serve_metrics(exporter, 0, run, ["http://127.0.0.1:5000/health"]) as port:
        metrics = scrape(port)
        targets = json.loads(targets_path(run).read_text())
    assert [t["targets"] for t in targets] == [[f"127.0.0.1:{port}"], ["127.0.0.1:5000"]]
    assert {t["labels"]["run"] for t in targets} == {"mine"}
    assert not targets_path(run).exists()  # Prometheus forgets a run that has ended
    assert metrics["rlsys_role_up", "trainer"] == 0 and metrics["rlsys_role_starts_total", "engine-0"] == 2
    assert metrics["rlsys_engine_serving", "http://127.0.0.1:2"] == 0
    assert metrics["rlsys_engine_requests", "http://127.0.0.1:1"] == 2
    assert metrics["rlsys_rollout_issued", ""] == 0 and metrics["rlsys_rollout_received_tokens", ""] == 100
    assert metrics["rlsys_trainer_step", ""] == 3 and metrics["rlsys_trainer_reward", ""] == 0.5
    assert (
        metrics["rlsys_trainer_line_seconds", ""] == 10 and metrics["rlsys_trainer_eval_accuracy", ""] == 0.75
    )


def test_the_exporter_forwards_all_events_to_the_display() -> None:
    display = Quiet()
    exporter = Exporter(display)
    exporter.phase("x")
    exporter.status({})
    exporter.entry(STEP, live=False)
    assert display.heard == ["phase", "status", "entry"]


def test_silence_is_measured_until_something_changes() -> None:
    current_time = [0.0]
    exporter = Exporter(Quiet(), clock=lambda: current_time[0])

    def quiet() -> float:
        return next(m.samples[0].value for m in exporter.collect() if m.name == "rlsys_quiet_seconds")

    exporter.status({"received_tokens": 1})
    current_time[0] = 50.0
    exporter.status({"received_tokens": 1})
    assert quiet() == 50.0
    exporter.status({"received_tokens": 2})
    assert quiet() == 0.0


def test_security_h6_scrapes_within_a_second_are_rendered_once(tmp_path: Path) -> None:
    current_time, rendered = [1000.0], 0

    def roles() -> dict[str, RoleStatus]:
        nonlocal rendered
        rendered += 1
        return {"trainer": RoleStatus(True, rendered)}

    exporter = Exporter(Quiet(), clock=lambda: current_time[0])
    exporter.roles = roles
    with serve_metrics(exporter, 0, tmp_path, []) as port:
        for count in (1, 2):
            for _ in range(5):
                assert scrape(port)["rlsys_role_starts_total", "trainer"] == count
            assert rendered == count
            current_time[0] += 1


def test_a_port_in_use_is_one_line(exporter: Exporter, tmp_path: Path) -> None:
    with (
        serve_metrics(exporter, 0, tmp_path, []) as port,
        pytest.raises(UserError, match=rf"launch.metrics_port = {port}: .*in use"),
        serve_metrics(exporter, port, tmp_path, []),
    ):
        pass


def asked_for() -> dict[str, list[str]]:
    """Metric names in each alert and in each panel of the dashboard."""
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    expressions = {rule["alert"]: [rule["expr"]] for rule in rules}
    expressions |= {panel["title"]: [t["expr"] for t in panel["targets"]] for panel in panels}
    return {name: re.findall(r"rlsys_\w+|^up\b", " ".join(exprs)) for name, exprs in expressions.items()}


@pytest.mark.parametrize("name", asked_for())
def test_rules_and_dashboard_query_only_existing_metrics(name: str, exporter: Exporter) -> None:
    metric_names = {sample.name for family in exporter.collect() for sample in family.samples}
    metric_names.add("up")  # of Prometheus itself
    assert asked_for()[name]
    assert set(asked_for()[name]) <= metric_names


@needs_promtool
def test_promtool_accepts_the_rules_and_config() -> None:
    for kind, file in (("rules", "rules.yml"), ("config", "prometheus.yml")):
        process = subprocess.run(
            [str(PROMTOOL), "check", kind, file], cwd=MONITORING, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stdout + process.stderr


SERIES = {
    "RunStalls": ("rlsys_quiet_seconds", "0+60x40"),
    "RunGone": ('up{job="rlsys"}', "0x40"),
    "RolloutSilent": ("rlsys_rollout_silent_seconds", "0+60x40"),
    "RoleDown": ('rlsys_role_up{role="trainer"}', "0x40"),
    "EngineNotServing": ('rlsys_engine_serving{engine="e"}', "0x40"),
    "TokensLost": ("rlsys_rollout_lost", "0x30 5x10"),
    "NoSignal": ("rlsys_trainer_effective_groups", "0x40"),
    "Mismatch": ("rlsys_trainer_mismatch_p999", "0.9x40"),
    "RewardsFail": ("rlsys_rollout_reward_failed", "0x30 2x10"),
}
"""Alert -> a series of minutes that it is for."""


@needs_promtool
def test_each_alert_fires_only_on_its_own_condition(tmp_path: Path) -> None:
    names = [
        rule["alert"] for rule in yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"][0]["rules"]
    ]
    assert sorted(SERIES) == sorted(names)
    tests = []
    for alert, (name, values) in SERIES.items():
        promql_tests = [
            {"expr": f'count(ALERTS{{alertname="{n}",alertstate="firing"}}) or vector(0)', "eval_time": "35m",
             "exp_samples": [{"labels": "{}", "value": int(n == alert)}]}
            for n in names
        ]  # fmt: skip
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values}],
                "promql_expr_test": promql_tests,
            }
        )
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump(
            {"rule_files": [str(MONITORING / "rules.yml")], "evaluation_interval": "1m", "tests": tests}
        )
    )
    process = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus here: apt-get install prometheus"
)
def test_prometheus_finds_a_run_and_its_engines_by_the_shipped_config(
    exporter: Exporter, tmp_path: Path
) -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(MONITORING / "rules.yml")]
    (found_by,) = config["scrape_configs"][0]["file_sd_configs"]
    assert found_by["files"] == ["../../runs/prometheus/*.json"]  # from configs/monitoring
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    found_by["files"] = [str(targets_path(run).parent / "*.json")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    engine, thread = start_http_server(
        0, "127.0.0.1", CollectorRegistry()
    )  # as SGLang answers on its own port
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--web.listen-address={address}",
    ]
    with (
        serve_metrics(exporter, 0, run, [f"http://127.0.0.1:{engine.server_port}/health"]),
        subprocess.Popen(
            [*command, f"--storage.tsdb.path={tmp_path / 'db'}"], stderr=subprocess.DEVNULL
        ) as process,
    ):

        def ask(expr: str) -> list[dict[str, Any]]:
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/query?query={quote(expr)}") as answer:
                    return list(json.load(answer)["data"]["result"])
            except OSError:  # it starts
                return []

        try:
            wait_until(lambda: {r["metric"]["job"] for r in ask("up == 1")} == {"rlsys", "sglang"})
            assert [r["metric"]["run"] for r in ask("rlsys_trainer_reward == 0.5")] == ["mine"]
            assert [r["metric"]["role"] for r in ask("rlsys_role_up == 0")] == ["trainer"]
        finally:
            process.terminate()
            engine.shutdown()
            engine.server_close()
            thread.join()
