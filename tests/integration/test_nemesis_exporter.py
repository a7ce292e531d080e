"""Seeded schedules of faults on a launch with an exporter, and on the link to it, while a run writes its metrics.

Supervisor and exporter are real. The checker knows each value by itself: none that is told is another step's, no
line is lost after a fault, no fault of a scrape ends the run.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.ports import free_ports
from rlsys.obs.metrics import MetricsWriter
from tests.helpers.process_faults import ServerProcess
from tests.helpers.proxy import Proxy
from tests.helpers.servers import ROOT
from tests.integration.test_nemesis_dashboard import ask, kind_of, reward_of
from tests.integration.test_nemesis_services import draw

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

FAULTS = ("killed", "stopped", "disk full", "second owner", "cut", "delayed", "doubled", "flipped", "none")
START_SECONDS = 120.0
"""A guard, no claim."""


class Launch(ServerProcess):
    """A launch on a folder, started again at the same port when it was killed, behind a link."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_ports("127.0.0.1", 1)[0]
        self.link = Proxy(self._port)
        self._opener = urllib.request.build_opener()
        self.refusals = Counter[str]()
        self.start()

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.helpers.exporter_stage", str(self._folder), str(self._port)]

    def start(self) -> None:
        with (self._folder / "launch.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=log, stderr=log)
        self._last_step = 0

    def scrape(self) -> dict[str, float] | None:
        """The unlabelled metrics and whether the trainer runs; None: there is no answer now."""
        try:
            text = ask(self._opener, f"http://127.0.0.1:{self.link.port}/metrics").decode()
        except Exception as e:  # noqa: BLE001  (of a link with faults: no connection, a status, no HTTP)
            self.refusals[kind_of(e)] += 1
            return None
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name: s.value for s in samples if s.labels in ({}, {"role": "trainer"})}

    def step(self) -> int:
        """The last step that is told, with its own reward, and never one before that of the last scrape; 0: none."""
        if (metrics := self.scrape()) is None or "rlsys_trainer_step" not in metrics:
            return 0
        step = int(metrics["rlsys_trainer_step"])
        assert metrics["rlsys_trainer_reward"] == reward_of(step) and step >= self._last_step, metrics
        self._last_step = step
        return step

    def wait_for(self, step: int) -> None:
        """Until this step is told; 0: until it answers."""
        until = time.monotonic() + START_SECONDS
        while self.scrape() is None if step == 0 else self.step() < step:
            assert self.process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return (self._folder / "launch.log").read_text()[-3000:]

    def close(self) -> None:
        self.heal()
        self.process.terminate()
        self.process.wait()
        self.link.close()


def run_launch(folder: Path, seed: int, more: int) -> None:
    rng = random.Random(seed)
    schedule = draw(rng, FAULTS, more)
    print(f"{seed}: {', '.join(schedule)}")
    with contextlib.closing(Launch(folder)) as launch:
        launch.wait_for(0)
        step, writer = 0, MetricsWriter(folder / "run")
        for fault in schedule:
            launch.inject_fault(fault, rng)
            for _ in range(rng.randrange(1, 20)):
                step += 1
                writer.write("step", step, reward=reward_of(step))
                if fault != "stopped":
                    launch.step()
            launch.heal()
            launch.wait_for(step)
        metrics = launch.scrape()
        assert metrics is not None and metrics["rlsys_role_up"] == 1
        print(f"{step} steps, not answered: {dict(launch.refusals)}")
    assert "Traceback" not in launch.log(), launch.log()


def test_an_exporter_reports_the_newest_step_after_each_fault(tmp_path: Path) -> None:
    run_launch(tmp_path, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_an_exporter_reports_the_newest_step_in_longer_schedules(seed: int, tmp_path: Path) -> None:
    run_launch(tmp_path, seed, 20)
