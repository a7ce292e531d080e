"""Agents in a real run: they, their process, an engine and the rollout process are killed, and nothing is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from tests.helpers.sessions import GROUPS, Session, check_agreement, check_ledger, command_line

pytestmark = pytest.mark.integration

STEPS = 8
AGENT = (
    "rollout.generator=agent",
    "rollout.generator_params={run: 'examples/own_agent.py:second_chance'}",
    "data.reward=exact_answer",
    f"trainer.steps={STEPS}",
)
HOST = "rlsys.agents.host"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    instance = Session(tmp_path / "run", *AGENT)
    yield instance
    instance.kill()


def test_agents_outlive_the_death_of_every_role(session: Session, tmp_path: Path) -> None:
    session.wait_for_steps(1)
    kill(session, lambda p: HOST in command_line(p) and HOST in parents_line(p))  # agents
    session.wait_for_steps(2)
    kill(session, lambda p: HOST in command_line(p) and HOST not in parents_line(p))
    session.wait_for_steps(3)
    session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
    session.wait_for_steps(5)
    restarts = max(s["agent_restarts"] for s in read_metrics(tmp_path / "run").steps)
    session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert restarts >= 2
    assert check_ledger(tmp_path / "run")["trained"] == STEPS * GROUPS
    assert [s["step"] for s in read_metrics(tmp_path / "run").steps] == list(range(1, STEPS + 1))
    check_agreement(tmp_path / "run")
    samples = [s for g in RunReader(tmp_path / "run").groups("train_step = ?", STEPS) for s in g.samples]
    assert any(s.observed for s in samples), "a second chance"
    assert all(not any(s.trained()[o.start : o.end]) for s in samples for o in s.observed)


def test_an_agent_with_two_histories_and_a_sub_agent_trains_all_of_them(tmp_path: Path) -> None:
    """Over the death of engine and rollout process: nothing is lost, trainer and engine agree on every sequence."""
    run = tmp_path / "run"
    agent = "rollout.generator_params={run: 'tests/data/agents/histories.py:begins_anew'}"
    session = Session(run, *AGENT[:1], agent, *AGENT[2:3], "trainer.steps=5")
    try:
        session.wait_for_steps(1)
        session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
        session.wait_for_steps(2)
        session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    assert check_ledger(run)["trained"] == 5 * GROUPS
    steps = read_metrics(run).steps
    check_agreement(run)
    for step in (4, 5):
        samples = [s for g in RunReader(run).groups("train_step = ?", step) for s in g.samples]
        trained = [q for s in samples for q in s.trained_sequences]
        assert steps[step - 1]["sequences"] == len(trained) >= 2 * len(samples)
        assert steps[step - 1]["tokens"] == sum(q.tokens for q in trained)
        parents = {q.parent for q in trained if q.sequence}
        assert None in parents and parents & {0, 1}, "a sub-agent's, and one that began anew, of either"


def parents_line(process: psutil.Process) -> list[str]:
    try:
        parent = process.parent()
    except psutil.NoSuchProcess:
        return []
    return [] if parent is None else command_line(parent)


def kill(session: Session, chosen: Callable[[psutil.Process], bool]) -> None:
    """All of them, as soon as there is one."""
    victims: list[psutil.Process] = []

    def there() -> bool:
        victims[:] = [p for p in session.processes() if chosen(p)]
        return bool(victims)

    session.wait_for(there)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
