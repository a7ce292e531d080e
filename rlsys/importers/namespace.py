"""Run a launch script in a sealed namespace, and record the commands that it starts.

bubblewrap gives the script its own user, process, network and mount namespaces, an empty environment, and a separate
file system: a shell, text tools, and copies of the repository's text files. Each other program is a stub that records
its arguments (stubs/recorder), exits with status 0, and prints:

    nvidia-smi                          lines for the given number of H100 GPUs with NVLink
    hostname                            localhost, or 127.0.0.1
    which                               the path of the program
    python .../model_args_utils.py      nothing (Miles), because sizes of models are read from their config.json
    python -c, importing torch_npu      nothing, with status 1
    python with get_device_name         cuda (verl), for a program in an argument or on the standard input
    python -c, querying Ray's GPUs      999999937, so that a script that waits for GPUs continues; a setting with this
                                        number is not determined
    cp of a missing file                nothing
    any other program                   nothing; a marker if the script reads its output

`ray job submit -- COMMAND` and programs that are followed by `bash` run that command. A variable or argument that is
not set, and that is used without a default, has a marker as its value (stubs/trace.sh). So a value that the script
does not determine is visible in the recorded arguments, and a condition that depends on such a value is recorded.

Scripts, repositories and records may be hostile. Their text is never a path in bubblewrap's options, because
bubblewrap follows `..` to the host's files; main.sh makes such paths inside the namespace. Only regular files of the
repository, and links to them, are copied. The script's processes can change the records, so the records prove
nothing.
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
"""Pattern of markers, which stand for text that the script does not determine."""
_RAY_GPUS = "999999937"
"""Number of GPUs that the stub of `python` prints for Ray."""
SECONDS = 15
"""Time limit of a script."""
_RECORD_BYTES = 2**24
"""Maximum size of all records."""
_DISK_BYTES = 2**26
"""Size of the namespace's file system."""
_FILE_BYTES, _FOLDER_BYTES, _FOLDER_FILES = 2**19, 2**24, 5000
"""Maximum size of a copied file, size of all copied files, and number of scanned files and folders."""
_LEVELS, _PATH_BYTES = 32, 1024
"""Maximum number of folders in a path below the root, and its maximum length."""
_TEXT_PATHS, _LINKS = 10_000, 64
"""Maximum number of absolute paths that are searched in scripts, and of links that are made for them."""
_NAMESPACE_FOLDERS = ("/usr", "/bin", "/lib", "/run", "/proc", "/dev", "/tmp")
"""Folders of the namespace. No path in them stands for the repository."""
_RECORDS = 10_000
"""Maximum number of records."""
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
"""User ids without an account. A script that root imports runs as one of these users."""
_TOOLS = (
    "bash", "sh", "env", "timeout", "true", "false", "cat", "tee", "echo", "printf", "basename", "dirname",
    "realpath", "readlink", "mkdir", "rmdir", "rm", "cp", "mv", "touch", "ln", "chmod", "ls", "pwd", "date",
    "mktemp", "nohup", "test", "[", "id", "whoami", "uname", "find", "xargs", "nice", "stdbuf", "getopt",
)  # fmt: skip
"""Programs that run unchanged."""
_FILTERS = (
    "wc", "grep", "egrep", "fgrep", "awk", "sed", "cut", "head", "tail", "tr", "sort", "uniq", "bc", "rev",
    "paste", "column", "nl", "tac", "fold", "od", "base64", "md5sum", "sha1sum", "sha256sum", "expr", "seq",
    "numfmt", "comm", "join", "xxd", "diff", "cmp",
)  # fmt: skip
"""Programs that run unless their input has a marker."""
_STUBS = (
    "python", "python2", "python3", "pip", "pip3", "ray", "torchrun", "accelerate", "deepspeed", "pkill",
    "pgrep", "killall", "sleep", "nvidia-smi", "rocm-smi", "npu-smi", "hostname", "which", "curl", "wget",
    "ssh", "scp", "rsync", "git", "docker", "srun", "sbatch", "scontrol", "conda", "sudo", "apt", "apt-get",
    "hf", "huggingface-cli", "wandb", "tmux", "screen", "numactl", "ip", "ifconfig", "nproc", "free", "lscpu",
    "ps", "lsof", "fuser", "jq", "uv", "make", "sysctl", "nsys", "modprobe", "mount", "df", "du", "stat", "tar",
    "unzip", "mlflow", "pytest",
)  # fmt: skip
"""Programs that the namespace has as stubs, so that scripts find them. Programs without a stub are recorded, too."""
_HOME = "/home/rlsys-import"
"""HOME of a script. Records have `~` in its place, which rlsys expands when it reads the config."""
_HOME_PATH = re.compile(re.escape(_HOME) + r"(?![\w.-])")
_PROGRAM_PATH = re.compile(
    r"(?<![\w./-])/(?:[\w.-]+/)+(?:python[\d.]*|ray|torchrun|pip3?|accelerate)(?![\w./-])"
)
_FILE_PATH = re.compile(r"(?<![\w./}-])/(?:[\w.-]+/)+[\w.-]+\.(?:sh|yaml)\b")


@dataclass
class ScriptRun:
    """Record of a script's run.

    Attributes:
        commands: argument lists in the order of their start, with the name of the program.
        names: key of a marker -> command for whose output the marker stands.
        branches: conditions on values that the script does not determine, one line each.
        status: exit status of the script; 124 or 137 at the time limit.
        last_line: last line that the script printed.
        root: folder whose files the script can read; None for a command line.
    """

    commands: list[list[str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)
    status: int = 0
    last_line: str = ""
    root: Path | None = None

    def explain(self, text: str) -> str | None:
        """Return why the script does not determine `text`; None if it does."""
        if _RAY_GPUS in text:
            return "the number of Ray's GPUs is unknown"
        match = MARKER.search(text)
        if match is None:
            return None
        if match[1].lower() == "unset":
            is_argument = match[2].startswith("$")
            kind = "an argument of the script" if is_argument else "a variable"
            option = "--arguments TEXT" if is_argument else f"--env {match[2]}=VALUE"
            return f"{match[2]}: {kind} that is not set; set it with {option}"
        return f"the output of `{self.names.get(match[2], 'another program')}` is unknown"

    def read_text(self, path: str) -> str | None:
        """Return the text of a file of the repository; None if the repository has no such regular file.

        Leading folders of `path` may be missing in the repository: /a/b/c/d.yaml also finds c/d.yaml, because a
        script may expect its repository at another path.
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
        """Return `text`, with markers replaced by the variable or command for which they stand."""

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
        script: the script's file.
        arguments: arguments of the script.
        variables: environment variables of the script.
        gpus: number of GPUs that `nvidia-smi` prints.

    Raises:
        UserError: bubblewrap is not installed, the kernel refuses it, the script cannot be read, or the records are
            invalid or too large.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise UserError(
            "bwrap is not installed, but scripts run in a sealed namespace; install the package bubblewrap, or pass "
            "a file with the resolved command"
        )
    script = script.absolute()
    if ".." in script.parts:
        script = script.parent.resolve() / script.name
    root, start = _root_folder(script)
    with tempfile.TemporaryDirectory(prefix="rlsys-import-") as folder:
        sealed = Path(folder)
        copied, texts = _copy_texts(root, script, sealed / "folder")
        command = [bwrap, *_mounts(sealed, _links(root, copied, texts)), "--clearenv"]
        for name, value in _environment(variables or {}, gpus, start).items():
            command += ["--setenv", name, value]
        command += ["--", "/run/hidden/bash", "/run/stubs/main.sh"]
        command += [str(SECONDS), str(root), str(script), *arguments]
        return replace(_parse(_output(command, sealed)), root=root)


def _environment(variables: Mapping[str, str], gpus: int, start: Path) -> dict[str, str]:
    """Return the environment of the namespace's first process.

    Args:
        variables: environment variables of the script.
        gpus: number of GPUs that `nvidia-smi` prints.
        start: working directory of the script, relative to the root.
    """
    user = {"USER": os.environ["USER"]} if "USER" in os.environ else {}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": _HOME,
        "LANG": "C.UTF-8",
        **user,
        **variables,
        "RLSYS_GPUS": str(gpus),
        "RLSYS_START": str(start),
    }


def _root_folder(script: Path) -> tuple[Path, Path]:
    """Return the folder whose files the script can read, and the script's working directory, relative to that folder.

    The folder is the script's repository, or else the folder of the script.
    """
    parents = [parent for parent in script.parents if parent not in (Path.home(), *Path.home().parents)]
    for parent in parents:
        if any((parent / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
            cwd = Path.cwd()
            return parent, cwd.relative_to(parent) if cwd.is_relative_to(parent) else Path()
    return script.parent, Path()


def _copy_texts(root: Path, script: Path, target: Path) -> tuple[set[str], str]:
    """Copy small text files of a repository.

    A link is copied as a file if it leads to a copied file.

    Args:
        root: folder of the repository.
        script: the script, which is always copied.
        target: folder to which the files are copied.

    Returns:
        paths of the copied files below the root, and the text of all shell scripts among them.

    Raises:
        UserError: the script cannot be read, or is too large.
    """
    content = _read_file(script) if os.access(root, os.R_OK) else None
    if content is None:
        raise UserError(f"{script}: expected a readable script of up to {_FILE_BYTES:,} bytes")
    contents = {str(script.relative_to(root)): content}
    total = len(content)
    links: list[str] = []
    count = 0
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
            if not _is_text_name(name) or path in contents:
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


def _is_text_name(name: str) -> bool:
    """Return whether a file of this name is a text file for scripts. Of hidden files, only .env* is."""
    is_hidden = name.startswith(".") and not name.startswith(".env")
    return not is_hidden and Path(name).suffix in _TEXT_FILES


def _read_file(path: str | Path, flags: int = 0, folder: int | None = None) -> bytes | None:
    """Return the content of a regular file; None if the file is of another kind, unreadable or too large.

    Args:
        path: path of the file.
        flags: further flags of `open`.
        folder: descriptor of the folder to which `path` is relative; None for the working directory.
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
        path: path of the file.
        flags: further flags of `open`.
        folder: descriptor of the folder to which `path` is relative; None for the working directory.

    Raises:
        OSError: the file cannot be read, or is not a regular file, for example a FIFO or a device.
    """
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, os.strerror(code) if stat.S_ISDIR(mode) else "not a regular file")


def _mounts(sealed: Path, links: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's options for the namespaces and the file system, and write the files that they name.

    The options contain no path from the script.

    Args:
        sealed: temporary folder that has the copied files.
        links: paths in the namespace -> targets of the links that main.sh makes there.
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
    # main.sh runs in a copy of bash that the script's user cannot read. The kernel then hides the descriptors of this
    # process, of which one is the pipe of the records.
    if bash := shutil.which("bash", path="/usr/bin:/bin"):
        shutil.copyfile(bash, sealed / "bash")
        (sealed / "bash").chmod(0o111)
        options += ["--ro-bind", str(sealed / "bash"), "/run/hidden/bash"]
    return options


def _links(root: Path, copied: set[str], texts: str) -> dict[str, str]:
    """Return the links of the namespace: absolute paths in scripts -> their targets.

    The path of a program leads to the recorder. The folder /a/b of a path /a/b/c/d.sh leads to the root, if the root
    has c/d.sh.

    Args:
        root: folder of the repository.
        copied: paths of the copied files below the root.
        texts: text of the scripts.
    """
    links: dict[str, str] = {}
    for match in itertools.islice(_PROGRAM_PATH.finditer(texts), _TEXT_PATHS):
        if not match[0].startswith(("/usr/bin/", "/bin/", "/run/", "/proc/", "/dev/", f"{root}/")):
            links[match[0]] = "/run/stubs/recorder"
    for match in itertools.islice(_FILE_PATH.finditer(texts), _TEXT_PATHS):
        parts = match[0].split("/")
        if len(parts) > _LEVELS or match[0].startswith(_NAMESPACE_FOLDERS):
            continue
        for level in range(2, len(parts) - 1):
            if "/".join(parts[level:]) in copied:
                links["/".join(parts[:level])] = str(root)
    paths = [
        p for p in links if len(p) <= _PATH_BYTES and p == os.path.normpath(p) and not root.is_relative_to(p)
    ]
    return {path: links[path] for path in paths[:_LINKS]}


def _output(command: list[str], sealed: Path) -> bytes:
    """Run bubblewrap, and return its output. If this process is root, run it as a user without an account.

    Args:
        command: command line of bubblewrap.
        sealed: temporary folder for its standard error.

    Raises:
        UserError: the output is too large, or there is none.
    """
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
        raise UserError(
            f"the records of the script's commands are too large; expected at most {_RECORD_BYTES:,} bytes"
        )
    if not output:
        errors = (sealed / "errors").read_text(errors="replace").strip().splitlines()
        reason = errors[-1] if errors else "no output"
        raise UserError(
            f"bubblewrap's namespace produced no records: {reason}; pass a file with the resolved command instead"
        )
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _records(output: bytes) -> list[list[str]]:
    """Return the fields of each record in the output of main.sh, in which a record follows the number of its fields.

    Raises:
        UserError: a number of fields is wrong, or there are too many records.
    """
    records: list[list[str]] = []
    fields = output.split(b"\0")
    start, end = 0, len(fields) - 1
    while start < end:
        size = int(fields[start]) if re.fullmatch(rb"[1-9]\d{0,6}", fields[start]) else end
        if start + size >= end or len(records) == _RECORDS:
            raise UserError(
                f"record {len(records) + 1:,} of the script's commands: found "
                f"{fields[start].decode(errors='replace')[:40]!r}; expected the number of its fields, and up to "
                f"{_RECORDS:,} records"
            )
        record = [field.decode(errors="replace") for field in fields[start + 1 : start + 1 + size]]
        records.append([_HOME_PATH.sub("~", field) for field in record])
        start += 1 + size
    return records


def _parse(output: bytes) -> ScriptRun:
    """Parse the output of main.sh. Records of an unknown form, which the script may have written, are ignored.

    Raises:
        UserError: the records are incomplete or invalid.
    """
    records = _records(output)
    last = records.pop() if records else [""]
    is_exit = last[0] == "exit" and len(last) == 4 and re.fullmatch(r"[0-9]{1,3}", last[1])
    if not is_exit or not output.endswith(b"\0"):
        raise UserError(
            "the records of the script's commands are incomplete; expected the exit status as the last record"
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
        run.branches.append(f"`{condition}` depends on an unknown value: {run.explain(value)}")
    run.branches = list(dict.fromkeys(run.branches))
    return run
