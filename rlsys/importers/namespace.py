"""Run a launch script in a sealed namespace, and record the commands that it starts.

bubblewrap gives the script its own user, process, network and mount namespaces, an empty environment, and a file
system of its own: a shell, text tools, and copies of the script's text files. Each other program is a stub that
records its arguments (stubs/recorder), ends with status 0, and prints:

- `nvidia-smi`: lines for the given number of H100 GPUs with NVLink;
- `hostname`: localhost, or 127.0.0.1;
- `which`: the path of the program;
- `python .../model_args_utils.py` (Miles): nothing, since a model's sizes are read from its config.json;
- `python -c` that imports torch_npu: status 1; that prints verl's get_device_name, or such a program on the standard
  input: cuda;
- `python -c` that asks Ray for its resources: 999999937, so that a script that waits for GPUs goes on; a setting with
  this number is not determined;
- `cp` of a file that is not in the namespace: nothing, status 0;
- any other program: nothing, or a marker where the script reads its output.

`ray job submit -- COMMAND` and programs that are followed by `bash` run that command. A variable or argument that is
not set, and that is used without a default, has a marker as its value (stubs/trace.sh). So a value that the script
does not determine is visible in the recorded arguments, and a condition that depends on one is recorded.

Scripts, repositories and records may be hostile. A text of theirs is never a path of bubblewrap's options, since
bubblewrap follows `..` to the host's files: main.sh makes such paths inside the namespace. Only regular files of the
repository are copied, and links to them. The script's processes can change the records, which thus prove nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from rlsys.core.errors import UserError

MARKER = re.compile(r"@@(output|unset):([^@]*)@@", re.IGNORECASE)
"""Stands for text that the script does not determine."""
_RAY_GPUS = "999999937"
"""What the stub of `python` prints for Ray's resources."""
SECONDS = 15
"""Time limit of a script."""
_RECORD_BYTES = 2**24
_DISK_BYTES = 2**26
_FILE_BYTES, _FOLDER_BYTES, _FOLDER_FILES = 2**19, 2**24, 5000
"""Largest copied file, size of all copied files, and number of scanned files and folders."""
_LEVELS, _PATH_BYTES = 32, 1024
"""Folders of a path below the root, and its length."""
_TEXT_PATHS, _LINKS = 10_000, 64
"""Absolute paths that are looked up in scripts, and links that are made for them."""
_OWN_FOLDERS = ("/usr", "/bin", "/lib", "/run", "/proc", "/dev", "/tmp")
"""Of the namespace; no path in them stands for the repository."""
_RECORDS = 10_000
"""Number of records."""
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
_PROGRAM_PATH = re.compile(
    r"(?<![\w./-])/(?:[\w.-]+/)+(?:python[\d.]*|ray|torchrun|pip3?|accelerate)(?![\w./-])"
)
_FILE_PATH = re.compile(r"(?<![\w./}-])/(?:[\w.-]+/)+[\w.-]+\.(?:sh|yaml)\b")


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
    root: Path | None = None
    """Folder whose files it may read; None for a pasted command."""

    def explain(self, text: str) -> str | None:
        """Return why `text` is not determined by the script; None if it is."""
        if _RAY_GPUS in text:
            return "how many GPUs Ray has is not known"
        match = MARKER.search(text)
        if match is None:
            return None
        if match[1].lower() == "unset":
            is_argument = match[2].startswith("$")
            kind = "an argument of the script" if is_argument else "a variable"
            option = "--arguments TEXT" if is_argument else f"--env {match[2]}=VALUE"
            return f"{match[2]}: {kind} that is not set; {option} gives it"
        return f"what `{self.names.get(match[2], 'another program')}` prints is not known"

    def read_text(self, path: str) -> str | None:
        """Return the text of a file of the repository; None if it has no such regular file.

        /a/b/c/d.yaml is also the repository's c/d.yaml: a script may call its repository by another path.
        """
        if self.root is None or ".." in Path(path).parts:
            return None
        parts = Path(path).parts
        for level in range(min(len(parts), _LEVELS)):
            file = Path(os.path.realpath(self.root / Path(*parts[level:])))
            if file.is_relative_to(os.path.realpath(self.root)) and (content := _read_file(file)) is not None:
                return content.decode(errors="replace")
        return None

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
    if ".." in script.parts:
        script = script.parent.resolve() / script.name
    root, start = _root_folder(script)
    with tempfile.TemporaryDirectory(prefix="rlsys-import-") as folder:
        sealed = Path(folder)
        copied, texts = _copy_texts(root, script, sealed / "folder")
        command = [bwrap, *_mounts(sealed, _links(root, copied, texts)), "--clearenv"]
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
            "/run/hidden/bash",
            "/run/stubs/main.sh",
            str(SECONDS),
            str(root),
            str(script),
            *arguments,
        ]
        return replace(_parse(_output(command, sealed)), root=root)


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


def _copy_texts(root: Path, script: Path, target: Path) -> tuple[set[str], str]:
    """Copy small text files; return their paths below the root, and the text of all shell scripts.

    A link is copied if it leads to a copied file: another file is not of the repository, or not to be read.
    """
    content = _read_file(script) if os.access(root, os.R_OK) else None
    if content is None:
        raise UserError(f"{script}: expected a readable script of up to {_FILE_BYTES:,} bytes")
    contents, links, total, count = {str(script.relative_to(root)): content}, [], len(content), 0
    base = os.path.realpath(root)

    def add_content(path: str, content: bytes | None) -> None:
        nonlocal total
        if content is not None and total + len(content) <= _FOLDER_BYTES:
            contents[path] = content
            total += len(content)

    for folder, folders, names, descriptor in os.fwalk(base):
        relative = Path(os.path.relpath(folder, base))
        (target / relative).mkdir(parents=True)
        names = sorted(names)[: _FOLDER_FILES - count]
        count += 1 + len(names)
        for name in names:
            path = str(relative / name)
            is_hidden = name.startswith(".") and not name.startswith(".env")
            if is_hidden or Path(name).suffix not in _TEXT_FILES or path in contents:
                continue
            if os.path.islink(os.path.join(folder, name)):
                links.append(path)
            else:
                add_content(path, _read_file(name, os.O_NOFOLLOW, descriptor))
        if count >= _FOLDER_FILES:
            break
        is_deep = len(relative.parts) >= _LEVELS or len(os.fsencode(relative)) > _PATH_BYTES
        subfolders = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        folders[:] = [] if is_deep else subfolders
    for path in links:
        add_content(path, contents.get(os.path.relpath(os.path.realpath(os.path.join(base, path)), base)))
    for path, content in contents.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    scripts = [path for path in contents if path.endswith((".sh", ".bash")) or root / path == script]
    return set(contents), "\n".join(contents[path].decode(errors="replace") for path in scripts)


def _read_file(path: str | Path, flags: int = 0, folder: int | None = None) -> bytes | None:
    """Return the content of a regular file; None if it is none, or too large, whatever size its folder gives.

    Args:
        path: the file.
        flags: more flags of `open`.
        folder: descriptor of the folder that `path` is relative to.
    """
    try:
        with open_file(path, flags, folder) as file:
            if os.fstat(file.fileno()).st_size > _FILE_BYTES:
                return None
            content = file.read(_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= _FILE_BYTES else None


def open_file(path: str | Path, flags: int = 0, folder: int | None = None) -> BinaryIO:
    """Open a user's file for reading, without waiting for the writer of a FIFO.

    Args:
        path: the file.
        flags: more flags of `open`.
        folder: descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be read, or is not a regular file: a FIFO, a device.
    """
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, os.strerror(code) if stat.S_ISDIR(mode) else "not a regular file")


def _mounts(sealed: Path, links: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's arguments for the namespaces and the file system; they have no path of the script.

    Args:
        sealed: folder with the files.
        links: paths in the namespace -> what main.sh lets them lead to.
    """
    programs, tools = sealed / "bin", sealed / "tools"
    programs.mkdir()
    tools.mkdir()
    stubs = Path(__file__).parent / "stubs"
    shutil.copytree(stubs, sealed / "stubs")
    (sealed / "stubs" / "links").write_bytes(b"".join(os.fsencode(f"{links[p]}\0{p}\0") for p in links))
    options = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
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
    for name, target in (("bin", "/usr/bin"), ("stubs", "/run/stubs"), ("folder", "/run/folder")):
        options += ["--ro-bind", str(sealed / name), target]
    options += ["--symlink", "usr/bin", "/bin", "--dir", "/tmp", "--dir", _HOME]
    for folder in (sealed, *sealed.rglob("*")):
        if not folder.is_symlink():
            folder.chmod(0o755)
    # The kernel hides the descriptors of a process whose program its user cannot read: here the pipe of the records.
    if bash := shutil.which("bash", path="/usr/bin:/bin"):
        shutil.copyfile(bash, sealed / "bash")
        (sealed / "bash").chmod(0o111)
        options += ["--ro-bind", str(sealed / "bash"), "/run/hidden/bash"]
    return options


def _links(root: Path, copied: set[str], texts: str) -> dict[str, str]:
    """Return absolute paths in scripts -> what stands for them: the recorder for programs, the root for folders.

    /a/b of /a/b/c/d.sh stands for the root if the root has c/d.sh.
    """
    links: dict[str, str] = {}
    for match in itertools.islice(_PROGRAM_PATH.finditer(texts), _TEXT_PATHS):
        if not match[0].startswith(("/usr/bin/", "/bin/", "/run/", "/proc/", "/dev/", f"{root}/")):
            links[match[0]] = "/run/stubs/recorder"
    for match in itertools.islice(_FILE_PATH.finditer(texts), _TEXT_PATHS):
        parts = match[0].split("/")
        if len(parts) > _LEVELS or match[0].startswith(_OWN_FOLDERS):
            continue
        for level in range(2, len(parts) - 1):
            if "/".join(parts[level:]) in copied:
                links["/".join(parts[:level])] = str(root)
    paths = [
        p for p in links if len(p) <= _PATH_BYTES and p == os.path.normpath(p) and not root.is_relative_to(p)
    ]
    return {path: links[path] for path in paths[:_LINKS]}


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


def _records(output: bytes) -> list[list[str]]:
    """Return the fields of the records that main.sh prints, each below the number of its fields.

    Raises:
        UserError: a number is wrong, or there are too many.
    """
    records: list[list[str]] = []
    fields = output.split(b"\0")
    start, end = 0, len(fields) - 1
    while start < end:
        size = int(fields[start]) if re.fullmatch(rb"[1-9]\d{0,6}", fields[start]) else end
        if start + size >= end or len(records) == _RECORDS:
            raise UserError(
                f"record {len(records) + 1:,} of the script's commands: expected up to {_RECORDS:,} records, and the "
                f"number of fields of each, found {fields[start].decode(errors='replace')[:40]!r}"
            )
        record = [field.decode(errors="replace") for field in fields[start + 1 : start + 1 + size]]
        records.append([_HOME_PATH.sub("~", field) for field in record])
        start += 1 + size
    return records


def _parse(output: bytes) -> ScriptRun:
    """Parse the records that main.sh prints. A record of another form is the script's own, and is omitted.

    Raises:
        UserError: the records are incomplete or have no such form.
    """
    records = _records(output)
    last = records.pop() if records else [""]
    is_exit = last[0] == "exit" and len(last) == 4 and re.fullmatch(r"[0-9]{1,3}", last[1])
    if not is_exit or not output.endswith(b"\0"):
        raise UserError(
            "the records of the script's commands are incomplete: the exit status is not the last"
        )
    lines = (last[2] + "\n" + last[3]).strip().splitlines()
    run = ScriptRun(status=int(last[1]), last_line=lines[-1].strip()[-200:] if lines else "")
    branches = []
    for kind, *fields in records:
        if kind == "run" and len(fields) > 1:
            run.commands.append(fields[1:])
            run.names[fields[0]] = " ".join(fields[1:])[:80]
        elif kind == "branch" and len(fields) == 2:
            branches.append(fields)
    for text, value in branches:
        condition = run.source_text(" ".join(text.split()))[:80]
        run.branches.append(f"`{condition}` depends on a value that is not known: {run.explain(value)}")
    run.branches = list(dict.fromkeys(run.branches))
    return run
