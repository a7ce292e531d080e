"""A real run as people see it: in Chromium, by Debian's Prometheus and in trackers, killed with -9 and resumed.

One run for all of it, because the engine's start takes most of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import yaml

from launch.exporter import targets_path
from rlsys.obs.metrics import read_metrics
from rlsys.obs.otlp import is_available
from rlsys.viewer.trackers.tracker import PACKAGES
from tests.helpers.browser import CHROMIUM, Page, browser
from tests.helpers.otlp_receiver import Receiver, running_receiver
from tests.helpers.runs import RLSYS, ROOT
from tests.helpers.sessions import Session, check_ledger, command_line, step_lines
from tests.helpers.supervisor_stage import free_port, wait_until
from tests.helpers.tracker_files import READERS, first_values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus"
    ),
]

STEPS = 24
TRACKERS = [n for n in ("wandb", "mlflow") if importlib.util.find_spec(PACKAGES[n])]
"""Those that are installed."""
SPANS = is_available()
"""The extra otel is installed."""
APRIL = (
    f"trainer.steps={STEPS}", "rollout.over_provision=2", "rollout.max_staleness=6", "rollout.keep_groups=4",
    "rollout.max_response_tokens=160", "eval.interval=5", "engine.start_timeout=300", "launch.metrics_port=0",
    f"run.trackers=[{','.join(TRACKERS)}]", f"run.spans={str(SPANS).lower()}",
)  # fmt: skip
MONITORING = ROOT / "configs" / "monitoring"
Ask = Callable[[str], list[dict[str, Any]]]


def start(folder: Path) -> Session:
    return Session(folder, *APRIL)


@contextlib.contextmanager
def prometheus(run: Path, place: Path) -> Iterator[Ask]:
    """With the shipped rules and config, but for where it finds runs and how often it looks. Gives its queries."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(MONITORING / "rules.yml")]
    (found_by,) = config["scrape_configs"][0]["file_sd_configs"]
    found_by["files"], found_by["refresh_interval"] = [str(targets_path(run).parent / "*.json")], "1s"
    path = place / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={path}", f"--web.listen-address={address}"]

    def ask(expr: str) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/query?query={quote(expr)}") as answer:
                return list(json.load(answer)["data"]["result"])
        except OSError:  # it starts
            return []

    with subprocess.Popen(
        [*command, f"--storage.tsdb.path={place / 'tsdb'}"], stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield ask
        finally:
            process.terminate()


@contextlib.contextmanager
def dashboard(run: Path) -> Iterator[str]:
    """`rlsys dash` as a user starts it. Gives the link that it prints."""
    command = [*RLSYS, "dash", str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)


def kill_all(session: Session) -> None:
    """The supervisor, the trackers' process and everything else of the run, at once."""
    doomed = session.processes()
    assert not TRACKERS or any("rlsys.viewer.trackers.follow" in command_line(p) for p in doomed)
    session.kill()
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed)


async def test_a_real_run_live_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, pictures = tmp_path / "runs" / "seen", tmp_path / "pictures"
    pictures.mkdir()
    with contextlib.ExitStack() as until_the_end:
        receiver = until_the_end.enter_context(running_receiver())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        session = start(run)
        until_the_end.callback(lambda: session.kill())
        await asyncio.to_thread(session.wait_for, targets_path(run).exists)
        ask = until_the_end.enter_context(prometheus(run, tmp_path))
        link = until_the_end.enter_context(dashboard(run))
        async with browser(tmp_path) as page:
            await page.size(1280, 900)
            await page.open(link)
            page.home = link.split("?")[0]
            served = "rlsys_engine_weight_version >= 1"
            await asyncio.to_thread(
                session.wait_for, lambda: bool(ask(served)), 0.5
            )  # an engine starts for minutes
            await page.until("document.querySelector('.engine .pill.good')?.innerText === 'serving'")
            await page.picture(pictures / "1_live.png", whole=True)
            await asyncio.to_thread(session.wait_for, lambda: all_roles_are_read(ask), 0.5)
            assert ask("ALERTS{alertstate='firing'}") == []
            await parked_samples_are_shown(page, pictures)
            await asyncio.to_thread(session.wait_for, lambda: step_lines(run) >= 3)
            await page.open(f"{page.home}#/")
            await page.picture(pictures / "2_live.png", whole=True)
            await asyncio.to_thread(session.wait_for, lambda: step_lines(run) >= 4)
            kill_all(session)
            await asyncio.to_thread(wait_until, lambda: len(ask("up == 0")) == 2)
            await page.open(f"{page.home}#/")
            assert "is not running" in await page.text(".engines")
            await page.picture(pictures / "3_killed.png")

            session = start(run)
            await asyncio.to_thread(session.wait_for, lambda: all_roles_are_read(ask), 0.5)
            code, output = await asyncio.to_thread(session.end)
            assert code == 0, output[-3000:]
            await asyncio.to_thread(wait_until, lambda: ask("up") == [])  # ended: not down
            await what_was_trained_is_shown(page, run, pictures)
            assert page.errors == []
    check_ledger(run)
    records = first_values(run)
    assert {s for kind, s in records if kind == "step"} == set(range(1, STEPS + 1))
    assert {s for kind, s in records if kind == "eval"} == {0, *range(5, STEPS, 5), STEPS}
    for name in TRACKERS:
        assert READERS[name](run) == records, name
    if SPANS:
        spans_came(receiver, run)


def all_roles_are_read(ask: Ask) -> bool:
    """Both kinds of targets are up, and each role has told something of a run that trains. SGLang's names have
    a colon, which some versions of Prometheus replace."""
    if {r["metric"]["job"] for r in ask("up == 1")} != {"rlsys", "sglang"}:
        return False
    roles = {r["metric"]["role"].partition("-")[0] for r in ask("rlsys_role_up == 1")}
    queries = (
        "rlsys_trainer_step >= 1", "rlsys_rollout_issued > 0", "rlsys_engine_weight_version >= 1",
        "{__name__=~'sglang.num_running_reqs'}",
        "rlsys_trainer_eval_accuracy", "rlsys_quiet_seconds{run='seen'}",
    )  # fmt: skip
    return roles == {"engine", "rollout", "trainer"} and all(ask(expr) for expr in queries)


async def parked_samples_are_shown(page: Page, pictures: Path) -> None:
    rows = "document.querySelectorAll('a.row .text:not(.prompt)').length"
    looks = 0
    while not await page.evaluate(
        rows
    ):  # between a take and its push some are parked; the bound is the test's
        looks += 1
        await page.open(f"{page.home}#/samples?run=0&status=parked&order=longest&look={looks}")
    await page.picture(pictures / "2_parked.png")
    await page.evaluate("document.querySelector('a.row').click()")
    await page.until("document.querySelectorAll('.tokens span').length > 0")
    await page.picture(pictures / "2_parked_sample.png")


async def what_was_trained_is_shown(page: Page, run: Path, pictures: Path) -> None:
    """Curves of all steps; a sample of several weight versions with its interrupts; gaps, advantages and groups."""
    await page.open(f"{page.home}#/")
    await page.until("document.querySelectorAll('.chart polyline').length > 8")
    await page.picture(pictures / "4_ended.png", whole=True)
    kept_samples = [s for s in samples(run, "--resumed", "--longest") if s["kept"]]
    versions = {s["sample"]: {p["version"] for p in s["parts"]} for s in kept_samples}
    most = max(kept_samples, key=lambda s: (len(versions[s["sample"]]), s["tokens"]))
    assert len(versions[most["sample"]]) >= 3
    await page.open(f"{page.home}#/sample?run=0&sample={most['sample']}")
    cuts = await page.evaluate("document.querySelectorAll('.tokens .cut').length")
    assert cuts == len({tokens for tokens, _ in most["interrupts"]}) >= 2
    classes = "new Set([...document.querySelectorAll('.tokens span:not(.cut)')].map(s => s.className)).size"
    assert await page.evaluate(classes) == min(8, len(versions[most["sample"]]))
    page_text = (await page.text(".tokens")).replace("interrupted", "")
    assert "".join(page_text.split()) == "".join(most["response"].split())
    await page.picture(pictures / "5_versions.png")
    scored = next(s for s in kept_samples if s["logp"] and any(s["advantages"]))
    await page.open(f"{page.home}#/sample?run=0&sample={scored['sample']}")
    for view in ("gap", "advantage"):
        await page.evaluate(f"document.querySelector('[data-view={view}]').click()")
        await page.picture(pictures / f"6_{view}.png")
    await page.open(f"{page.home}#/samples?run=0&step={STEPS}")
    assert await page.evaluate("document.querySelectorAll('a.row').length") == 16
    await page.picture(pictures / "7_samples.png")
    await page.size(1280, 900, dark=True)
    await page.open(f"{page.home}#/group?run=0&group={scored['group']}")
    assert await page.evaluate("document.querySelectorAll('.columns .card').length") == 4
    await page.picture(pictures / "8_group_dark.png")
    await page.size(390, 844)
    await page.open(f"{page.home}#/")
    await page.picture(pictures / "9_phone.png", whole=True)


def spans_came(receiver: Receiver, run: Path) -> None:
    """A step since the resume has its stages, and links to the spans of its samples, each in a trace of its own."""
    resumed_at = max(e["step"] for e in read_metrics(run).runs if e["event"] == "resume")
    steps = {s.attributes["rlsys.step"]: s for s in receiver.named("step")}
    assert set(range(resumed_at + 1, STEPS + 1)) <= steps.keys()
    last = steps[STEPS]
    assert {s.name for s in receiver.spans if s.parent == last.span} == {"rollout", "train", "push"}
    sample_spans = {(s.trace, s.span): s for s in receiver.named("sample")}
    assert (
        len(last.links) == len({trace for trace, _ in last.links}) == 16
        and set(last.links) <= sample_spans.keys()
    )
    event_names = [[name for name, _, _ in sample_spans[link].events] for link in last.links]
    assert all(events[-1] == "reward" for events in event_names) and any(
        "interrupt" in events for events in event_names
    )


def samples(run: Path, *options: str) -> list[dict[str, Any]]:
    """As the terminal tells them."""
    command = [*RLSYS, "samples", str(run), *options, "--n", "256", "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]
