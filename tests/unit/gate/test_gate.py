"""The gate itself: which tests a change reaches, which do not fit the time left, which are told to be slow."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.gate import baseline, budget, other_python
from tests.gate.baseline import Result, slow_and_new, tier
from tests.gate.counts import XPASSED_FILES, total, unexpected_passes
from tests.gate.selection import ROOT, Reach, modules

pytest_plugins = ["pytester"]

FILES = {
    "rlsys/__init__.py": "",
    "rlsys/core/types.py": "",
    "rlsys/train.py": "def main():\n    from rlsys.core.types import Sample\n",
    "rlsys/cli/main.py": "# rlsys.report\nROLE = ['-m', 'rlsys.train']\n",
    "rlsys/report.py": '"""It names rlsys.cli.main, but only in prose."""\n',
    "configs/quick.yaml": "",
    "configs/methods/a.yaml": "",
    "tests/unit/helper.py": "from rlsys.core import types\n",
    "tests/unit/test_types.py": "from tests.unit import helper\n",
    "tests/unit/obs/test_report.py": "import rlsys.report\n",
    "tests/unit/test_methods.py": "for path in (ROOT / 'configs' / 'methods').glob('*'): ...\n",
    "tests/integration/test_run.py": "COMMAND = ['-m', 'rlsys.cli.main', 'configs/quick.yaml']\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


RUN, TYPES, REPORT, METHODS = (
    "tests/integration/test_run.py",
    "tests/unit/test_types.py",
    "tests/unit/obs/test_report.py",
    "tests/unit/test_methods.py",
)
EVERYTHING = sorted((RUN, TYPES, REPORT, METHODS))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], []),
        (["rlsys/cli/main.py"], [RUN]),
        (["rlsys/train.py"], [RUN]),
        (["rlsys/core/types.py"], [TYPES, RUN]),
        (["rlsys/report.py"], [REPORT]),
        (["tests/unit/helper.py"], [TYPES]),
        ([TYPES], [TYPES]),
        (["tests/unit/test_gone.py"], []),
        (["configs/quick.yaml"], [RUN, METHODS]),
        (["configs/methods/a.yaml"], [METHODS]),
        (["docs/a.md"], []),
        (["Makefile"], EVERYTHING),
        (["pyproject.toml", "rlsys/report.py"], EVERYTHING),
        (["tests/conftest.py"], EVERYTHING),
        (["tests/gate/budget.py"], EVERYTHING),
        (None, EVERYTHING),
    ],
    ids=str,
)
def test_a_change_selects_tests_that_import_or_name_it(
    changed: list[str] | None, expected: list[str], repository: Path
) -> None:
    assert Reach(repository).tests(changed) == expected


def test_tests_are_ordered_by_distance_from_the_change(repository: Path) -> None:
    """By the steps from them to the change, whatever their names."""
    assert Reach(repository).tests(["rlsys/core/types.py", METHODS]) == [METHODS, TYPES, RUN]


@pytest.mark.gate
def test_the_layout_tests_are_reached_from_the_trainer_and_not_from_the_gateway() -> None:
    """On this repository: what one would expect of three changes."""
    layouts, reach = "tests/integration/test_trainer_layouts.py", Reach(ROOT)
    assert layouts in reach.tests(["rlsys/trainer/trainer.py"])
    assert layouts not in reach.tests(["rlsys/router/router.py"])
    assert "tests/integration/test_kill_nine.py" in reach.tests(["rlsys/rewards/judges.py"])


def test_a_file_is_the_module_of_its_path() -> None:
    assert modules(["tests/unit/helper.py", "rlsys/a/__init__.py"]) == {
        "tests.unit.helper": "tests/unit/helper.py",
        "rlsys.a": "rlsys/a/__init__.py",
    }


def test_files_of_one_name_in_two_folders_run_in_one_session(pytester: pytest.Pytester) -> None:
    """With this repository's options; that the whole tree is collected is the first stage of `.ci/run`."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in ("unit", "integration"):
        pytester.mkdir(folder).joinpath("test_same.py").write_text("def test_one(): ...")
    options = shlex.split(pyproject["tool"]["pytest"]["ini_options"]["addopts"])
    pytester.inline_run(*options, "-p", "no:asyncio").assertoutcome(passed=2)


def test_a_tests_tier_is_the_first_that_runs_it() -> None:
    assert tier("tests/unit/test_a.py::test", {}) == "check"
    assert tier("tests/unit/test_a.py::test", {"gate": 1}) == "test"
    assert tier("tests/unit/test_a.py::test", {"slow": 1}) == "test-all"
    assert tier("tests/cluster/test_a.py::test", {"cluster": 1}) == "test"
    assert tier("tests/integration/test_a.py::test", {"full": 1}) == "test-all"


def test_slow_tests_are_reported_unless_listed_in_the_file() -> None:
    tiers = {
        "known": "test",
        "grown": "test",
        "new": "test",
        "quick": "test",
        "late": "test-all",
        "unit": "check",
    }
    seconds = {"known": 50.0, "grown": 70.0, "new": 40.0, "quick": 20.0, "late": 900.0, "unit": 6.0}
    notices = slow_and_new(seconds, tiers, {"known": 45.0, "grown": 45.0})
    assert [line.split()[0] for line in notices] == ["grown", "new", "unit"]
    assert notices[1].startswith(
        "new takes 40 s and is in tier test (new ones: up to 25 s): take its mark `gate` off"
    )
    assert notices[2].endswith("(new ones: up to 2 s): mark it `gate`, or speed it up")


def test_the_last_line_sums_the_sessions() -> None:
    first_session = json.dumps({"passed": 10, "skipped": 2, "seconds": 1.5})
    second_session = json.dumps({"passed": 5, "failed": 1, "error": 2, "seconds": 2.0})
    assert total([first_session, second_session]) == "1 failed, 15 passed, 2 skipped, 2 errors in 3.50s"
    assert total([]) == "no tests ran in 0.00s"
    listing = json.dumps({"xpassed": 3, "seconds": 1.0, XPASSED_FILES: {"tests/b.py": 1, "tests/a.py": 2}})
    assert unexpected_passes([first_session, listing, listing]) == (
        "passed without a recorded pass: tests/a.py 4, tests/b.py 2"
    )
    assert total([listing]) == "3 xpassed in 1.00s" and unexpected_passes([first_session]) == ""


def test_tests_that_exceed_the_remaining_time_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixture of the tests that ran ends before the tests of the next file begin, whatever was left out."""
    pytester.makepyfile(
        test_one="""
        import pytest
        @pytest.fixture(scope="module")
        def shared():
            yield
            print("shared ends")
        def test_short(shared): ...
        def test_long(shared): ...
        """,
        test_two="def test_short(): print('second file begins')",
    )
    monkeypatch.setattr(budget, "calibration", lambda: budget.REFERENCE_SECONDS)
    monkeypatch.setattr(budget, "durations", lambda: {"test_one.py::test_long": 100.0})
    monkeypatch.setattr(budget, "UNKNOWN_SECONDS", 1.0)
    monkeypatch.setattr(budget.time, "time", lambda: 1000.0)
    run_result = pytester.inline_run("-p", "tests.gate.budget", "--until", "1050", "-s", "-p", "no:asyncio")
    run_result.assertoutcome(passed=2, skipped=1)
    run_result = pytester.inline_run("-p", "tests.gate.budget", "--until", "1000.5", "-p", "no:asyncio")
    run_result.assertoutcome(skipped=3)


def test_a_recorded_failure_is_named_and_fails_no_session(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded failures are single tests with their parameters; a test that the file does not have must pass."""
    pytester.makepyfile(test_file="def test_a(): assert False\ndef test_b(): ...")
    pytester.makepyfile(
        test_some="""
        import pytest
        @pytest.fixture
        def broken():
            raise OSError
        def test_setup(broken): ...
        @pytest.mark.parametrize("x", [1, 2])
        def test_each(x): assert x == 2
        def test_each_else(): assert False
        """
    )
    monkeypatch.setattr(baseline, "FILE", pytester.path / "baseline.json")
    listed = (
        "test_file.py::test_a",
        "test_file.py::test_b",
        "test_some.py::test_setup",
        "test_some.py::test_each[1]",
    )
    baseline.write(
        {nodeid: Result("failed", 1.0, "") for nodeid in listed}
        | {"test_some.py::test_each[2]": Result("passed", 1.0, "")}
    )
    plug_in = ("-p", "tests.gate.baseline", "-p", "no:asyncio")
    pytester.inline_run(*plug_in).assertoutcome(passed=2, failed=4)
    run_result = pytester.runpytest_inprocess(*plug_in, "--baseline-failures-may-fail")
    run_result.assert_outcomes(passed=1, failed=1, xfailed=3, xpassed=1)
    run_result.stdout.fnmatch_lines(["FAILED test_file.py::test_a", "passed test_file.py::test_b"])
    baseline.write({**baseline.read(), "test_some.py::test_each_else": Result(baseline.NOT_RUN, 0.0, "")})
    run_result = pytester.runpytest_inprocess(*plug_in, "--baseline-failures-may-fail", "-v")
    assert run_result.ret == 0
    order = run_result.stdout.str()
    assert order.index("test_each_else XFAIL") < order.index("test_each[2] PASSED"), "without a pass: first"


def test_the_baseline_names_tests() -> None:
    """A function, or a test case that a state machine makes."""
    sources: dict[str, str] = {}
    for nodeid in baseline.read():
        file, _, test = nodeid.partition("::")
        if file not in sources:
            sources[file] = (ROOT / file).read_text(encoding="utf-8")
        assert test.partition("[")[0].partition("::")[0] in sources[file], nodeid


def test_results_are_stored_and_a_skipped_test_has_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--until` skips tests that do not fit."""
    pytester.makepyfile(
        """
        import pytest
        @pytest.fixture
        def broken():
            yield
            raise OSError
        def test_passes(): ...
        def test_skips(): pytest.skip()
        def test_fails(): assert False
        def test_ends_badly(broken): ...
        """
    )
    monkeypatch.setattr(baseline, "FILE", pytester.path / "baseline.json")
    plug_in = ("-p", "tests.gate.baseline", "-p", "no:asyncio")
    pytester.inline_run(*plug_in)
    pytester.inline_run(*plug_in, "--collect-only", "--store-baseline")
    outcomes = {name.partition("::")[2]: row.outcome for name, row in baseline.read().items()}
    assert outcomes == {
        "test_passes": "passed", "test_skips": "not run", "test_fails": "failed", "test_ends_badly": "failed"
    }  # fmt: skip
    assert list(baseline.durations()) == [next(iter(n for n in baseline.read() if n.endswith("test_passes")))]


def test_durations_are_relative_to_a_fixed_computation() -> None:
    assert 0.01 < baseline.calibration() / baseline.REFERENCE_SECONDS < 100


def test_commits_take_turns_with_the_other_pythons() -> None:
    assert other_python.order("0" * 39 + "a", (3, 11)) == [(3, 12), (3, 13)]
    assert other_python.order("0" * 39 + "b", (3, 11)) == [(3, 13), (3, 12)]
    assert other_python.order("c1", (3, 13)) == [(3, 12), (3, 11)]


def test_a_python_that_is_not_installed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_python, "find", lambda version: None)
    assert other_python.set_up(tmp_path) == other_python.train(tmp_path) == 0
    output_lines = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in output_lines if line.endswith("NOT INSTALLED here, so it was not tried")]) == 2
    )
    assert output_lines[-1] == "NO FURTHER PYTHON was tried: none is installed"


def test_a_failed_setup_on_another_python_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(other_python, "find", lambda version: "/no/python")
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", "w -- PYTHON=python3")
    assert other_python.set_up(tmp_path) == 1
    output = capsys.readouterr().out
    assert "(/no/python): set-up FAILED: exit code 2" in output and "/no/python" in output.splitlines()[1]


def test_mypy_reads_every_folder_with_python_files() -> None:
    """A method that is renamed must not live on in a file that only a GPU or a cluster runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    read = {*project["tool"]["mypy"]["files"], "setup.py"}
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {name.partition("/")[0] for name in tracked.stdout.split()} <= read
    assert project["tool"]["mypy"]["exclude"] == ["tests/data/"]
    assert project["tool"]["mypy"]["check_untyped_defs"]
