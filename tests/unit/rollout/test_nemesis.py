"""The run under faults that are no deaths, in virtual time; and proof that the checker would see what goes wrong.

Each schedule is drawn from its seed and is the same on every machine. `pytest -s` prints them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from aiohttp import web

from rlsys.core.identity import ANONYMOUS
from rlsys.core.owner import Owner, claim
from rlsys.core.seeds import sample_seed
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Segment
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.ledger.writer import StoreWriter
from rlsys.rollout.service import Access
from rlsys.router import failure_policy
from rlsys.router.attest import Agreement
from rlsys.router.failure_policy import DEATHS_CENSORED
from rlsys.router.push import WeightPush
from tests.helpers import nemesis_launch
from tests.helpers.history import History, check_history
from tests.helpers.nemesis import FAULTS, Fault, Outcome, draw, run_schedule

SCHEDULES, CHUNK = 200, 5
SLICE, FIRST = 20, 5
"""In `make test`, and in `make check`."""


def tier(schedule: int) -> list[pytest.MarkDecorator]:
    if schedule < SLICE:
        return [] if schedule < FIRST else [pytest.mark.gate]
    return [pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: every step waits for several commits."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield path
    shutil.rmtree(path)


def played(
    folder: Path, seed: int, schedule: list[Fault] | None = None, poison: int | None = None
) -> Outcome:
    run_folder = folder / str(seed)
    run_folder.mkdir()
    return run_schedule(run_folder, seed, schedule, poison)


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=tier(n)) for n in range(0, SCHEDULES, CHUNK)],
)
def test_nothing_is_lost_trained_twice_or_generated_with_wrong_weights(folder: Path, first: int) -> None:
    fault_counts, bad = Counter[str](), []
    for seed in range(first, first + CHUNK):
        outcome = played(folder, seed)
        fault_counts += outcome.fault_counts
        faults = {kind: len(cases) for kind, cases in outcome.verdict.faults.items()}
        print(
            f"{seed}: {', '.join(map(str, draw(Random(seed))))}: {len(outcome.launches)} launches, {faults}"
        )
        if not outcome.verdict.clean:
            bad.append(f"schedule {seed}: {outcome.verdict}")
    print(f"faults: {dict(fault_counts)}")
    assert not bad, "\n".join(bad)


def test_the_schedules_have_every_fault() -> None:
    drawn = Counter(f.kind for seed in range(SLICE) for f in draw(Random(seed)))
    assert set(drawn) == set(FAULTS)


# -- the review's faults, put back: the checker must see each ---------------------------------------------------


def seen(folder: Path, schedule: list[Fault], *kinds: str, poison: int | None = None) -> bool:
    """Whether the checker sees one of these kinds in some seed of a schedule. The fault may also stop a run."""
    for seed in SEEDS:
        with suppress(TimeoutError):
            verdict = played(folder, seed, schedule, poison).verdict
            if any(verdict.faults[kind] for kind in kinds):
                return True
    return False


SEEDS = (0, 1, 3)
"""Both placements, and both interruptions."""
TWO_OWNERS = [Fault(9.0, "launch stopped", 8.0), Fault(28.0, "second owner", 0.0)]
ZOMBIES = [Fault(at, "keeper killed", seconds) for at, seconds in ((7.0, 3.0), (18.0, 1.0), (27.0, 4.0))]
STRANGERS = [Fault(at, "foreign push", 2.0) for at in (6.0, 13.0, 21.0, 29.0)]
DEAF = [Fault(8.0, "push dropped", 9.0), Fault(30.0, "push dropped", 6.0)]
POISON = sample_seed(0, 5, 1)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("schedule", "poison"),
    [(TWO_OWNERS, None), (STRANGERS, None), (ZOMBIES, None), (DEAF, None), ([], POISON)],
)
def test_the_checker_finds_no_faults_with_every_guard_in_place(
    folder: Path, schedule: list[Fault], poison: int | None
) -> None:
    verdicts = [played(folder, seed, schedule, poison).verdict for seed in SEEDS]
    assert all(v.clean for v in verdicts), [str(v) for v in verdicts]


def test_the_checker_detects_two_writers_of_one_ledger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 1, as the review had it: both saved one sample, without an error."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(Owner, "check", lambda _: None)
    monkeypatch.setattr(StoreWriter, "_check_owner", lambda _: None)
    path, token_ids = folder / FILE_NAME, [9, 8, 7]
    first_writer = RolloutBuffer(path, "run", 8, claim(folder))
    first_writer.issue(Prompt(0, "", [1], {}), [1])
    first_writer.flush()
    second_writer = RolloutBuffer(path, "run", 8, claim(folder))
    for buffer, tokens in ((second_writer, 3), (first_writer, 2)):
        late = buffer.groups[0].samples[0]
        late.append(Segment(token_ids[:tokens], [-0.5] * tokens, [VersionSpan(0, 0, tokens)]))
        buffer.save([late])
        buffer.flush()
        buffer.check_counts()
        buffer.close()
    verdict = check_history(path, History(0), steps=0)
    assert verdict.faults["torn"] == ["sample 0 (active): 2 tokens in its row, 5 ids, 5 log-probs"]


def test_the_checker_detects_weights_of_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 4: engines without an owner."""
    monkeypatch.setattr(nemesis_launch, "engine_identity", lambda *_: ANONYMOUS)
    assert seen(folder, STRANGERS, "wrong")


def test_the_checker_detects_a_push_without_effect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 6: attestation that lets everything pass."""
    monkeypatch.setattr(WeightPush, "_objection", lambda *_: None)
    monkeypatch.setattr(Agreement, "within", lambda *_: True)
    assert seen(folder, DEAF, "wrong")


def test_the_checker_detects_a_replaced_trainer_that_returns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 5."""

    def only_the_key(access: Access, request: web.Request) -> None:
        access.check_key(request)

    monkeypatch.setattr(Access, "check_trainer", only_the_key)
    assert seen(folder, ZOMBIES, "duplicate", "wrong")


def test_the_checker_detects_a_sample_that_keeps_killing_engines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8."""
    monkeypatch.setitem(vars(failure_policy.SAMPLES), "deaths", 10**6)
    assert seen(folder, [], "poison", poison=POISON)


def test_deaths_are_remembered_over_restarts(folder: Path) -> None:
    """A sample that kills its engine before its first token, and a rollout process that is killed as often. Before,
    each restart began to count anew."""
    schedule = [Fault(fault_time, "rollout killed", 0.0) for fault_time in range(4, 64, 4)]
    outcome = played(folder, 1, schedule, POISON)
    assert outcome.verdict.clean
    assert outcome.poison_deaths <= DEATHS_CENSORED + 2
