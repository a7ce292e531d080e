"""Environments in a real run: they, engine, rollout, trainer and agents are killed in the middle; nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from tests.helpers.sessions import GROUPS, Session, check_agreement, check_ledger, command_line
from tests.integration.test_agent_run import HOST, kill, parents_line

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

STEPS = 9
SERVICE = "rlsys.environments.serve"
CONNECTOR = "tests/data/environments/own.py:SlowTries"
OVERRIDES = {
    "environment": (
        "rollout.generator=environment",
        f"rollout.generator_params={{connector: '{CONNECTOR}', max_turns: 2}}",
        "data.reward=environment",
    ),
    "agent": (
        "rollout.generator=agent",
        "rollout.generator_params={run: 'tests/data/agents/with_environment.py:solve', "
        f"environment: {{connector: '{CONNECTOR}'}}}}",
        "data.reward=exact_answer",
    ),
}


@pytest.fixture(params=sorted(OVERRIDES))
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    instance = Session(tmp_path / "run", *OVERRIDES[request.param], f"trainer.steps={STEPS}")
    yield instance
    instance.kill()


def test_an_environment_outlives_the_death_of_every_role(
    session: Session, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    of_agents = "agent" in request.node.name
    session.wait_for_steps(1)
    kill(session, lambda p: SERVICE in command_line(p))
    session.wait_for_steps(2)
    if of_agents:
        kill(session, lambda p: HOST in command_line(p) and HOST in parents_line(p))
    session.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    session.wait_for_steps(4)
    kill(session, lambda p: SERVICE in command_line(p))
    session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
    session.wait_for_steps(6)
    session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert check_ledger(tmp_path / "run")["trained"] == STEPS * GROUPS
    assert [s["step"] for s in read_metrics(tmp_path / "run").steps] == list(range(1, STEPS + 1))
    check_agreement(tmp_path / "run")
    samples = [s for g in RunReader(tmp_path / "run").groups("train_step = ?", STEPS) for s in g.samples]
    assert any(s.observed for s in samples), "a second try"
    if not of_agents:
        assert all(s.turn_rewards is not None and len(s.turn_rewards) == len(s.turns()) for s in samples)
        assert all(s.reward == pytest.approx(sum(m.reward for m in s.turn_rewards or ())) for s in samples)
