"""Mutation testing, `make mutants`: unit tests must detect at least 90% of random small changes to the code.

    choose mutants (mutant_drawing.py) -> a clean run that records the lines that each test runs -> for each mutant
    the tests that run its line, the nearest first, until one fails -> the surviving mutants, as diffs

Each worker has a copy of the working tree, in which it changes one file at a time, and a server with the large
packages imported that forks for each trial (mutant_server.py). Equivalent mutants, which no test can detect, are
listed in equivalent_mutants.yaml with the reason and are not chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

from tests.gate.baseline import KEY
from tests.gate.mutant_drawing import Equivalents, Mutant, around, draw
from tests.gate.selection import ROOT, Reach
from tests.helpers.python_path import python_path

PLACES = (
    "rlsys/algo",
    "rlsys/rollout",
    "rlsys/worker",
    "rlsys/ledger",
    "rlsys/generators",
    "rlsys/planning",
    "rlsys/evaluation",
    "rlsys/router",
    "rlsys/gateway",
    "rlsys/trainer/pack.py",
    "rlsys/convert",
    "launch/supervisor.py",
)
UNIT = ("tests/unit",)
FIRST = 40
"""Number of tests in the first trial, which kills most mutants and imports few files."""
LEAST_SECONDS = 10.0
"""Minimum of the duration of a test, or of the imports before the first one, from which its time limit follows."""
PASS = 0.9


@dataclass(frozen=True)
class Verdict:
    """Result for a mutant.

    Attributes:
        mutant: The mutant.
        outcome: killed, timed out or survived.
        by: The first failed test, or another reason of the end.
        tried: Number of tests that may run.
        seconds: Duration.
    """

    mutant: Mutant
    outcome: str
    by: str
    tried: int
    seconds: float


def copy_tree(folder: Path) -> Path:
    """Copy the working tree without ignored files, link the same environment, and return the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(Path(sys.prefix))
    return folder


def environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(copy)}


@dataclass(frozen=True)
class CleanRun:
    """The unit tests without a mutant. `seconds`: duration of each. `folder`: coverage by test."""

    folder: Path
    seconds: dict[str, float]

    @classmethod
    def run(cls, copy: Path, folder: Path, workers: int, tests: Sequence[str] = UNIT) -> CleanRun:
        """Run test files and folders in a copy of the tree.

        Raises:
            SystemExit: A test fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not full and not slow", *tests]
        command += ["-n", str(workers), "--dist", "worksteal", "-o", f"cache_dir={folder / 'cache'}"]
        command += ["--cov=rlsys", "--cov=launch", "--cov-context=test", "--cov-report="]
        env = environment(copy) | {"COVERAGE_FILE": str(folder / "coverage")}
        if subprocess.run(command, cwd=copy, env=env).returncode:
            raise SystemExit("a test fails without a mutant: fix it first")
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> CleanRun:
        rows = json.loads((folder / "cache/v" / KEY).read_text(encoding="utf-8"))
        return cls(
            folder, {nodeid: seconds for nodeid, (outcome, seconds, _) in rows.items() if outcome == "passed"}
        )

    @cached_property
    def _lines(self) -> dict[str, dict[int, list[str]]]:
        data = CoverageData(str(self.folder / "coverage"))
        data.read()
        return {file: data.contexts_by_lineno(file) for file in data.measured_files()}

    def running(self, file: str, lines: range) -> set[str]:
        """Return the tests that ran one of the lines, without runs at import and in other processes."""
        line_contexts = self._lines.get(file, {})
        contexts = {context.rsplit("|", 1)[0] for line in lines for context in line_contexts.get(line, ())}
        return contexts & self.seconds.keys()

    def order(self, mutant: Mutant, original: str, reach: Reach) -> list[str]:
        """Return the tests for a mutant, in order.

        Tests that run its line come first, then the other tests of the nearest test files. The order within both is
        by distance to the file, then by the share of a test file's tests that run the line, then by duration.
        """
        steps = reach.steps([mutant.file])
        assert steps is not None
        running: set[str] = set()
        # For a line that runs at import, take the tests that run the rest of its class or file.
        for lines in around(original, mutant.line):
            running = running or self.running(mutant.file, lines)
        files = {test: test.split("::")[0] for test in self.seconds}
        step = {test: steps.get(file, len(steps)) for test, file in files.items()}
        neighbor_tests = {test for test in step if step[test] == min(step.values())} - running
        all_counts, running_counts = Counter(files.values()), Counter(files[test] for test in running)
        sort_keys = {
            test: (
                test in neighbor_tests,
                step[test],
                -running_counts[file] / all_counts[file],
                file,
                self.seconds[test],
            )
            for test, file in files.items()
        }
        return sorted(running | neighbor_tests, key=sort_keys.__getitem__)


@dataclass
class MutantWorker:
    """A worker with a copy of the tree and a server of trials. `patience`: see `arguments`."""

    copy: Path
    clean: CleanRun
    reach: Reach
    patience: float
    tried: int = 0
    server: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "tests.gate.mutant_server"]
        self.server = subprocess.Popen(
            command,
            cwd=self.copy,
            env=environment(self.copy),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def judge(self, mutant: Mutant) -> Verdict:
        path, start = self.copy / mutant.file, time.monotonic()
        original, stat = path.read_bytes(), path.stat()
        tests = self.clean.order(mutant, original.decode(), self.reach)
        path.write_text(mutant.mutated, encoding="utf-8")
        self.tried += 1  # Python identifies compiled files by size and seconds, which two mutants may share
        os.utime(path, (self.tried, self.tried))
        outcome, by = "survived", ""
        for batch in (tests[:FIRST], tests[FIRST:]):
            if batch and outcome == "survived":
                outcome, by = self.trial(batch)
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if outcome == "killed" and by not in self.clean.seconds and self.trial(tests[:1])[0] != "survived":
            raise SystemExit(f"{tests[0]} fails in the copy without a mutant: {by}")
        return Verdict(mutant, outcome, by, len(tests), time.monotonic() - start)

    def trial(self, tests: list[str]) -> tuple[str, str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        limits = {test: max(LEAST_SECONDS, self.clean.seconds[test]) * self.patience for test in tests}
        request = {"tests": limits, "start": LEAST_SECONDS * self.patience}
        print(json.dumps(request), file=self.server.stdin, flush=True)
        if not (answer := self.server.stdout.readline()):
            raise SystemExit("the server of trials ended")
        result = json.loads(answer)
        return result["outcome"], result["by"]

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()


def judge_all(mutants: list[Mutant], workers: list[MutantWorker]) -> Iterator[Verdict]:
    """Yield the verdicts in the order of the mutants. Each worker has one mutant at a time."""
    idle: SimpleQueue[MutantWorker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def judge(mutant: Mutant) -> Verdict:
        worker = idle.get()
        try:
            return worker.judge(mutant)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        yield from pool.map(judge, mutants)


def earlier_verdicts(file: Path, mutants: Iterable[Mutant]) -> dict[Mutant, Verdict]:
    """Return the verdicts of an earlier run on these mutants by their text, without survivors."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {tuple(row.pop("key")): row for row in map(json.loads, lines) if row["outcome"] != "survived"}
    return {mutant: Verdict(mutant, **rows[mutant.key]) for mutant in mutants if mutant.key in rows}


def record(file: Path, verdict: Verdict) -> None:
    """Append a verdict to the file that `earlier_verdicts` reads."""
    row = {name: value for name, value in vars(verdict).items() if name != "mutant"}
    with file.open("a", encoding="utf-8") as out:
        print(json.dumps({"key": verdict.mutant.key, **row}), file=out)


def report(verdicts: list[Verdict]) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    detected = 1 - counts["survived"] / max(1, len(verdicts))
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("killed", "timed out", "survived"))
    return f"{len(verdicts)} mutants: {summary}; {detected:.1%} detected, at least {PASS:.0%} expected"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--part", default=":", metavar="A:B", help="only this slice of the chosen mutants, from 0"
    )
    parser.add_argument("--places", nargs="+", default=PLACES, help="files and folders to change")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=UNIT,
        metavar="PATH",
        help="files and folders of the tests to run",
    )
    parser.add_argument(
        "--verdicts",
        type=Path,
        metavar="FILE",
        help="append each verdict, and skip mutants that a test has detected",
    )
    parser.add_argument(
        "--clean",
        type=Path,
        metavar="FOLDER",
        help="store the clean run in this folder, or use the one that is there",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=4.0,
        help="time limit of a test as a multiple of its duration without a mutant; raise on a busy machine",
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    equivalents = Equivalents.read()
    print("\n".join(equivalents.stale(ROOT)), end="")
    first, last = (int(word) if word else None for word in options.part.split(":"))
    mutants = draw(ROOT, options.places, options.count, options.seed, equivalents)[first:last]
    earlier = earlier_verdicts(options.verdicts, mutants) if options.verdicts else {}
    verdicts = list(earlier.values())
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copies = [copy_tree(Path(name) / str(n)) for n in range(options.workers)]
        clean_folder = options.clean or Path(name) / "clean"
        has_coverage = (clean_folder / "coverage").exists()
        clean = (
            CleanRun.read(clean_folder)
            if has_coverage
            else CleanRun.run(copies[0], clean_folder, options.workers, options.tests)
        )
        reach = Reach(ROOT)
        workers = [MutantWorker(copy, clean, reach, options.patience) for copy in copies]
        for verdict in judge_all([mutant for mutant in mutants if mutant not in earlier], workers):
            verdicts.append(verdict)
            if options.verdicts:
                record(options.verdicts, verdict)
            mutant = verdict.mutant
            number = mutants.index(mutant) + (first or 0)
            print(
                f"{number} {verdict.outcome} {verdict.seconds:.0f} s {mutant.file}:{mutant.line} {verdict.by}",
                flush=True,
            )
            if verdict.outcome != "killed":
                print(mutant.diff((ROOT / mutant.file).read_text(encoding="utf-8")), flush=True)
        for worker in workers:
            worker.close()
    print(report(verdicts))
    return int(sum(verdict.outcome != "survived" for verdict in verdicts) < PASS * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
