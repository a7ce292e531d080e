"""Signals that end a run, and those that were ignored when it began."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from launch.stops import StopSignals


@pytest.fixture(params=[signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def ignored(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that whoever started this process ignores: `nohup`, or `command &` in a script."""
    number = signal.Signals(request.param)
    previous_handler = signal.signal(number, signal.SIG_IGN)
    yield number
    signal.signal(number, previous_handler)


def test_a_signal_ignored_at_the_start_remains_ignored(ignored: signal.Signals) -> None:
    with StopSignals().listening() as stop:
        os.kill(os.getpid(), ignored)
        assert stop.count == 0
        other_signal = signal.SIGUSR1 if ignored != signal.SIGUSR1 else signal.SIGHUP
        os.kill(os.getpid(), other_signal)
        assert (stop.count, stop.number) == (1, other_signal)
    assert signal.getsignal(ignored) is signal.SIG_IGN
