"""`make mutants`: what is drawn, what is left out, how a line finds its tests, and what a trial tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cosmic_ray.mutating import mutate_code
from coverage import CoverageData

from tests.gate.mutant_drawing import (
    CatchNothing,
    DropStatement,
    Equivalents,
    Mutant,
    around,
    draw,
    operators,
    statement_lines,
)
from tests.gate.mutants import PASS, PLACES, CleanRun, Verdict, earlier_verdicts, record, report
from tests.gate.selection import ROOT, Reach
from tests.helpers.python_path import python_path

CODE = '''"""Prose with 1 number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    size: int | None = None

    def fits(self, size: int | None, *rest: int) -> bool | None:
        if self.size is None or size < 3:
            return None
        try:
            left = self.size - size
        except OSError.errno:
            self.clear(
                left,
            )
        return left > 0
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/box.py").write_text(CODE)
    return tmp_path


NONE = Equivalents({}, {})


def lines(mutants: list[Mutant]) -> set[int]:
    return {mutant.line for mutant in mutants}


def test_each_code_line_is_drawn_once_without_docstrings_and_annotations(tree: Path) -> None:
    drawn = draw(tree, ["pack"], 100, 1, NONE)
    assert lines(drawn) == {6, 11, 14, 15, 16, 19}
    assert len(drawn) == 6
    for mutant in drawn:
        compile(mutant.mutated, mutant.file, "exec")
        assert mutant.function == ("Box" if mutant.line == 6 else "Box.fits")
        assert mutant.mutated != CODE


def test_protocol_classes_are_not_mutated(tree: Path) -> None:
    (tree / "pack/kind.py").write_text(
        "from typing import Protocol\n\n"
        "class Kind(Protocol):\n    @property\n    def size(self) -> int: ...\n\n"
        "a = 1\n"
    )
    assert lines(draw(tree, ["pack/kind.py"], 100, 1, NONE)) == {7}


def test_a_seed_draws_the_same_again_and_another_seed_others(tree: Path) -> None:
    assert draw(tree, ["pack/box.py"], 3, 1, NONE) == draw(tree, ["pack"], 100, 1, NONE)[:3]
    assert len({tuple(m.key for m in draw(tree, ["pack"], 3, seed, NONE)) for seed in range(5)}) > 1


def test_an_edit_elsewhere_draws_the_same(tree: Path) -> None:
    keys_before = [m.key for m in draw(tree, ["pack"], 100, 1, NONE)]
    (tree / "pack/box.py").write_text("\n\n" + CODE + "\n\ndef new() -> int:\n    return 7\n")
    keys_after = [m.key for m in draw(tree, ["pack"], 100, 1, NONE)]
    assert [key for key in keys_after if key[1] != "new"] == keys_before
    assert len(keys_after) == len(keys_before) + 1


def test_listed_equivalent_mutants_are_not_drawn(tree: Path) -> None:
    chosen = draw(tree, ["pack"], 100, 1, NONE)[0]
    assert chosen.key not in [m.key for m in draw(tree, ["pack"], 100, 1, Equivalents({chosen.key: ""}, {}))]
    frozen = Equivalents({}, {"frozen=True": ""})
    assert all(
        "frozen=False" not in m.after for seed in range(9) for m in draw(tree, ["pack"], 100, seed, frozen)
    )
    assert any("frozen=False" in m.after for seed in range(9) for m in draw(tree, ["pack"], 100, seed, NONE))


def test_stale_equivalent_mutants_are_reported(tree: Path) -> None:
    current_entry = ("pack/box.py", "Box.fits", "return left > 0", "return left >= 0")
    stale_entry = ("pack/box.py", "Box.fits", "return left > 1", "return left >= 1")
    moved = ("pack/away.py", "", "a = 1", "a = 2")
    messages = Equivalents(dict.fromkeys((current_entry, stale_entry, moved), ""), {}).stale(tree)
    assert messages == [
        "pack/box.py: Box.fits: no longer there: return left > 1",
        "pack/away.py: : no longer there: a = 1",
    ]


def test_the_shipped_list_is_read_and_gives_reasons() -> None:
    shipped = Equivalents.read()
    assert all(shipped.entries.values()) and all(shipped.anywhere.values())
    assert all((ROOT / path).exists() for path in PLACES)
    assert shipped.stale(ROOT) == []


@pytest.mark.parametrize("operator", [DropStatement(), CatchNothing()])
def test_our_own_changes_are_those_of_their_examples(operator: DropStatement | CatchNothing) -> None:
    for example in operator.examples():
        assert mutate_code(example.pre_mutation_code, operator, 0) == example.post_mutation_code
    assert type(operator) in [type(candidate) for family in operators().values() for candidate in family]


@pytest.mark.parametrize(
    ("line", "expected"), [(11, range(11, 12)), (14, range(14, 15)), (17, range(16, 19)), (10, range(10, 11))]
)
def test_a_statement_has_all_its_lines_and_a_block_its_head(line: int, expected: range) -> None:
    assert statement_lines(CODE, line) == expected


def test_enclosing_ranges_of_a_line_widen_from_statement_to_file() -> None:
    assert around(CODE, 14) == [range(14, 15), range(10, 20), range(6, 20), range(1, 21)]
    assert around(CODE, 3) == [range(3, 4), range(1, 21)]


def test_tests_that_cover_the_line_precede_the_nearest_other_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "rlsys/box.py": CODE,
        "tests/unit/helper.py": "import rlsys.box\n",
        "tests/unit/test_box.py": "from rlsys import box\n",
        "tests/unit/test_far.py": "import helper\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    near, sibling, far, away = (
        "tests/unit/test_box.py::test_a",
        "tests/unit/test_box.py::test_b",
        "tests/unit/test_far.py::test[a::b]",
        "tests/unit/test_away.py::test",
    )
    clean = CleanRun(tmp_path, {far: 0.1, near: 5.0, sibling: 1.0, away: 0.1})
    monkeypatch.setattr(CleanRun, "running", lambda self, file, lines: {near, far} if 14 in lines else set())
    mutant = Mutant("rlsys/box.py", 14, "Box.fits", "", "", "")
    assert clean.order(mutant, CODE, Reach(tmp_path)) == [near, far, sibling]
    monkeypatch.setattr(CleanRun, "running", lambda self, file, lines: {far} if 8 in lines else set())
    imported = Mutant("rlsys/box.py", 7, "Box", "", "", "")  # no test runs it; one runs the class around it
    assert clean.order(imported, CODE, Reach(tmp_path)) == [far, sibling, near]


def test_coverage_contexts_identify_the_tests_of_a_line(tmp_path: Path) -> None:
    data = CoverageData(str(tmp_path / "coverage"))
    for context, lines in {"test_a.py::test[x|y]|run": [1, 2], "test_b.py::test|setup": [2], "": [3]}.items():
        data.set_context(context)
        data.add_lines({"rlsys/box.py": lines})
    data.write()
    clean = CleanRun(tmp_path, {"test_a.py::test[x|y]": 1.0, "test_b.py::test": 1.0})
    assert clean.running("rlsys/box.py", range(2, 4)) == {"test_a.py::test[x|y]", "test_b.py::test"}
    assert clean.running("rlsys/box.py", range(1, 2)) == {"test_a.py::test[x|y]"}
    assert clean.running("rlsys/box.py", range(3, 4)) == clean.running("rlsys/no.py", range(1, 4)) == set()


TRIALS = """
import json, sys
from pathlib import Path
import psutil
from launch.guard import adopt_orphans
from tests.gate.mutant_server import trial

adopt_orphans()
for limits in json.loads(sys.argv[1]):
    told = trial(limits, 60, Path.cwd())
    print(told["outcome"], told["by"], len(psutil.Process().children()))
"""


@pytest.mark.gate
def test_a_trial_reports_the_first_failing_test_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import subprocess\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_worse(): assert False\n"
        "def test_endless():\n"
        "    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    while True: pass\n"
    )
    (tmp_path / "test_b.py").write_text("import no_such_module\ndef test(): pass\n")
    good, bad, worse, endless = (f"test_a.py::test_{name}" for name in ("good", "bad", "worse", "endless"))
    trials = [{good: 60}, {worse: 60, good: 60, bad: 60}, {"test_b.py::test": 60}, {good: 60, endless: 3}]
    process = subprocess.run(
        [sys.executable, "-c", TRIALS, json.dumps(trials)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.stdout.splitlines() == [
        "survived  0",
        f"killed {worse} 0",
        "killed exit code 2 0",
        f"timed out {endless}: 3 s 0",
    ], process.stderr


def verdicts(*outcomes: str) -> list[Verdict]:
    return [Verdict(Mutant("a.py", 1, "", "", "", ""), outcome, "", 1, 1.0) for outcome in outcomes]


def test_the_last_line_has_the_counts_and_the_share() -> None:
    summary = report(verdicts(*["killed"] * 16, "timed out", "survived", "survived", "survived"))
    assert (
        summary
        == f"20 mutants: 16 killed, 1 timed out, 3 survived; 85.0% detected, at least {PASS:.0%} expected"
    )


def test_a_mutant_that_an_earlier_run_noticed_is_not_tried_again(tmp_path: Path) -> None:
    """Not even where its line has moved; one that survived is."""
    file, killed_mutant = tmp_path / "verdicts", Mutant("a.py", 1, "f", "x < 1", "x <= 1", "old text")
    survivor = Mutant("a.py", 2, "f", "y < 1", "y <= 1", "old text")
    for mutant, outcome in ((killed_mutant, "killed"), (survivor, "survived")):
        record(file, Verdict(mutant, outcome, "test", 3, 1.0))
    moved = Mutant("a.py", 5, "f", "x < 1", "x <= 1", "new text")
    assert earlier_verdicts(file, [moved, survivor]) == {moved: Verdict(moved, "killed", "test", 3, 1.0)}
    assert earlier_verdicts(tmp_path / "none", [moved]) == {}
