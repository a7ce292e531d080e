"""Scripts run in a sealed namespace: their commands are recorded, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.core.errors import UserError
from rlsys.importers import namespace
from rlsys.importers.namespace import ScriptRun, run_script


def run(folder: Path, text: str, *arguments: str, gpus: int = 8, **variables: str) -> ScriptRun:
    script = folder / "run.sh"
    script.write_text(text)
    return run_script(script, arguments, variables, gpus)


def test_commands_have_the_words_that_bash_gives_them(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("MODEL_ARGS=(--layers 2)\n")
    text = """#!/bin/bash
pkill -9 python
ray stop --force
set -ex
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "$HERE/models/small.sh"
A=(--x 1 # comment
 --y "a b")
E=()
N=$(nvidia-smi -L | wc -l)
for i in 1 2; do S+="$i,"; done
ulimit -n 1000000
mkdir -p logs && cd logs
ray job submit --address=x -- python3 train.py ${MODEL_ARGS[@]} "${A[@]}" "${E[@]}" ${NONE[@]} --n $N \\
  --p $((2**6)) --d ${D:-deep} --s ${S%,} "$@" 2>&1 | tee out.log
srun --nodes 1 bash -c "unknown-program $HERE"
/opt/conda/bin/python last.py > log.txt
"""
    commands = run(tmp_path, text, "--more", "1 2", gpus=4).commands
    train = ["python3", "train.py", "--layers", "2", "--x", "1", "--y", "a b", "--n", "4", "--p", "64"]
    assert [*train, "--d", "deep", "--s", "1,2", "--more", "1 2"] in commands
    assert ["unknown-program", str(tmp_path)] in commands
    assert commands[-1] == ["python", "last.py"]
    assert commands[0] == ["pkill", "-9", "python"]


@pytest.mark.parametrize(
    ("text", "word", "reason"),
    [
        ("python x $LR", "$LR", "LR: a variable that is not set"),
        ("python x ${OUT}/run", "$OUT/run", "OUT: a variable that is not set"),
        ("A=$GONE\nB=$A/b\npython x $B", "$GONE/b", "GONE: a variable that is not set"),
        ("python x $1", "$1", "$1: an argument of the script that is not set"),
        ("f() { python x $2; }\nf a", "$2", "$2: an argument of the script that is not set"),
        ("python x $(conda info)", "$(conda info)", "what `conda info` prints is not known"),
        ("N=$(conda info | wc -l)\npython x $N", "$(conda info)", "what `conda info` prints is not known"),
        (
            "N=$(conda info | grep -c a | tr a b)\npython x $N",
            "$(conda info)",
            "what `conda info` prints is not known",
        ),
    ],
)
def test_a_value_that_the_script_does_not_determine_is_visible(
    text: str, word: str, reason: str, tmp_path: Path
) -> None:
    result = run(tmp_path, text)
    last = result.commands[-1][-1]
    found, _, remedy = (result.explain(last) or "").partition("; ")
    assert (result.source_text(last), found) == (word, reason)
    assert remedy.startswith(("--env", "--arguments TEXT gives it")) == ("not set" in reason)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ('if [ "$(conda info)" = a ]; then X=1; fi', '[ "$(conda info)" = a ]'),
        ("X=$(conda info)\nif [[ $X == a ]]; then Y=1; fi", "[[ $X == a ]]"),
        ("X=$(conda info)\ncase $X in a) Y=1 ;; esac", "case $X in"),
        ("if conda info | grep -q a; then X=1; fi", "grep -q a"),
        ("X=$((GONE + 1))", "X=$((GONE + 1))"),
    ],
)
def test_a_condition_on_such_a_value_is_recorded(text: str, condition: str, tmp_path: Path) -> None:
    (branch,) = run(tmp_path, text).branches
    assert branch.startswith(f"`{condition}") and "depends on a value that is not known" in branch


@pytest.mark.parametrize(
    "text",
    [
        'if [ -z "$GONE" ]; then GONE=3; fi\npython x $GONE',
        "python x ${GONE:-3}",
        ": ${GONE:=3}\npython x $GONE",
        "GONE=3; python x $GONE",
        "python x $GIVEN",
        'D=$(python -c "import torch_npu" 2>/dev/null && echo 4 || echo 3)\npython x $D',
    ],
)
def test_a_default_counts(text: str, tmp_path: Path) -> None:
    result = run(tmp_path, text, GIVEN="3")
    assert (result.commands[-1], result.branches) == (["python", "x", "3"], [])


@pytest.mark.parametrize("word", ["$HOME/models", "~/models", '"${HOME}/models"'])
def test_the_home_of_a_script_is_that_of_the_configs_reader(word: str, tmp_path: Path) -> None:
    assert run(tmp_path, f"cd ~ || exit 1\npython {word} a:$HOME").commands == [["python", "~/models", "a:~"]]
    assert run(tmp_path, f"python {word}", HOME="/given").commands == [["python", "/given/models"]]
    assert run(tmp_path, "python /root/models").commands == [["python", "/root/models"]]


def test_nothing_outside_is_read_written_or_reached(tmp_path: Path) -> None:
    repository, outside = tmp_path / "repository", tmp_path / "outside"
    repository.mkdir()
    outside.mkdir()
    (outside / "key").write_text("secret")
    text = f"""
cat {outside}/key /etc/passwd /etc/hostname; echo lost > {outside}/key; rm -rf {outside}
(echo x > /dev/tcp/127.0.0.1/1) 2>/dev/null && python reached
for p in /proc/[0-9]*; do kill -9 ${{p#/proc/}}; done
python users "$(id -u)" "$HOME" "$(ls {outside} /root /tmp)" "$(cat {outside}/key)"
echo changed > "$BASH_SOURCE"
"""
    result = run(repository, text)
    assert (outside / "key").read_text() == "secret"
    assert (repository / "run.sh").read_text() == text
    assert ["python", "reached"] not in result.commands
    (users,) = [command for command in result.commands if command[:2] == ["python", "users"]]
    assert "secret" not in " ".join(users) and "key" not in " ".join(users)


@pytest.mark.parametrize("loop", ["while true; do sleep 1; done", "while :; do echo text; done"])
def test_an_endless_script_ends(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "SECONDS", 1)
    result = run(tmp_path, f"python train.py --a 1\n{loop}")
    assert ["python", "train.py", "--a", "1"] in result.commands
    assert result.status in (124, 137, 153)


def test_the_message_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UserError, match="install the package bubblewrap"):
        run(tmp_path, "python x")


def test_the_status_and_the_last_line_of_a_script_that_stops(tmp_path: Path) -> None:
    result = run(tmp_path, 'if [ -z "$BASE" ]; then echo "BASE is not set"; exit 3; fi')
    assert (result.status, result.last_line, result.commands) == (3, "BASE is not set", [])
