"""Run a launch script in a sealed namespace, and record the commands that it starts.

bubblewrap gives the script its own user, process, network and mount namespaces, an empty environment, and a file
system of its own: a shell, text tools, and copies of the script's text files. Each other program is a stub that
records its arguments (stubs/recorder), ends with status 0, and prints:

- `nvidia-smi`: lines for the given number of H100 GPUs with NVLink;
- `hostname`: localhost, or 127.0.0.1;
- `which`: the path of the program;
- `python .../model_args_utils.py` (Miles): nothing, since a model's sizes are read from its config.json;
- `python -c` that imports torch_npu: status 1; that prints verl's get_device_name: cuda;
- any other program: nothing, or a marker where the script reads its output.

`ray job submit -- COMMAND` and programs that are followed by `bash` run that command. A variable or argument that is
not set, and that is used without a default, has a marker as its value (stubs/trace.sh). So a value that the script
does not determine is visible in the recorded arguments, and a condition that depends on one is recorded.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.core.errors import UserError

MARKER = re.compile(r"@@(output|unset):([^@]*)@@", re.IGNORECASE)
"""Stands for text that the script does not determine."""
SECONDS = 15
"""Time limit of a script."""
_RECORD_BYTES = 2**24
_DISK_BYTES = 2**26
_FILE_BYTES, _FOLDER_BYTES, _FOLDER_FILES = 2**19, 2**24, 5000
"""Largest copied file, size of all copied files, and number of scanned files."""
_TEXT_FILES = (
    ".sh",
    ".bash",
    ".env",
    ".yaml",
    ".yml",
    ".json",
    ".txt",
    ".toml",
    ".cfg",
    ".sbatch",
    ".slurm",
    "",
)
_USERS = range(61184, 65520)
"""User ids without an account; a script that root imports runs as one of them."""
_TOOLS = (
    "bash", "sh", "env", "timeout", "true", "false", "cat", "tee", "echo", "printf", "basename", "dirname",
    "realpath", "readlink", "mkdir", "rmdir", "rm", "cp", "mv", "touch", "ln", "chmod", "ls", "pwd", "date",
    "mktemp", "nohup", "test", "[", "id", "whoami", "uname", "find", "xargs", "nice", "stdbuf", "getopt",
)  # fmt: skip
"""Run as they are."""
_FILTERS = (
    "wc", "grep", "egrep", "fgrep", "awk", "sed", "cut", "head", "tail", "tr", "sort", "uniq", "bc", "rev",
    "paste", "column", "nl", "tac", "fold", "od", "base64", "md5sum", "sha1sum", "sha256sum", "expr", "seq",
    "numfmt", "comm", "join", "xxd", "diff", "cmp",
)  # fmt: skip
"""Run unless their input has a marker."""
_STUBS = (
    "python", "python2", "python3", "pip", "pip3", "ray", "torchrun", "accelerate", "deepspeed", "pkill",
    "pgrep", "killall", "sleep", "nvidia-smi", "rocm-smi", "npu-smi", "hostname", "which", "curl", "wget",
    "ssh", "scp", "rsync", "git", "docker", "srun", "sbatch", "scontrol", "conda", "sudo", "apt", "apt-get",
    "hf", "huggingface-cli", "wandb", "tmux", "screen", "numactl", "ip", "ifconfig", "nproc", "free", "lscpu",
    "ps", "lsof", "fuser", "jq", "uv", "make", "sysctl", "nsys", "modprobe", "mount", "df", "du", "stat", "tar",
    "unzip", "mlflow", "pytest",
)  # fmt: skip
"""Recorded even where a script looks for them; each program without a file is recorded, too."""
_HOME = "/home/rlsys-import"
"""HOME of a script; `~` in the record, so that the config's reader expands it."""
_HOME_PATH = re.compile(re.escape(_HOME) + r"(?![\w.-])")
_ABSOLUTE = re.compile(r"(?<![\w./-])/(?:[\w.-]+/)+(?:python[\d.]*|ray|torchrun|pip3?|accelerate)(?![\w./-])")


@dataclass
class ScriptRun:
    """Record of one run."""

    commands: list[list[str]] = field(default_factory=list)
    """Argument lists in the order of their start, the name of the program first."""
    names: dict[str, str] = field(default_factory=dict)
    """Key of a marker -> command whose output it stands for."""
    branches: list[str] = field(default_factory=list)
    """Conditions on values that the script does not determine, one line each."""
    status: int = 0
    """Exit status of the script; 124 or 137 at the time limit."""
    last_line: str = ""
    """Last line that it printed."""

    def explain(self, text: str) -> str | None:
        """Return why `text` is not determined by the script; None if it is."""
        match = MARKER.search(text)
        if match is None:
            return None
        if match[1].lower() == "unset":
            is_argument = match[2].startswith("$")
            kind = "an argument of the script" if is_argument else "a variable"
            option = "--arguments TEXT" if is_argument else f"--env {match[2]}=VALUE"
            return f"{match[2]}: {kind} that is not set; {option} gives it"
        return f"what `{self.names.get(match[2], 'another program')}` prints is not known"

    def source_text(self, text: str) -> str:
        """Return `text` with readable names in place of markers."""

        def name(match: re.Match[str]) -> str:
            if match[1].lower() == "unset":
                return f"${match[2].lstrip('$')}"
            return f"$({self.names.get(match[2], '...')})"

        return MARKER.sub(name, text)


def run_script(
    script: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None, gpus: int = 8
) -> ScriptRun:
    """Run a bash script in a sealed namespace.

    Args:
        script: the file.
        arguments: its arguments.
        variables: its environment.
        gpus: number of GPUs that `nvidia-smi` prints.

    Raises:
        UserError: bubblewrap is not installed or refused by the kernel, or the records are too large.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError(
            "a script runs in a sealed namespace, and bwrap is not installed: install the package bubblewrap, or "
            "give the resolved command in a file"
        )
    script = script.absolute()
    root, start = _root_folder(script)
    with tempfile.TemporaryDirectory(prefix="rlsys-import-") as folder:
        sealed = Path(folder)
        texts = _copy_texts(root, script, sealed / "folder")
        command = [bwrap, *_mounts(sealed, root, texts), "--clearenv"]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": _HOME,
            "LANG": "C.UTF-8",
            **({"USER": os.environ["USER"]} if "USER" in os.environ else {}),
        }
        environment |= dict(variables or {})
        environment |= {"RLSYS_GPUS": str(gpus), "RLSYS_START": str(start)}
        for name, value in environment.items():
            command += ["--setenv", name, value]
        command += [
            "--",
            "/run/tools/bash",
            "/run/stubs/main.sh",
            str(SECONDS),
            str(root),
            str(script),
            *arguments,
        ]
        return _parse(_output(command, sealed))


def _root_folder(script: Path) -> tuple[Path, Path]:
    """Return the folder whose files the script may read, and the folder in it where the script starts.

    It is the script's repository, and the script's own folder where there is none.
    """
    parents = [parent for parent in script.parents if parent not in (Path.home(), *Path.home().parents)]
    for parent in parents:
        if any((parent / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
            cwd = Path.cwd()
            return parent, cwd.relative_to(parent) if cwd.is_relative_to(parent) else Path()
    return script.parent, Path()


def _copy_texts(root: Path, script: Path, target: Path) -> str:
    """Copy small text files; return the text of all shell scripts."""
    texts, total, count = [], 0, 0
    target.mkdir()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        copied = target / Path(folder).relative_to(root)
        copied.mkdir(exist_ok=True)
        for name in sorted(names):
            source = Path(folder, name)
            count += 1
            if source.suffix not in _TEXT_FILES and source != script:
                continue
            try:
                size = source.stat().st_size if source.is_file() else _FILE_BYTES + 1
                if size > _FILE_BYTES or total + size > _FOLDER_BYTES:
                    continue
                content = source.read_bytes()
            except OSError:
                continue
            total += size
            (copied / name).write_bytes(content)
            if source.suffix in (".sh", ".bash") or source == script:
                texts.append(content.decode(errors="replace"))
        if count > _FOLDER_FILES and (target / script.relative_to(root)).exists():
            break
    if not (target / script.relative_to(root)).exists():
        raise UserError(f"{script}: expected a readable script of up to {_FILE_BYTES:,} bytes")
    return "\n".join(texts)


def _mounts(sealed: Path, root: Path, texts: str) -> list[str]:
    """Return bubblewrap's arguments for the namespaces and the file system."""
    programs, tools = sealed / "bin", sealed / "tools"
    programs.mkdir()
    tools.mkdir()
    stubs = Path(__file__).parent / "stubs"
    shutil.copytree(stubs, sealed / "stubs")
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--size", str(_DISK_BYTES), "--perms", "0755", "--tmpfs", "/"]
    for name in ("/usr/lib", "/usr/lib64", "/usr/lib32"):
        if os.path.isdir(name):
            options += ["--ro-bind", name, name]
    for name in ("/lib", "/lib64"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    options += ["--dir", "/run/records"]
    for name in (*_TOOLS, *_FILTERS):
        if program := shutil.which(name, path="/usr/bin:/bin"):
            options += ["--ro-bind", os.path.realpath(program), f"/run/tools/{name}"]
            (programs / name).symlink_to("/run/stubs/filter" if name in _FILTERS else f"/run/tools/{name}")
    for name in _STUBS:
        (programs / name).symlink_to("/run/stubs/recorder")
    for path in sorted(set(_ABSOLUTE.findall(texts))):
        if not path.startswith(("/usr/bin/", "/bin/", "/run/", "/proc/", "/dev/", f"{root}/")):
            options += ["--symlink", "/run/stubs/recorder", path]
    for alias in _aliases(root, texts):
        options += ["--symlink", str(root), alias]
    for name, target in (("bin", "/usr/bin"), ("stubs", "/run/stubs"), ("folder", "/run/folder")):
        options += ["--ro-bind", str(sealed / name), target]
    options += ["--symlink", "usr/bin", "/bin", "--dir", "/tmp", "--dir", _HOME, "--dir", str(root)]
    for folder in (sealed, *sealed.rglob("*")):
        if not folder.is_symlink():
            folder.chmod(0o755)
    return options


def _aliases(root: Path, texts: str) -> set[str]:
    """Return absolute folders that scripts use for the root: /a/b of /a/b/c/d.sh if the root has c/d.sh."""
    aliases = set()
    for path in set(re.findall(r"(?<![\w./}-])/(?:[\w.-]+/)+[\w.-]+\.(?:sh|yaml)\b", texts)):
        parts = Path(path).parts
        for length in range(2, len(parts) - 1):
            alias = Path(*parts[:length])
            if (root / Path(*parts[length:])).is_file() and alias != root and alias not in root.parents:
                aliases.add(str(alias))
    return {
        alias
        for alias in aliases
        if not alias.startswith(("/usr", "/bin", "/lib", "/run", "/proc", "/dev", "/tmp"))
    }


def _output(command: list[str], sealed: Path) -> bytes:
    """Run a command as a user without an account where this process is root; return its output."""
    user = secrets.choice(_USERS) if os.geteuid() == 0 else None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(sealed / "errors").open("wb"),
        cwd="/",
        start_new_session=True,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
    )
    killer = threading.Timer(SECONDS + 15, _kill, (process,))
    killer.start()
    try:
        assert process.stdout is not None
        output = process.stdout.read(_RECORD_BYTES + 1)
        _kill(process) if len(output) > _RECORD_BYTES else process.wait()
    finally:
        killer.cancel()
        _kill(process)
        process.wait()
    if len(output) > _RECORD_BYTES:
        raise UserError(f"the script's commands have more than {_RECORD_BYTES:,} bytes of arguments")
    if not output:
        errors = (sealed / "errors").read_text(errors="replace").strip().splitlines()
        reason = errors[-1] if errors else "no output"
        raise UserError(
            f"no result from the sealed namespace of bubblewrap: {reason}; give the resolved command in a file"
        )
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _parse(output: bytes) -> ScriptRun:
    """Parse the records that main.sh prints."""
    run, branches = ScriptRun(), []
    while output:
        size, _, output = output.partition(b"\n")
        record, output = output[: int(size)], output[int(size) :]
        text = _HOME_PATH.sub("~", record.decode(errors="replace"))
        kind, *fields = text.removesuffix("\0").split("\0")
        if kind == "run" and len(fields) > 1:
            run.commands.append(fields[1:])
            run.names[fields[0]] = " ".join(fields[1:])[:80]
        elif kind == "branch" and len(fields) == 2:
            branches.append(fields)
        elif kind == "exit" and len(fields) == 3:
            run.status = int(fields[0])
            lines = (fields[1] + "\n" + fields[2]).strip().splitlines()
            run.last_line = lines[-1].strip()[-200:] if lines else ""
    for text, value in branches:
        condition = run.source_text(" ".join(text.split()))[:80]
        line = f"`{condition}` depends on a value that is not known: {run.explain(value)}"
        if line not in run.branches:
            run.branches.append(line)
    return run
