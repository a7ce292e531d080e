"""examples/relay on the real stack: two runs meet, every role of both and the meeting itself are killed, and nothing
is lost in either ledger."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.servers import ROOT
from tests.helpers.sessions import GROUPS, RLSYS, Session, check_agreement, check_ledger
from tests.helpers.supervisor_stage import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

STEPS = 8
POLICIES = ("first", "second")


class Meet:
    """`rlsys meet` as the README starts it, and started again at the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        policy_options = [word for p in POLICIES for word in ("--policy", p)]
        command = [*RLSYS, "meet", "examples/relay/relay.py:play", *policy_options, "--port", str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/") as answer:
            counts: dict[str, int] = json.load(answer)
        return counts

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()
        assert self._process.wait() == 0


@pytest.fixture
def meet() -> Iterator[Meet]:
    meet = Meet()
    yield meet
    meet.kill()


def session(meet: Meet, run: Path, steps: int, *overrides: str) -> Session:
    """Of the policy that its folder is named by."""
    url = f"rollout.generator_params.url=http://127.0.0.1:{meet.port}/{run.name}"
    ends = (f"trainer.steps={steps}", f"eval.interval={steps}")
    return Session(run, *ends, url, *overrides, config=f"examples/relay/{run.name}.yaml")


@pytest.fixture
def runs(meet: Meet, tmp_path: Path) -> Iterator[dict[str, Session]]:
    sessions = {p: session(meet, tmp_path / p, STEPS) for p in POLICIES}
    yield sessions
    for policy_session in sessions.values():
        policy_session.kill()


def test_nothing_is_lost_when_every_process_is_killed(
    meet: Meet, runs: dict[str, Session], tmp_path: Path
) -> None:
    first, second = runs["first"], runs["second"]
    first.wait_for_steps(1)
    second.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    first.wait_for_steps(3)
    initial_counts = meet.counts()
    meet.kill()
    meet.start()
    first.wait_for_steps(4)
    first.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    second.find("rlsys.engine.server").send_signal(signal.SIGKILL)
    second.wait_for_steps(6)
    second.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    for policy, session in runs.items():
        code, output = session.end()
        assert code == 0, output
        run = tmp_path / policy
        assert check_ledger(run)["trained"] == STEPS * GROUPS
        assert {s["step"] for s in read_metrics(run).steps} == set(range(1, STEPS + 1))
        check_agreement(run)
    assert initial_counts["came_again"] > 0, "the second policy's samples came back to their episodes"
    assert initial_counts["failed"] == meet.counts()["failed"] == 0, "what was told is said again"
    meet.end()


def test_training_with_a_frozen_partner_matches_training_alone_on_the_same_rollouts(
    meet: Meet, tmp_path: Path
) -> None:
    """Without its checkpoints it begins once more: its ledger has the rollouts, and nobody else is there."""
    run, all_kept = tmp_path / "first", "trainer.checkpoint_every=100"
    sessions = [
        session(meet, run, 3, all_kept),
        session(meet, tmp_path / "second", 3, all_kept, "trainer.lr=1.0e-30"),
    ]
    try:
        assert [policy_session.end()[0] for policy_session in sessions] == [0, 0]
    finally:
        for policy_session in sessions:
            policy_session.kill()
    shared_steps = read_metrics(run).steps
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    again = session(meet, run, 3, all_kept)
    try:
        code, output = again.end()
    finally:
        again.kill()
    assert code == 0, output
    solo_steps = read_metrics(run).steps
    assert [s["step"] for s in solo_steps] == [s["step"] for s in shared_steps] == [1, 2, 3]
    # A step whose groups all have equal rewards has neither.
    figures, expected = (
        {(s["step"], name): s[name] for s in steps for name in ("loss", "grad_norm") if name in s}
        for steps in (solo_steps, shared_steps)
    )
    assert figures == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert any(value for (_, name), value in figures.items() if name == "grad_norm")
