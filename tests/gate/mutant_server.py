"""Runs trials for mutants.py: imports the big packages of others once and forks for each trial.

    {"tests": {id: 30.0}, "start": 40.0}  ->  {"outcome": "killed", "by": "tests/unit/test_a.py::test"}

One line of JSON each way. The numbers are seconds: for each test, and until the first one begins. A trial imports our
own files anew, so it sees the file that was changed on disk. What it leaves running is ended before the next one.
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
"""Not megatron, which our patches must meet before its first import."""
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


class Chosen:
    """pytest plug-in: keeps the tests of a list, in its order, tells which one begins, and writes down the first that
    fails."""

    def __init__(self, tests: Collection[str], failed: Path, begun: int) -> None:
        self._place = {test: n for n, test in enumerate(tests)}
        self._failed = failed
        self._begun = begun

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._begun, f"{nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.exists():
            self._failed.write_text(report.nodeid, encoding="utf-8")


def try_tests(tests: Collection[str], failed: Path, output: Path, begun: int) -> int:
    """In the forked process: pytest's exit code."""
    with output.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    for name in [name for name in sys.modules if name.split(".")[0] in FOLDERS]:
        del sys.modules[name]
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return int(pytest.main([*OPTIONS, *files], plugins=[Chosen(tests, failed, begun)]))


def end_all() -> None:
    """Whatever a trial started, also what is in a session of its own: it was adopted by this process."""
    while children := psutil.Process().children(recursive=True):
        for process in children:
            process.kill()
        psutil.wait_procs(children)


def trial(limits: Mapping[str, float], start: float, folder: Path) -> dict[str, str]:
    """`outcome`, and `by`: the test that failed or took too long, or how pytest ended without one (a file that cannot
    be imported)."""
    failed, output = folder / "failed", folder / "output"
    failed.unlink(missing_ok=True)
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if not child:
        code = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            code = try_tests(limits, failed, output, write_fd)
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(write_fd)
    handle = os.pidfd_open(child)
    late = _waited(handle, read_fd, limits, start)
    os.close(handle)
    os.close(read_fd)
    if late is not None:
        end_all()
        return {"outcome": "timed out", "by": late}
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_all()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(output.read_text())
    if code == pytest.ExitCode.OK:
        return {"outcome": "survived", "by": ""}
    return {"outcome": "killed", "by": failed.read_text() if failed.exists() else f"exit code {code}"}


def _waited(ended: int, told: int, limits: Mapping[str, float], start: float) -> str | None:
    """Until the process `ended`, which tells of every test that begins: the test that takes too long, if one does."""
    test, limit = "the imports", start
    deadline = time.monotonic() + limit
    while True:
        ready, _, _ = select.select([ended, told], [], [], max(0.0, deadline - time.monotonic()))
        if ended in ready:
            return None
        if not ready:
            return f"{test}: {limit:.0f} s"
        if not (nodeids := os.read(told, 2**16).decode(errors="replace")):
            continue  # it is about to end
        test = nodeids.splitlines()[-1]
        limit = limits.get(test, start)  # half a name, where many were told at once
        deadline = time.monotonic() + limit


def serve() -> None:
    adopt_orphans()
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(trial(order["tests"], order["start"], Path(folder))), flush=True)


if __name__ == "__main__":
    serve()
