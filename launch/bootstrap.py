"""`make setup`: creates .venv and installs the packages for this machine. Standard library only, no root.

    python3 launch/bootstrap.py [--dev] [--parity]

RLSYS_DEVICE=cpu or cuda selects the kind of host; by default, a responding NVIDIA driver means cuda. On a
login node without GPUs, set RLSYS_DEVICE=cuda. With RLSYS_LOCKED=1 every package has the version in
requirements/*.lock; without it, the newest that pyproject.toml allows.

The script starts on Python 3.8 and later, so that it can report an unsupported version. Running it again is
free while pyproject.toml, this file and the Python are unchanged.

An interrupted set-up can be continued at any point: a state on disk counts as complete only when a file
written after it exists. VENV_RECORD is written when the environment's pip works, STAMP when all packages are
installed. A package without pip's INSTALLER, or without a file of its RECORD, is installed again.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is run as a script, before rlsys is installed

from rlsys.core.devices import gpu_names  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
VENV_RECORD = "rlsys-venv.json"
STAMP = VENV / "rlsys-setup.json"
LOG = VENV / "rlsys-setup.log"
REPORT_SECONDS = 30.0
"""Seconds between two lines about a pip install, where the output is not a terminal."""
PYTHONS = ((3, 11), (3, 12), (3, 13))
DEVICE = "RLSYS_DEVICE"
KINDS = {"cpu": "cpu", "cuda": "gpu"}  # value -> extra of pyproject.toml
LOCKED = "RLSYS_LOCKED"
LOCKS = {"cpu": ROOT / "requirements/cpu.lock", "gpu": ROOT / "requirements/cuda.lock"}  # by extra
# torch for CUDA depends on CUDA's libraries: 6.3 GB installed, plus downloads.
DISK_GB = {"cpu": 9, "gpu": 15}
# Installed first, so that later packages find torch installed.
TORCH = "torch==2.13.0"
# Installed without dependencies, which need CUDA; those for a CPU are in pyproject.toml's extra `cpu`.
SGLANG = "sglang==0.5.23"
# SGLang imports it at start. It is built for CUDA, and transformers, which imports any installed torchvision, would
# fail with a CPU torch: only the engine's processes use this folder (rlsys/engine/cpu/platform.py).
TORCHVISION = "torchvision==0.28.0"
ENGINE_FOLDER = VENV / "engine"

# Libraries that parity tests compare with, and their imports: in a separate folder, without dependencies, so that
# neither the environment nor torch changes. Packages of the environment are omitted.
PARITY_FOLDER = VENV / "parity"
PARITY_STAMP = PARITY_FOLDER / "rlsys-parity.json"
PARITY = {
    "trl": "1.16.0", "verl": "0.9.1", "accelerate": "1.10.1", "tensordict": "0.15.3", "omegaconf": "2.3.0",
    "hydra-core": "1.3.2", "antlr4-python3-runtime": "4.9.3", "codetiming": "1.4.0", "pyvers": "0.2.3",
    "cloudpickle": "3.1.2", "ray": "2.56.1", "msgpack": "1.1.2",
}  # fmt: skip

CAUSES = (
    ("No space left on device", "the disk is full"),
    ("name resolution", "no network: the package index cannot be reached"),
    ("Connection refused", "no network: the package index cannot be reached"),
    ("Network is unreachable", "no network: the package index cannot be reached"),
    ("ConnectTimeout", "no network: the package index cannot be reached"),
    ("CERTIFICATE_VERIFY_FAILED", "the package index's certificate is not trusted; see pip's option --cert"),
    ("(from versions: none)", "the package index offers none of it; is there a network?"),
    ("No matching distribution", "the package index has no fitting version for this Python and platform"),
)


class SetupError(Exception):
    """Set-up cannot continue; the message names what is missing."""


def find_python() -> str:
    """Return this Python if its version is supported, else one on PATH.

    Raises:
        SetupError: there is none.
    """
    if sys.version_info[:2] in PYTHONS:
        return os.path.realpath(sys.executable)
    for major, minor in PYTHONS:
        command = shutil.which(f"python{major}.{minor}")
        # Run it: version managers create scripts of that name for versions that are not installed.
        if command and (path := real_python(command)):
            return path
    version = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(f"Python 3.11, 3.12 or 3.13 is needed; this is {version}, and no other is on PATH")


def real_python(command: str) -> str | None:
    """Return the path of a Python's executable; None if it does not run."""
    script = "import os, sys; print(os.path.realpath(sys.executable))"
    result = subprocess.run([command, "-c", script], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def host_kind() -> str:
    """Return `gpu` or `cpu`: from RLSYS_DEVICE, else by whether an NVIDIA driver answers.

    Raises:
        SetupError: RLSYS_DEVICE has another value.
    """
    value = os.environ.get(DEVICE, "")
    if value:
        if value not in KINDS:
            raise SetupError(f"{DEVICE} = {value}: expected cpu or cuda")
        return KINDS[value]
    return "gpu" if gpu_names() else "cpu"


def lock_file(kind: str) -> Path | None:
    """Return the file of pinned versions, if RLSYS_LOCKED is 1.

    Raises:
        SetupError: RLSYS_LOCKED has another value.
    """
    value = os.environ.get(LOCKED, "")
    if value not in ("", "1"):
        raise SetupError(f"{LOCKED} = {value}: expected 1, or nothing")
    return LOCKS[kind] if value else None


def fingerprint(python: str) -> str:
    """Return a digest of packages, steps, Python and folder (scripts contain its path)."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{python} {ROOT}".encode())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or truncated."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value))
    os.replace(half, path)


def installed_extras(mark: str) -> list[str]:
    """Return the extras that an earlier set-up with the same fingerprint installed."""
    stamp = read_json(STAMP) or {}
    return list(stamp["extras"]) if stamp.get("fingerprint") == mark and PYTHON.exists() else []


def venv_kind() -> str | None:
    """Return the kind of host of a completely set-up .venv; None if no set-up has finished."""
    extras = (read_json(STAMP) or {}).get("extras", [])
    return next((kind for kind in KINDS.values() if kind in extras), None)


def venv_record() -> list[str | None] | None:
    """Return Python and kind of host of a .venv whose pip works; None if it is missing or incomplete."""
    if not PYTHON.exists():
        return None
    if (record := read_json(VENV / VENV_RECORD)) is not None:
        return [record["python"], record["kind"]]
    # An earlier version of this file wrote STAMP alone.
    return [os.path.realpath(PYTHON), venv_kind()] if venv_kind() else None


def check_disk(kind: str) -> None:
    """Check the free disk space.

    Raises:
        SetupError: it is too small.
    """
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB[kind]:
        raise SetupError(f"{free:.1f} GB free on the disk of {ROOT}, {DISK_GB[kind]} GB are needed")


def create_venv(python: str, kind: str) -> None:
    """Create .venv if it is missing, incomplete, of another Python, or for the other kind of host.

    Afterwards pip sees no partly installed package.
    """
    if venv_record() == [python, kind]:
        if read_json(STAMP) is None:
            remove_partial_packages()
    else:
        if VENV.exists():
            confirm_replacement(python, kind)
            for marker in (STAMP, VENV / VENV_RECORD):  # first: the rest is removed in any order
                marker.unlink(missing_ok=True)
            shutil.rmtree(VENV)
        result = run([python, "-m", "venv", str(VENV)])
        if result.returncode == 0:
            result = run([str(PYTHON), "-m", "pip", "--version"])
        if result.returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            output = (result.stdout + result.stderr).strip()
            if "ensurepip" in output:
                raise SetupError(f"{python} cannot create .venv: its venv package is not installed")
            raise SetupError(
                f"{python} cannot create .venv: {output.splitlines()[-1] if output else 'no message'}"
            )
    write_json(VENV / VENV_RECORD, {"python": python, "kind": kind})


def confirm_replacement(python: str, kind: str) -> None:
    """Ask before a complete .venv of another Python, or for the other kind of host, is removed.

    Raises:
        SetupError: the user declined, or cannot be asked.
    """
    record = venv_record()
    if record is None or read_json(STAMP) is None:
        return
    state = f".venv was set up for a {str(record[1]).upper()} host with {record[0]}"
    request = f"this set-up is for a {kind.upper()} host with {python}, and replaces it"
    if not sys.stdin.isatty():
        raise SetupError(f"{state}; {request}: remove {VENV} first, or choose the same PYTHON")
    if input(f"{state}; {request}. Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SetupError(f"set-up cancelled: {state}, and is unchanged")


def remove_partial_packages() -> None:
    """Remove the metadata of packages that an interrupted pip installed partly, so that pip installs them again.

    pip considers a package installed as soon as METADATA exists. `~name` is a package that it was replacing.
    """
    for leftover in VENV.glob("lib/python3*/site-packages/~*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    for metadata in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        record = metadata / "RECORD"
        if (metadata / "INSTALLER").is_file() and record.is_file():
            with record.open(newline="", encoding="utf-8") as rows:
                files = [row[0] for row in csv.reader(rows) if row and not row[0].endswith(".pyc")]
            if all((metadata.parent / file).exists() for file in files):
                continue
        shutil.rmtree(metadata)


def die_with_parent() -> None:
    """Kill this child process with its parent: a surviving pip would write concurrently with the next set-up's."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, and capture its output."""
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)


def pip(label: str, *args: str) -> None:
    """Run one pip install; show its duration, and append its output to the log."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--retries", "2"]
    start = time.monotonic()
    live = sys.stdout.isatty()
    print(f"  {label} ...", end="" if live else "\n", flush=True)
    with LOG.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [*command, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        try:
            next_report = REPORT_SECONDS
            while process.poll() is None:
                time.sleep(0.2)
                seconds = time.monotonic() - start
                if live:
                    print(f"\r  {label} ... {seconds:3.0f} s", end="", flush=True)
                elif seconds >= next_report:
                    print(f"  {label} ... {seconds:.0f} s", flush=True)
                    next_report = seconds + REPORT_SECONDS
        finally:
            process.kill()  # no effect if it has ended
            process.wait()
    summary = f"{label}: {time.monotonic() - start:.0f} s"
    print(f"\r  {summary}        " if live else f"  {summary}", flush=True)
    if process.returncode:
        output = LOG.read_bytes()[begin:].decode(errors="replace")
        raise SetupError(f"{label}: {cause(output)} (log: {LOG})")


def install_torchvision() -> None:
    """Install torchvision in a separate folder; earlier versions installed it with the other packages."""
    shutil.rmtree(ENGINE_FOLDER, ignore_errors=True)
    pip("torchvision, for SGLang", "--no-deps", "--target", str(ENGINE_FOLDER), TORCHVISION)
    run([str(PYTHON), "-m", "pip", "uninstall", "--yes", "torchvision"])


def compile_patched_modules() -> None:
    """Compile the modules of megatron-core that are patched on a CPU, as pip compiles the others."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("ab") as log:
        command = [str(PYTHON), "-m", "megatron_patches"]
        result = subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    if result.returncode:
        raise SetupError(f"megatron-core cannot be imported (log: {LOG})")


def cause(output: str) -> str:
    """Return a sentence for pip's output: a known cause, else its last error line."""
    for sign, meaning in CAUSES:
        if sign in output:
            return meaning
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip failed"


def set_up(dev: bool) -> None:
    """Create .venv and install all packages, unless that has been done."""
    python = find_python()
    kind = host_kind()
    extras = [kind, "dev"] if dev else [kind]
    locked_versions = lock_file(kind)
    mark = fingerprint(f"{python} {kind} {locked_versions.read_text() if locked_versions else ''}")
    installed = installed_extras(mark)
    if set(extras) <= set(installed):
        return
    print(f"rlsys: setting up .venv for a {kind.upper()} host with {python}; log: {LOG}", flush=True)
    start = time.monotonic()
    if not installed:
        check_disk(kind)
        create_venv(python, kind)
    STAMP.unlink(missing_ok=True)  # pip changes what an earlier set-up installed
    if not installed and kind == "cpu":
        pip("torch", TORCH)
    target = f".[{','.join(extras)}]"
    pip(f"packages of {target}", "-e", target, *(("-c", str(locked_versions)) if locked_versions else ()))
    if kind == "cpu" and not installed:
        pip("sglang", "--no-deps", SGLANG)
        install_torchvision()
        compile_patched_modules()
    write_json(STAMP, {"fingerprint": mark, "extras": sorted({*installed, *extras})})
    print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)


def set_up_parity() -> None:
    """Install the libraries that parity tests compare with. A folder with other versions is replaced."""
    if read_json(PARITY_STAMP) == PARITY:
        return
    shutil.rmtree(PARITY_FOLDER, ignore_errors=True)
    script = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    installed = subprocess.run(
        [str(PYTHON), "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    missing = [f"{name}=={version}" for name, version in PARITY.items() if name not in installed]
    pip(
        "trl and verl, for parity tests",
        "--no-deps",
        "--no-compile",
        "--target",
        str(PARITY_FOLDER),
        *missing,
    )
    write_json(PARITY_STAMP, PARITY)


def main() -> int:
    parser = argparse.ArgumentParser(description="Create .venv and install what this machine can run.")
    parser.add_argument("--dev", action="store_true", help="also install the packages for tests and checks")
    parser.add_argument(
        "--parity", action="store_true", help="also install TRL and verl, in a separate folder"
    )
    try:
        args = parser.parse_args()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends pip, too
        set_up(args.dev)
        if args.parity:
            set_up_parity()
    except SetupError as e:
        print(f"rlsys: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nrlsys: set-up interrupted; the same command continues it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
