"""Scripts run in a sealed namespace: their commands are recorded, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.core.errors import UserError
from rlsys.importers import namespace
from rlsys.importers.namespace import ScriptRun, run_script


def run(folder: Path, text: str, *arguments: str, gpus: int = 8, **variables: str) -> ScriptRun:
    script = folder / "run.sh"
    script.write_text(text)
    return run_script(script, arguments, variables, gpus)


def test_commands_are_recorded_with_the_arguments_that_bash_expands(tmp_path: Path) -> None:
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
        ("python x $(conda info)", "$(conda info)", "the output of `conda info` is unknown"),
        ("N=$(conda info | wc -l)\npython x $N", "$(conda info)", "the output of `conda info` is unknown"),
        (
            "N=$(conda info | grep -c a | tr a b)\npython x $N",
            "$(conda info)",
            "the output of `conda info` is unknown",
        ),
    ],
)
def test_a_value_that_the_script_does_not_determine_is_visible(
    text: str, word: str, reason: str, tmp_path: Path
) -> None:
    result = run(tmp_path, text)
    last = result.commands[-1][-1]
    explanation, _, remedy = (result.explain(last) or "").partition("; ")
    assert (result.source_text(last), explanation) == (word, reason)
    assert remedy.startswith(("set it with --env", "set it with --arguments TEXT")) == ("not set" in reason)


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
    assert branch.startswith(f"`{condition}") and "depends on an unknown value" in branch


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


def test_a_script_reads_writes_and_reaches_nothing_outside(tmp_path: Path) -> None:
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


def test_the_error_names_the_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UserError, match="install the package bubblewrap"):
        run(tmp_path, "python x")


def test_the_status_and_the_last_line_of_a_script_that_stops(tmp_path: Path) -> None:
    result = run(tmp_path, 'if [ -z "$BASE" ]; then echo "BASE is not set"; exit 3; fi')
    assert (result.status, result.last_line, result.commands) == (3, "BASE is not set", [])


# A foreign script and repository


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which each user may create files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_security_a_path_in_a_script_changes_nothing_outside(open_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "x.sh").touch()
    starts = (
        "/a/../../oldroot",
        "/b/../..",
        "/c/./../../oldroot",
        "/oldroot",
        "/newroot/../oldroot",
        "//d/..",
    )
    ends = ("/z/python3", "//z/python3", "/y/x.sh", "/./y/x.sh", "/y/x.sh/")
    paths = [f"{start}{open_folder}/{i}{end}" for i, start in enumerate(starts) for end in ends]
    comments = "".join(f"# {path}\n" for path in paths)
    commands = []
    with contextlib.suppress(UserError):
        commands = run(tmp_path, f"{comments}python x").commands
    assert list(open_folder.iterdir()) == []
    assert commands == [["python", "x"]]


def test_security_an_impossible_script_path_does_not_abort_the_import(tmp_path: Path) -> None:
    text = "# /etc/ld.so.cache/bin/python /usr/lib/x/python /opt/a/python /opt/y/x.sh\npython x"
    assert run(tmp_path, text).commands == [["python", "x"]]


def test_paths_in_a_script_resolve_to_programs_and_the_repository(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("SIZE=3\n")
    text = "source /root/project/models/small.sh\n/opt/env/bin/python x $SIZE $(ls /opt/env/bin)"
    assert run(tmp_path, text).commands[-1] == ["python", "x", "3", "python"]


def test_security_a_script_reads_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    repository, outside = tmp_path / "repository", tmp_path / "outside"
    for folder in (repository / ".git", repository / "real", outside):
        folder.mkdir(parents=True)
    for key in (outside / "key.txt", repository / ".git" / "config", repository / ".netrc"):
        key.write_text("secret")
    (repository / "real" / "a.txt").write_text("text\n")
    links = {
        "outside.txt": "../outside/key.txt",
        "absolute.txt": str(outside / "key.txt"),
        "environment.txt": "/proc/self/environ",
        "endless.txt": "/dev/zero",
        "hidden.txt": ".git/config",
        "loop.txt": "loop.txt",
        "lost.txt": "nothing",
        "folder": "../outside",
        "inside.txt": "real/a.txt",
        "twice.txt": "inside.txt",
    }
    for name, target in links.items():
        (repository / name).symlink_to(target)
    os.mkfifo(repository / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(repository / "socket.txt"))
    (tmp_path / "link").symlink_to(repository)
    for folder in (repository, tmp_path / "link"):
        (command,) = run(
            folder, 'cd "${BASH_SOURCE%/*}"; python $(find * .netrc -type f) $(cat *.txt */*)'
        ).commands
        assert sorted(command[1:]) == [
            "inside.txt",
            "real/a.txt",
            "run.sh",
            "text",
            "text",
            "text",
            "twice.txt",
        ]


def test_security_the_size_limit_applies_to_bytes_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "status.sh"
    script.symlink_to("/proc/self/status")  # a regular file of size 0 that has content
    monkeypatch.setattr(namespace, "_FILE_BYTES", 10)
    with pytest.raises(UserError, match=r"status\.sh: expected a readable script of up to 10 bytes"):
        run_script(script)


def test_security_a_script_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    with pytest.raises(UserError, match=r"pipe\.sh: expected a readable script"):
        run_script(tmp_path / "pipe.sh")


def test_a_script_is_found_by_each_form_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / ".git").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.sh").write_text("python $0")
    monkeypatch.chdir(tmp_path)
    for path in ("a/../b/run.sh", f"/{tmp_path}/b/.//run.sh"):
        assert run_script(Path(path)).commands[-1][-1].endswith(f"{tmp_path}/b/run.sh")


def test_security_the_number_of_scanned_files_and_folders_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "_FOLDER_FILES", 20)
    for i in range(30):
        (tmp_path / "folders" / f"{i:02}").mkdir(parents=True)
        (tmp_path / f"{i:02}.txt").touch()
    (command,) = run(tmp_path, 'python $(find "${BASH_SOURCE%/*}" | wc -l)').commands
    assert int(command[1]) <= 23  # the folder, the script


def test_security_a_path_of_any_length_is_no_error(tmp_path: Path) -> None:
    paths = ["/q/" + "a/" * 5000 + "x.sh", "/q/" + "a" * 300 + "/b/x.sh", "/q/" + "../" * 50 + "x.sh"]
    assert run(tmp_path, f"# {' '.join(paths)}\npython x").commands == [["python", "x"]]


@pytest.mark.parametrize(
    "output",
    [
        b"0\n" * 1000,
        b"0\0" * 1000,
        b"-1\0run\0",
        b"x\0run\0",
        b"\xff\0",
        b"\0\0\0",
        b"2\0run\0",
        b"9" * 5000 + b"\0run\0",
        b"3\0run\x001\0python",
        b"3\0run\x001\0python\0",
        b"4\0exit\0x\0\0\0",
        b"4\0exit\0-1\0\0\0",
        b"2\0exit\x000\0",
        b"1\0other\0" * 20000 + b"4\0exit\x000\0\0\0",
    ],
)
def test_security_forged_records_are_one_line(output: bytes) -> None:
    with pytest.raises(UserError, match=r"^[^\n]{20,200}$"):
        namespace._parse(output)


def test_security_a_script_does_not_reach_the_pipe_of_the_records(tmp_path: Path) -> None:
    text = "python x $(readlink /proc/1/fd/1 /proc/2/fd/1; ls /proc/1/fd /proc/2/fd)"
    assert run(tmp_path, text).commands == [["python", "x"]]


def test_security_odd_files_among_the_records_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "SECONDS", 5)
    text = """cd /run/records
ln -s /dev/zero 0; ln -s /proc/self/environ 1; mkdir 2; touch 3; printf x >4; printf '\\0\\0' >5
printf 'other\\0a\\0' >6; printf 'run\\0' >7; printf 'branch\\0a\\0' >8; printf 'exit\\0x\\0a\\0b\\0' >zz
mkdir /run/old; mv /run/out /run/old; ln -s /dev/zero /run/out
python train.py
exit 3"""
    result = run(tmp_path, text)
    assert (result.commands, result.branches, result.status) == ([["python", "train.py"]], [], 3)


def test_a_script_that_waits_for_ray_gpus_proceeds(tmp_path: Path) -> None:
    """The number that ends the wait is not one of the script's."""
    query = """python3 -c "import ray; print(int(ray.cluster_resources().get('GPU', 0)))\""""
    script = f"while true; do\n N=$({query} || echo 0)\n [ $N -ge 32 ] && break\n sleep 5\ndone\npython train.py $N"
    result = run(tmp_path, script)
    assert result.status == 0 and result.commands[-1][:2] == ["python", "train.py"]
    assert result.explain(result.commands[-1][2]) == "the number of Ray's GPUs is unknown"


def test_a_program_on_the_standard_input_and_a_file_of_the_host(tmp_path: Path) -> None:
    script = "set -e\ncp /no/such/file .\nD=$(python3 - <<'EOF'\nprint(get_device_name())\nEOF\n)\npython train.py $D"
    assert run(tmp_path, script).commands[-1] == ["python", "train.py", "cuda"]
