"""Seeded schedules of faults on `rlsys dash`, and on the link to it, while a run writes its metrics.

The checker knows each value by itself: none that is shown is another step's, and no line is lost after a fault.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from launch.ports import free_ports
from rlsys.obs.metrics import MetricsWriter
from tests.helpers.process_faults import ServerProcess
from tests.helpers.proxy import Proxy
from tests.helpers.seen_run import write_run
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS
from tests.integration.test_nemesis_services import draw

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

FAULTS = ("killed", "stopped", "disk full", "second owner", "cut", "delayed", "doubled", "flipped", "none")
ANSWER_SECONDS = 20.0


def ask(opener: urllib.request.OpenerDirector, url: str) -> bytes:
    with opener.open(url, timeout=ANSWER_SECONDS) as answer:
        body: bytes = answer.read()
    return body


def kind_of(error: Exception) -> str:
    return str(error.code) if isinstance(error, urllib.error.HTTPError) else type(error).__name__


class Dash(ServerProcess):
    """`rlsys dash`, started again at the same port, behind a link."""

    def __init__(self, run: Path) -> None:
        self._run, self._port = run, free_ports("127.0.0.1", 1)[0]
        self.link = Proxy(self._port)
        self.refusals = Counter[str]()
        self.start()

    def command(self) -> list[str]:
        return [*RLSYS, "dash", str(self._run), "--port", str(self._port)]

    def start(self) -> None:
        self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._token = self.process.stdout.readline().strip().partition("?token=")[2]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self._logged_in = False

    def curve(self) -> dict[str, list[float]] | None:
        """Of the reward; None: there is no answer now."""
        base = f"http://127.0.0.1:{self.link.port}"
        try:
            if not self._logged_in:
                ask(self._opener, f"{base}/?token={urllib.parse.quote(self._token)}")
                self._logged_in = True
            ask(self._opener, f"{base}/api/runs")  # it reads the new lines
            reward_curve: dict[str, list[float]] = json.loads(
                ask(self._opener, f"{base}/api/curves?names=reward")
            )[0]["reward"]
        except Exception as e:  # noqa: BLE001  (of a link with faults: no connection, a status, no HTTP)
            self.refusals[kind_of(e)] += 1
            return None
        return reward_curve

    def close(self) -> None:
        self.heal()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.link.close()


def reward_of(step: int) -> float:
    return (step * 7919 % 1000) / 1000


def run_dash(folder: Path, seed: int, more: int) -> None:
    rng = random.Random(seed)
    schedule = draw(rng, FAULTS, more)
    print(f"{seed}: {', '.join(schedule)}")
    run, step = write_run(folder), 2
    writer = MetricsWriter(run, resume_step=step)
    with contextlib.closing(Dash(run)) as dash:
        for fault in schedule:
            dash.inject_fault(fault, rng)
            for _ in range(rng.randrange(1, 20)):
                step += 1
                writer.write("step", step, reward=reward_of(step))
                if fault != "stopped" and (during := dash.curve()) is not None:
                    check_curve(during)
            dash.heal()
            initial_refusals = dash.refusals.total()
            while (curve := dash.curve()) is None:
                assert dash.process.poll() is None and dash.refusals.total() < initial_refusals + 20, (
                    dash.refusals
                )
            check_curve(curve)
            assert curve["x"][-1] == step, f"{fault}: lines are lost"
        print(f"{step} steps, not answered: {dict(dash.refusals)}")


def check_curve(curve: dict[str, list[float]]) -> None:
    """Each value is that of its step."""
    points = [(x, y) for x, y in zip(curve["x"], curve["y"], strict=True) if x > 2]
    assert [(x, reward_of(int(x))) for x, _ in points] == points
    assert [x for x, _ in points] == [float(3 + i) for i in range(len(points))]


@pytest.mark.gate
def test_a_dashboard_shows_each_step_once(tmp_path: Path) -> None:
    run_dash(tmp_path, 1, 0)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_dashboard_shows_each_step_once_in_longer_schedules(seed: int, tmp_path: Path) -> None:
    run_dash(tmp_path, seed, 20)
