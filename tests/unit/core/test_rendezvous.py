"""Where ranks meet: a file on one machine; on several a store that listens on one address, and on no other."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.ports import PortReservation
from rlsys.core.rendezvous import bound_store, register_scheme, store_of_ranks
from tests.helpers.listeners import listeners

SECONDS = timedelta(seconds=20)


def test_a_store_listens_on_its_address_only_on_a_port_that_the_launcher_holds() -> None:
    initial_listeners, reservation = listeners(os.getpid()), PortReservation("")
    (port,) = reservation.choose(1)
    try:
        store = bound_store("127.0.0.1", port, 2, 0, SECONDS)
        assert {listener.address for listener in listeners(os.getpid()) - initial_listeners} == {
            f"127.0.0.1:{port}"
        }
        store.set("a", "b")
        assert bound_store("127.0.0.1", port, 2, 1, SECONDS).get("a") == b"b"
    finally:
        reservation.release()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.77:4000"):
        bound_store("192.0.2.77", 4000, 1, 0, SECONDS)


def test_external_programs_rendezvous_through_the_rlsys_scheme() -> None:
    """SGLang's engines on several nodes."""
    initial_listeners, reservation = listeners(os.getpid()), PortReservation("")
    (port,) = reservation.choose(1)
    try:
        register_scheme()
        store, rank, world = next(dist.rendezvous(f"rlsys://127.0.0.1:{port}", 0, 1, timeout=SECONDS))
        assert (rank, world) == (0, 1)
        assert {listener.address for listener in listeners(os.getpid()) - initial_listeners} == {
            f"127.0.0.1:{port}"
        }
        del store
    finally:
        reservation.release()


@pytest.mark.parametrize(
    ("environment", "kind"),
    [({"RLSYS_STORE": "FILE"}, dist.FileStore), ({}, dist.HashStore)],
    ids=["ranks of one machine", "one process started by hand"],
)
def test_one_machine_has_no_listener(
    environment: dict[str, str], kind: type[dist.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RLSYS_STORE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "ranks")))
    initial_listeners = listeners(os.getpid())
    assert isinstance(store_of_ranks(0, 1), kind)
    assert listeners(os.getpid()) == initial_listeners
