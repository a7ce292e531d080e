"""`make mutants`: small changes to the code, drawn from a seed. Unit tests must notice nine of ten.

    draw (mutant_drawing.py) -> a clean run that notes which test runs which line -> for each mutant the tests that
    run its line, the nearest first, until one fails -> what lived, as diffs

Each worker has a copy of the working tree, in which it changes one file at a time, and a server that has the big
packages imported and forks for each trial (mutant_server.py). Mutants that no test can notice are listed in
equivalent_mutants.yaml with the reason; they are not drawn.
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
"""Tests tried first: they end most mutants, and few files are imported for them."""
LEAST_SECONDS = 10.0
"""What a test, or the imports before the first one, counts as at least when its time limit is made."""
PASS = 0.9


@dataclass(frozen=True)
class Verdict:
    """`outcome`: killed, timed out or survived; `by`: the first test that failed, or what else ended it."""

    mutant: Mutant
    outcome: str
    by: str
    tried: int
    seconds: float


def copied(folder: Path) -> Path:
    """The working tree as git sees it, with a link to the same environment."""
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
    """The unit tests without a mutant: `seconds` of each, and in `folder` which of them ran which line."""

    folder: Path
    seconds: dict[str, float]

    @classmethod
    def made(cls, copy: Path, folder: Path, workers: int, tests: Sequence[str] = UNIT) -> CleanRun:
        """Runs the tests, files and folders, in the copy. Raises SystemExit when one fails."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not full and not slow", *tests]
        command += ["-n", str(workers), "--dist", "worksteal", "-o", f"cache_dir={folder / 'cache'}"]
        command += ["--cov=rlsys", "--cov=launch", "--cov-context=test", "--cov-report="]
        recorded = environment(copy) | {"COVERAGE_FILE": str(folder / "coverage")}
        if subprocess.run(command, cwd=copy, env=recorded).returncode:
            raise SystemExit("a test fails without any mutant: mend it first")
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
        """Ids of the tests that ran one of the lines; none for what runs at import or in a process of its own."""
        line_contexts = self._lines.get(file, {})
        contexts = {context.rsplit("|", 1)[0] for line in lines for context in line_contexts.get(line, ())}
        return contexts & self.seconds.keys()

    def order(self, mutant: Mutant, original: str, reach: Reach) -> list[str]:
        """Ids of the tests for a mutant: what runs its line, then whatever else is in the test files nearest to its
        file. The nearest come first; of those, files of which most tests run the line; of these, the shortest tests.
        """
        steps = reach.steps([mutant.file])
        assert steps is not None
        running: set[str] = set()
        for lines in around(
            original, mutant.line
        ):  # what runs at import is near to what runs the rest of its class
            running = running or self.running(mutant.file, lines)
        files = {test: test.split("::")[0] for test in self.seconds}
        step = {test: steps.get(file, len(steps)) for test, file in files.items()}
        neighbor_tests = {test for test in step if step[test] == min(step.values())} - running
        of_all, of_running = Counter(files.values()), Counter(files[test] for test in running)
        sort_keys = {
            test: (
                test in neighbor_tests,
                step[test],
                -of_running[file] / of_all[file],
                file,
                self.seconds[test],
            )
            for test, file in files.items()
        }
        return sorted(running | neighbor_tests, key=sort_keys.__getitem__)


@dataclass
class Bench:
    """One worker: a copy of the tree, and a server of trials in it. `patience`: see `arguments`."""

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
        self.tried += 1  # Python tells compiled files apart by size and seconds, which two mutants may share
        os.utime(path, (self.tried, self.tried))
        outcome, by = "survived", ""
        for some in (tests[:FIRST], tests[FIRST:]):
            if some and outcome == "survived":
                outcome, by = self.trial(some)
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if outcome == "killed" and by not in self.clean.seconds and self.trial(tests[:1])[0] != "survived":
            raise SystemExit(f"{tests[0]} fails here without any mutant: {by}")
        return Verdict(mutant, outcome, by, len(tests), time.monotonic() - start)

    def trial(self, tests: list[str]) -> tuple[str, str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        limits = {test: max(LEAST_SECONDS, self.clean.seconds[test]) * self.patience for test in tests}
        order = {"tests": limits, "start": LEAST_SECONDS * self.patience}
        print(json.dumps(order), file=self.server.stdin, flush=True)
        if not (answer := self.server.stdout.readline()):
            raise SystemExit("the server of trials ended")
        result = json.loads(answer)
        return result["outcome"], result["by"]

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()


def judged(mutants: list[Mutant], benches: list[Bench]) -> Iterator[Verdict]:
    """In the order of the mutants; each bench has one at a time."""
    free: SimpleQueue[Bench] = SimpleQueue()
    for bench in benches:
        free.put(bench)

    def one(mutant: Mutant) -> Verdict:
        bench = free.get()
        try:
            return bench.judge(mutant)
        finally:
            free.put(bench)

    with ThreadPoolExecutor(len(benches)) as pool:
        yield from pool.map(one, mutants)


def earlier_verdicts(file: Path, mutants: Iterable[Mutant]) -> dict[Mutant, Verdict]:
    """Of the mutants, those that an earlier run noticed, by their text: what survived it is tried again."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = {tuple(row.pop("key")): row for row in map(json.loads, lines) if row["outcome"] != "survived"}
    return {mutant: Verdict(mutant, **rows[mutant.key]) for mutant in mutants if mutant.key in rows}


def record(file: Path, verdict: Verdict) -> None:
    """Append a line for `earlier_verdicts`."""
    row = {name: value for name, value in vars(verdict).items() if name != "mutant"}
    with file.open("a", encoding="utf-8") as out:
        print(json.dumps({"key": verdict.mutant.key, **row}), file=out)


def report(verdicts: list[Verdict]) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    noticed = 1 - counts["survived"] / max(1, len(verdicts))
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("killed", "timed out", "survived"))
    return f"{len(verdicts)} mutants: {summary}; {noticed:.1%} noticed, at least {PASS:.0%} expected"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", default=":", metavar="A:B", help="only these of the drawn mutants, from 0")
    parser.add_argument("--places", nargs="+", default=PLACES, help="files and folders to change")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=UNIT,
        metavar="PATH",
        help="files and folders of the tests that may notice",
    )
    parser.add_argument(
        "--verdicts",
        type=Path,
        metavar="FILE",
        help="append each verdict, and do not repeat what a test noticed",
    )
    parser.add_argument(
        "--clean", type=Path, metavar="FOLDER", help="keep the clean run there, and use one that is"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=4.0,
        help="a test times out after so many times what it takes without a mutant; more on a busy machine",
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
        copies = [copied(Path(name) / str(n)) for n in range(options.workers)]
        clean_folder = options.clean or Path(name) / "clean"
        has_coverage = (clean_folder / "coverage").exists()
        clean = (
            CleanRun.read(clean_folder)
            if has_coverage
            else CleanRun.made(copies[0], clean_folder, options.workers, options.tests)
        )
        reach = Reach(ROOT)
        benches = [Bench(copy, clean, reach, options.patience) for copy in copies]
        for verdict in judged([mutant for mutant in mutants if mutant not in earlier], benches):
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
        for bench in benches:
            bench.close()
    print(report(verdicts))
    return int(sum(verdict.outcome != "survived" for verdict in verdicts) < PASS * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
