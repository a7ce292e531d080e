"""Server that runs the tests of mutants.py: it imports large packages once and forks for each trial.

    {"tests": {id: 30.0}, "start": 40.0}  ->  {"outcome": "killed", "by": "tests/unit/test_a.py::test"}

Requests and responses are lines of JSON. The numbers are time limits in seconds: of each test, and of the imports
before the first test. A trial imports the modules of this repository again, and so reads the changed file. Processes
that a trial leaves behind are killed before the next trial.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil
import pytest

from launch.guard import adopt_orphans
from tests.gate.selection import FOLDERS

HEAVY = (
    "torch",
    "numpy",
    "aiohttp",
    "hypothesis",
    "pydantic",
    "torch.distributed.checkpoint",
    "torch.fx.experimental.symbolic_shapes",
    "transformers",
    "pytest_asyncio",
)
"""Packages without megatron, which megatron_patches must patch at its first import."""
OPTIONS = [
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:cov",
    "-p",
    "no:tests.gate.baseline",
    "-p",
    "no:tests.gate.budget",
    "--no-header",
]


class OrderedTests:
    """pytest plug-in that runs a list of tests in order, reports the start of each, and records the first failure.

    Args:
        tests: Test ids.
        failed: File that receives the id of the first failed test.
        start_fd: File descriptor that receives the id of each test that starts, one a line.
    """

    def __init__(self, tests: Collection[str], failed: Path, start_fd: int) -> None:
        self._positions = {test: n for n, test in enumerate(tests)}
        self._failed = failed
        self._start_fd = start_fd

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        selected = [item for item in items if item.nodeid in self._positions]
        items[:] = sorted(selected, key=lambda item: self._positions[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._start_fd, f"{nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.exists():
            self._failed.write_text(report.nodeid, encoding="utf-8")


def run_tests(tests: Collection[str], failed: Path, output: Path, start_fd: int) -> int:
    """Run tests in the forked process and return pytest's exit code."""
    with output.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    for name in [name for name in sys.modules if name.split(".")[0] in FOLDERS]:
        del sys.modules[name]
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return int(pytest.main([*OPTIONS, *files], plugins=[OrderedTests(tests, failed, start_fd)]))


def kill_descendants() -> None:
    """Kill all processes of a trial. Those with another session are children of this subreaper."""
    while children := psutil.Process().children(recursive=True):
        for process in children:
            process.kill()
        psutil.wait_procs(children)


def trial(limits: Mapping[str, float], start: float, folder: Path) -> dict[str, str]:
    """Run tests in a forked process.

    Args:
        limits: Test id -> time limit in seconds, in the order of the tests.
        start: Time limit in seconds of the imports before the first test.
        folder: Folder for temporary files.

    Returns:
        `outcome`: survived, killed or timed out. `by`: the test that failed or exceeded its limit, or pytest's exit
        code if no test failed, for example after an import error.
    """
    failed, output = folder / "failed", folder / "output"
    failed.unlink(missing_ok=True)
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        code = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            code = run_tests(limits, failed, output, write_fd)
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(write_fd)
    handle = os.pidfd_open(child)
    late_test = _wait(handle, read_fd, limits, start)
    os.close(handle)
    os.close(read_fd)
    if late_test is not None:
        kill_descendants()
        return {"outcome": "timed out", "by": late_test}
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_descendants()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(output.read_text())
    if code == pytest.ExitCode.OK:
        return {"outcome": "survived", "by": ""}
    return {"outcome": "killed", "by": failed.read_text() if failed.exists() else f"exit code {code}"}


def _wait(exit_fd: int, start_fd: int, limits: Mapping[str, float], start: float) -> str | None:
    """Wait until the process exits or a test exceeds its limit.

    Args:
        exit_fd: pidfd of the process.
        start_fd: File descriptor with the ids of started tests.
        limits: Test id -> time limit in seconds.
        start: Time limit in seconds of the imports.

    Returns:
        The test that exceeded its limit, with the limit, or None.
    """
    test, limit = "the imports", start
    deadline = time.monotonic() + limit
    while True:
        ready, _, _ = select.select([exit_fd, start_fd], [], [], max(0.0, deadline - time.monotonic()))
        if exit_fd in ready:
            return None
        if not ready:
            return f"{test}: {limit:.0f} s"
        if not (nodeids := os.read(start_fd, 2**16).decode(errors="replace")):
            continue  # the process closed the pipe and is about to exit
        test = nodeids.splitlines()[-1]
        limit = limits.get(test, start)  # a read may end within an id
        deadline = time.monotonic() + limit


def serve() -> None:
    adopt_orphans()
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(trial(request["tests"], request["start"], Path(folder))), flush=True)


if __name__ == "__main__":
    serve()
