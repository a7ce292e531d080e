"""How a trainer leaves the group that it shares with engines: when all is well, and when a broadcast hangs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Timer

import pytest

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.weight_calls import Call
from rlsys.weights import transports
from rlsys.weights.group_cache import GroupCache
from rlsys.weights.receivers import EngineUnreachable, Receivers
from rlsys.weights.transports import GroupTransport

ENGINES = [EngineAddress("http://a", 1, 0), EngineAddress("http://b", 1, 0)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to groups and asked of engines, in order."""
    event_log: list[str] = []

    def ask(self: Receivers, calls: Sequence[Call]) -> dict[str, Future[None]]:
        event_log.extend(f"{engine.url}{call.path}" for engine, call in zip(self.present, calls, strict=True))
        answers = {engine.url: Future[None]() for engine in self.present}
        for answer in answers.values():
            answer.set_result(None)
        return answers

    monkeypatch.setattr(Receivers, "post_all", ask)
    monkeypatch.setattr(
        transports.dist, "destroy_process_group", lambda group: event_log.append(f"destroy {group}")
    )
    monkeypatch.setattr(
        transports.dist.distributed_c10d,
        "_abort_process_group",
        lambda group: event_log.append(f"abort {group}"),
    )
    monkeypatch.setattr(transports.dist, "get_backend", lambda group: group)
    return event_log


def joined(backend: str) -> GroupTransport:
    transport = GroupTransport(60, 60)
    transport._group, transport._members = backend, list(ENGINES)  # type: ignore[assignment]
    return transport


def test_engines_are_requested_to_leave_before_the_trainer_leaves(events: list[str]) -> None:
    """NCCL's end waits for the other side's: whoever left alone first would wait for nobody."""
    joined("nccl").close()
    path = "/destroy_weights_update_group"
    assert events == [f"http://a{path}", f"http://b{path}", "destroy nccl"]


def test_only_the_first_engine_to_refuse_is_excluded(events: list[str]) -> None:
    """The others refuse because the trainer left the group: they get the bucket in another one."""
    with Receivers(ENGINES, 60) as receivers:
        answers = {engine.url: Future[None]() for engine in ENGINES}
        answers["http://b"].set_exception(RunError("400: size mismatch"))
        transport = joined("gloo")
        Timer(
            0.1, lambda: answers["http://a"].set_exception(RunError("400: connection closed by peer"))
        ).start()
        transport._abandon(receivers, answers)
    assert [engine.url for engine in receivers.present] == ["http://a"]
    assert receivers.excluded == {"http://b": "400: size mismatch"}


def test_a_failed_broadcast_to_live_engines_excludes_all_of_them(
    events: list[str],
) -> None:
    with Receivers(ENGINES, 60) as receivers:
        answers = {engine.url: Future[None]() for engine in ENGINES}
        transport = joined("gloo")
        for answer in answers.values():
            Timer(0.05, lambda a=answer: a.set_result(None)).start()
        transport._abandon(receivers, answers)
    assert receivers.excluded == dict.fromkeys(
        ("http://a", "http://b"), "the broadcast of a bucket to 2 engines failed"
    )


@pytest.mark.parametrize(("backend", "end"), [("nccl", "abort nccl"), ("gloo", "destroy gloo")])
def test_a_broadcast_that_hangs_on_a_dead_engine_is_aborted(
    events: list[str], backend: str, end: str
) -> None:
    """NCCL's group has a kernel that hangs: destroying it would wait for that until the watchdog ends the trainer."""
    with Receivers(ENGINES, 60) as receivers:
        answers = {engine.url: Future[None]() for engine in ENGINES}
        answers["http://a"].set_result(None)
        answers["http://b"].set_exception(EngineUnreachable("connection reset"))
        transport = joined(backend)
        transport._abandon(receivers, answers)
        assert events == [end]
        assert [engine.url for engine in receivers.present] == ["http://a"]
        transport.close()  # there is nothing left to leave
        assert events == [end]


def test_each_round_of_a_rolling_push_keeps_its_group(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(self: GroupTransport, receivers: Receivers) -> bool:
        names = "".join(e.url[-1] for e in receivers.present)
        events.append(f"join {names}")
        self._group = f"group {names}"  # type: ignore[assignment]
        return True

    monkeypatch.setattr(GroupTransport, "_join", join)
    groups = GroupCache(60, 60)

    def push(names: str, holds: int = 0) -> list[str]:
        events.clear()
        engines = [EngineAddress(f"http://{name}", 1, holds) for name in names]
        with Receivers(engines, 60) as receivers:
            assert groups.get(receivers).urls == {e.url for e in engines}
        return [e for e in events if e.startswith(("join", "destroy"))]

    assert [push("ab"), push("cd")] == [["join ab"], ["join cd"]]
    assert [push("ab"), push("cd"), push("ab")] == [[], [], []]
    assert push("ab", holds=-1) == ["destroy group ab", "join ab"], "they were started anew"
    assert push("abcd") == ["destroy group ab", "destroy group cd", "join abcd"]
    assert push("abce") == ["destroy group abcd", "join abce"]
    events.clear()
    groups.close()
    assert [e for e in events if e.startswith("destroy")] == ["destroy group abce"]
