"""Two owners of one run folder: whoever started last owns it, and the other one writes nothing more."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import msgspec
import pytest

from launch.rundir import open_run_dir
from rlsys.config import Config
from rlsys.core import owner as owner_module
from rlsys.core.errors import RunError, UserError
from rlsys.core.owner import (
    EPOCH_VARIABLE,
    START_VARIABLE,
    FencedError,
    Owner,
    claim,
    current_owner,
    owner_of_process,
)
from rlsys.core.sockets import UnixConnection, exchange
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Segment
from rlsys.core.weight_updates import WeightUpdate
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.rollout.client import RolloutClient
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.service_rig import OWNER, served, ticking
from tests.helpers.takeovers import disable_file_locks, run_after_check


@pytest.fixture
def broken_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """flock knows this machine only: Lustre's localflock, NFS with local_lock. Here: it never refuses."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def test_the_launch_that_claims_last_owns_the_folder(tmp_path: Path) -> None:
    first = claim(tmp_path)
    first.check()
    second = claim(tmp_path)
    second.check()
    with pytest.raises(FencedError, match=r"launch 1 no longer owns this run; launch 2 has taken it"):
        first.check()
    assert (first.epoch, second.epoch, first.key == second.key) == (1, 2, False)
    latest_owner = current_owner(tmp_path)
    assert latest_owner == second


def test_launches_at_the_same_moment_get_different_epochs(tmp_path: Path) -> None:
    owners = []
    threads = [threading.Thread(target=lambda: owners.append(claim(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({o.epoch for o in owners}) == 16
    newest = max(owners, key=lambda o: o.epoch)
    newest.check()
    for owner in owners:
        if owner is not newest:
            with pytest.raises(FencedError):
                owner.check()


def test_an_epoch_claimed_and_deposed_concurrently_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch looks, is slow, and takes the next number when two others have come and one of them has gone."""
    claim(tmp_path)
    original_epochs = owner_module._epochs
    deposed_owners: list[Owner] = []

    def slow(run_dir: Path) -> list[int]:
        epochs = list(original_epochs(run_dir))
        monkeypatch.setattr(owner_module, "_epochs", original_epochs)
        deposed_owners.extend(claim(tmp_path) for _ in range(2))
        return epochs

    monkeypatch.setattr(owner_module, "_epochs", slow)
    late = claim(tmp_path)
    assert [o.epoch for o in (*deposed_owners, late)] == [2, 3, 4]
    late.check()
    for deposed_owner in deposed_owners:
        with pytest.raises(FencedError):
            deposed_owner.check()


def test_only_the_owner_of_the_files_can_read_the_key(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    path = tmp_path / "owners" / "000001"
    assert path.stat().st_mode & 0o777 == 0o600
    assert owner.key in path.read_text()
    assert owner.key not in str(owner.environment(1))


def test_a_role_works_for_the_launch_that_started_it(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    assert owner_of_process(tmp_path, owner.environment(3)) == (owner, 3)
    with pytest.raises(UserError, match=f"{EPOCH_VARIABLE} and {START_VARIABLE} are not set"):
        owner_of_process(tmp_path, {})
    claim(tmp_path)
    with pytest.raises(FencedError, match="launch 2 has taken it"):
        owner_of_process(tmp_path, owner.environment(4))


def prompt() -> Prompt:
    return Prompt(0, "", [1], {})


def test_two_writers_of_one_ledger_where_locks_do_not_work(tmp_path: Path, broken_locks: None) -> None:
    """The first launch pauses and comes back; before, both saved one sample and the ledger could not be opened."""
    path = tmp_path / FILE_NAME
    old_buffer = RolloutBuffer(path, "run", 8, claim(tmp_path))
    group = old_buffer.issue(prompt(), [1])
    old_buffer.flush()

    new_buffer = RolloutBuffer(path, "run", 8, claim(tmp_path))
    sample = new_buffer.groups[0].samples[0]
    sample.append(Segment([1, 2], [0.0, 0.0], [VersionSpan(0, 0, 2)]))
    new_buffer.save([sample])
    new_buffer.flush()

    late = group.samples[0]
    late.append(Segment([7], [0.0], [VersionSpan(0, 0, 1)]))
    with pytest.raises(FencedError):
        old_buffer.save([late])
    with pytest.raises(RunError, match="writes are refused"):
        old_buffer.issue(prompt(), [1])
    with pytest.raises(RunError):
        old_buffer.close()
    new_buffer.close()
    back = RolloutBuffer(path, "run", 8, claim(tmp_path))
    assert list(back.groups[0].samples[0].response_ids) == [1, 2]
    assert back.next_group_id == 1
    back.close()


def test_a_transaction_that_was_open_at_the_takeover_is_not_committed(
    tmp_path: Path, broken_locks: None
) -> None:
    old_buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 8, claim(tmp_path))
    old_buffer.issue(prompt(), [1])
    claim(tmp_path)
    with pytest.raises(FencedError):
        old_buffer.flush()
    with pytest.raises(RunError):
        old_buffer.issue(prompt(), [1])
    old_buffer.close()
    back = RolloutBuffer(tmp_path / FILE_NAME, "run", 8, current_owner(tmp_path))
    assert back.next_group_id == 0
    back.close()


def test_a_commit_concurrent_with_a_takeover_precedes_it(
    tmp_path: Path, broken_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a local disk, after the old writer's last look: the new one waits for the commit, and has what it wrote."""
    path, first = tmp_path / FILE_NAME, claim(tmp_path)
    old_buffer = RolloutBuffer(path, "run", 8, first)
    old_buffer.issue(prompt(), [1])
    next_ids: list[int] = []

    def open_new() -> None:
        new_buffer = RolloutBuffer(path, "run", 8, claim(tmp_path))
        next_ids.append(new_buffer.next_group_id)
        new_buffer.issue(prompt(), [1])
        new_buffer.close()

    thread = threading.Thread(target=open_new)

    def take_over() -> None:
        thread.start()
        while current_owner(tmp_path) == first:
            pass

    run_after_check(first, take_over, monkeypatch)
    old_buffer.flush()
    thread.join()
    assert next_ids == [1]
    with pytest.raises(FencedError):
        old_buffer.issue(prompt(), [1])
    with pytest.raises(RunError):
        old_buffer.close()
    back = RolloutBuffer(path, "run", 8, current_owner(tmp_path))
    assert back.next_group_id == 2
    back.close()


def test_a_commit_at_the_very_moment_of_a_takeover_has_never_been_where_locks_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it changed pages under the new writer, and what that had committed was gone."""
    disable_file_locks(monkeypatch)
    path, first = tmp_path / FILE_NAME, claim(tmp_path)
    old_buffer = RolloutBuffer(path, "run", 8, first)
    old_buffer.issue(prompt(), [1])
    old_buffer.flush()
    writers: list[RolloutBuffer] = []

    def take_over() -> None:
        writers.append(new_buffer := RolloutBuffer(path, "run", 8, claim(tmp_path)))
        for i in range(3):
            new_buffer.issue(Prompt(i, "", [1] * 2000, {}), [1])
        new_buffer.flush()

    for _ in range(2):
        old_buffer.issue(Prompt(0, "", [2] * 3000, {}), [1])
    run_after_check(first, take_over, monkeypatch)
    old_buffer.flush()  # the one that slips through
    (new_buffer,) = writers
    new_buffer.issue(Prompt(3, "", [1] * 2000, {}), [1])
    new_buffer.flush()
    with pytest.raises(FencedError):
        old_buffer.issue(prompt(), [1])
    with pytest.raises(RunError):
        old_buffer.close()
    new_buffer.check_counts()
    new_buffer.close()
    back = RolloutBuffer(path, "run", 8, current_owner(tmp_path))
    back.check_counts()
    assert [g.samples[0].prompt_ids for g in back.active()] == [[1]] + [[1] * 2000] * 4
    back.close()
    assert not list(tmp_path.glob("*.part"))


def test_the_ledger_file_rejects_writers_of_an_older_epoch(tmp_path: Path, broken_locks: None) -> None:
    """Where the old launch still sees its file in a cache of the file system, the ledger's own epoch refuses it."""
    first = claim(tmp_path)
    old_buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 8, first)
    RolloutBuffer(tmp_path / FILE_NAME, "run", 8, claim(tmp_path)).close()
    (tmp_path / "owners" / f"{first.epoch:06d}").touch()
    with pytest.raises(FencedError, match="launch 2 owns this file; launch 1 was replaced"):
        old_buffer.issue(prompt(), [1])


def test_a_second_supervisor_deposes_the_first_where_locks_do_not_work(
    tmp_path: Path, broken_locks: None
) -> None:
    config = Config.model_validate({"model": {"path": tmp_path}, "run": {"dir": tmp_path / "run"}})
    with open_run_dir(config, print) as first, open_run_dir(config, print) as second:
        second.owner.check()
        with pytest.raises(FencedError):
            first.owner.check()


async def test_a_replaced_trainer_is_refused(tmp_path: Path) -> None:
    """Declared dead, replaced, and awake again: before, its push and its take(2) were accepted."""

    def push(client: RolloutClient) -> WeightUpdate:
        ticket = client.begin_push()
        client.end_push(ticket, [], [])
        return ticket

    config = make_config(tmp_path, launch={"placement": "disaggregated"}, rollout={"max_staleness": 1})
    async with rig(config) as r, served(r) as old_client:
        new_client = RolloutClient(old_client._socket, OWNER.key, start=2)
        await ticking(r, old_client.restore, 0)
        await ticking(r, push, old_client)
        await ticking(r, old_client.take, 1)
        await ticking(r, new_client.restore, 0)
        await ticking(r, push, new_client)
        await ticking(r, new_client.take, 1)
        for call in (
            old_client.begin_push,
            lambda: old_client.take(2),
            lambda: old_client.restore(0),
            lambda: old_client.commit(1),
        ):
            with pytest.raises(RunError, match="start 1 of the trainer was replaced by start 2"):
                await ticking(r, call)
        assert (
            len((await ticking(r, push, new_client)).engines) == 1
        )  # the zombie's push took no version away


async def test_commands_without_the_key_are_rejected(tmp_path: Path) -> None:
    """Before: any local process could POST /commit {train_step: 10**9}, and every later restore failed."""

    def post(socket: Path, path: str, headers: dict[str, str]) -> int:
        body = msgspec.msgpack.encode({"train_step": 0})
        return exchange(UnixConnection(socket, 5), "POST", path, body, headers)[0]

    async with rig(make_config(tmp_path)) as r, served(r) as client:
        for path in ("commit", "restore", "take", "leave?seconds=1"):
            for headers in ({}, {"X-Rlsys-Key": "guess", "X-Rlsys-Start": "9"}):
                assert await ticking(r, post, client._socket, f"/{path}", headers) == 403
        with pytest.raises(RunError, match="GET /status returned HTTP 403"):
            await ticking(r, RolloutClient(client._socket, "guess").status)
        await ticking(r, client.restore, 0)
        with pytest.raises(
            RunError, match=r"commit\(1000000000\) after 0 steps: expected a step that has been taken"
        ):
            await ticking(r, client.commit, 10**9)
        await ticking(r, client.restore, 0)


async def test_commands_before_restore_are_rejected(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r, served(r) as client:
        with pytest.raises(RunError, match="begin_push: the trainer must call restore first"):
            await ticking(r, client.begin_push)


def test_the_environment_names_no_secret(tmp_path: Path) -> None:
    assert set(claim(tmp_path).environment(1)) == {EPOCH_VARIABLE, START_VARIABLE}
    assert EPOCH_VARIABLE not in os.environ
