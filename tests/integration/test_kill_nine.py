"""kill -9 of everything at any moment, on the real stack: the run ends with every step once and nothing lost.

Slow: every death costs a restart, an engine's half a minute.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.ledger.store import FILE_NAME
from rlsys.obs.metrics import read_metrics
from tests.helpers import saboteur
from tests.helpers.sessions import GROUPS, Session, check_ledger, step_lines

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2400)]

LOOK_SECONDS = 0.005
WORDS = {
    "engine": ("rlsys.engine.server",),
    "rollout": ("rlsys.rollout.service",),
    "trainer": ("rlsys.train", "--config"),
}
VICTIMS = (*WORDS, *(f"{role}'s keeper" for role in WORDS), "supervisor")


def rows(table: str) -> Callable[[Path], int]:
    """Of what is committed."""

    def count(run_dir: Path) -> int:
        uri = (run_dir / FILE_NAME).as_uri() + "?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            return int(db.execute(f"SELECT coalesce(max(rowid), 0) FROM {table}").fetchone()[0])

    return count


def asked(path: str) -> Callable[[Path], int]:
    """Requests that the engine has answered."""
    return lambda run_dir: (run_dir / "logs" / "engine-0.log").read_bytes().count(f"POST {path} ".encode())


def some_tensors(run_dir: Path) -> int:
    """Requests that brought some, by whatever transport."""
    return sum(asked(f"/update_weights_from_{how}")(run_dir) for how in ("tensor", "distributed", "disk"))


def checkpoints_begun(run_dir: Path) -> int:
    """The name of the one that is being written, or was last: its step."""
    names = [p.name for p in (run_dir / "checkpoints").glob("step-*")]
    return max((int("".join(c for c in name if c.isdigit())) for name in names), default=0)


MOMENTS: dict[str, Callable[[Path], int]] = {
    "tokens are on disk": rows("pieces"),
    "an engine has heard the abort": asked("/abort_request"),
    "groups are taken, no checkpoint has them": rows("takes"),
    "a push has begun": rows("pushes"),
    "some of the tensors are there": some_tensors,
    "the engines are attested": asked("/update_weight_version"),
    "a step is trained": step_lines,
    "a checkpoint is begun": checkpoints_begun,
}
"""A moment is when such a count has grown."""

PARTS = 14
TRANSPORTS = ("auto", "broadcast", "disk")
KILLS = [(victim, moment) for victim in VICTIMS for moment in MOMENTS]
random.Random(0).shuffle(KILLS)


def check_whole(run_dir: Path, steps: int) -> None:
    assert check_ledger(run_dir)["trained"] == steps * GROUPS
    assert [s["step"] for s in read_metrics(run_dir).steps] == list(range(1, steps + 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_role_at_every_moment(part: int, transport: str, tmp_path: Path) -> None:
    """In random order, with a trained step between two deaths: then all roles are up again. A keeper's death takes
    its role along."""
    run_dir, rng, kills = tmp_path / "run", random.Random(part), KILLS[part::PARTS]
    steps = 5 * len(kills)
    overrides = (
        f"trainer.steps={steps}", "weights.bucket_mb=1", "rollout.flush_tokens=64", f"weights.method={transport}",
        "engine.start_timeout=600",  # two busy cores took more than 240 s
    )  # fmt: skip
    session = Session(run_dir, *overrides)
    try:
        for victim, moment in kills:
            lines = step_lines(run_dir)
            session.wait_for(lambda lines=lines: step_lines(run_dir) > lines)  # type: ignore[misc]
            count, times = MOMENTS[moment], rng.randint(1, 2)
            role, _, keeper = victim.partition("'s ")
            target = session.find(*WORDS.get(role, ()), *(["launch.keeper"] if keeper else []))
            count_before = count(run_dir)
            session.wait_for(
                lambda c=count, n=count_before + times: c(run_dir) >= n,  # type: ignore[misc]
                LOOK_SECONDS,
            )
            if victim == "supervisor":
                session.send(signal.SIGKILL)
                assert session.end()[0] == -signal.SIGKILL
                check_ledger(run_dir)
                session = Session(run_dir, *overrides)
            else:
                target.send_signal(signal.SIGKILL)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    check_whole(run_dir, steps)


def test_the_rollout_process_at_every_boundary(tmp_path: Path) -> None:
    """It ends itself, between two lines of code (saboteur.py)."""
    run_dir = tmp_path / "run"
    steps = 3 * len(saboteur.BOUNDARIES)
    session = Session(
        run_dir,
        f"trainer.steps={steps}",
        "trainer.checkpoint_every=1",
        "data.reward=tests.helpers.saboteur:reward",
    )
    try:
        for name in saboteur.BOUNDARIES:  # patience for each
            session.wait_for((run_dir / saboteur.FOLDER / name).exists)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    assert {p.name for p in (run_dir / saboteur.FOLDER).iterdir()} == set(saboteur.BOUNDARIES)
    assert output.count("rollout died (killed by signal 9 (SIGKILL), ") == len(saboteur.BOUNDARIES)
    check_whole(run_dir, steps)
