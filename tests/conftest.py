"""Setup of every session: the environment of a run, deterministic property tests, and the tier of each test."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from launch.environment import CPU_HOST

for variable in (
    "OMP_NUM_THREADS",
    "MKL_CBWR",
    "TORCH_COMPILE_DISABLE",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
):
    os.environ.setdefault(variable, CPU_HOST[variable])  # before anything imports torch

# `COMMAND &` in a script and nohup start a session that ignores these signals. Child processes inherit ignored
# signals, and tests send these signals to child processes.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

pytest_plugins = ["tests.gate.baseline", "tests.gate.budget", "tests.gate.counts"]

settings.register_profile("rlsys", deadline=None, derandomize=True)  # no time limit on any example
settings.load_profile("rlsys")

REAL_STACK = ("tests/integration/", "tests/cluster/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on the real stack without `gate` as `full`, so that new ones do not slow down `make test`."""
    for item in items:
        if item.nodeid.startswith(REAL_STACK) and not item.get_closest_marker("gate"):
            item.add_marker("full")
