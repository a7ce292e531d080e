"""`make setup`: creates .venv and installs the packages for this machine. Standard library only, no root.

    python3 launch/bootstrap.py [--dev] [--parity]

Two environment variables change the set-up:

    RLSYS_DEVICE    kind of host: cpu or cuda; by default cuda if an NVIDIA driver responds. On a login node without
                    GPUs, set cuda.
    RLSYS_LOCKED    1: install the versions in requirements/*.lock; by default the newest that pyproject.toml allows

The script starts on Python 3.8 and later, so that it can report an unsupported version. It does nothing if an earlier
set-up has finished and pyproject.toml, this file and the Python are unchanged.

The same command continues an interrupted set-up. The script writes VENV_RECORD when the environment's pip works, and
STAMP when all packages are installed. It installs a package again if the package lacks pip's INSTALLER or a file of
its RECORD.
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
"""Interval of the lines about a running pip install, if the output is not a terminal."""
PYTHONS = ((3, 11), (3, 12), (3, 13))
DEVICE = "RLSYS_DEVICE"
KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Value of RLSYS_DEVICE -> kind of host, which is also the extra of pyproject.toml."""
LOCKED = "RLSYS_LOCKED"
LOCKS = {"cpu": ROOT / "requirements/cpu.lock", "gpu": ROOT / "requirements/cuda.lock"}
"""Kind of host -> file of pinned versions."""
# torch for CUDA depends on CUDA's libraries: 6.3 GB installed, plus downloads.
DISK_GB = {"cpu": 9, "gpu": 15}
# torch is installed first, so that later packages find it.
TORCH = "torch==2.13.0"
# SGLang is installed without its dependencies, which need CUDA. The extra `cpu` of pyproject.toml has those for a
# CPU.
SGLANG = "sglang==0.5.23"
# SGLang imports torchvision, which is built for CUDA. transformers imports any installed torchvision, and would fail
# with a CPU torch, so torchvision is in a folder that only the engine's processes use (rlsys/engine/cpu/platform.py).
TORCHVISION = "torchvision==0.28.0"
ENGINE_FOLDER = VENV / "engine"

# Libraries with which parity tests compare, and the packages that they import. They are in a separate folder, without
# dependencies, so that neither the environment nor torch changes. Packages of the environment are not listed.
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
    ("(from versions: none)", "the package index has no version of the package; check the network"),
    ("No matching distribution", "the package index has no version for this Python and platform"),
)
"""(text in pip's output, cause of the failure); the first match counts."""


class SetupError(Exception):
    """The set-up cannot continue; the message says why."""


def find_python() -> str:
    """Return the path of a supported Python: this one, or else one on PATH.

    Raises:
        SetupError: there is none.
    """
    if sys.version_info[:2] in PYTHONS:
        return os.path.realpath(sys.executable)
    for major, minor in PYTHONS:
        command = shutil.which(f"python{major}.{minor}")
        # real_python runs the command, because version managers create commands for versions that are not installed.
        if command and (path := real_python(command)):
            return path
    version = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(
        f"this is Python {version}, and PATH has no supported version; expected Python 3.11, 3.12 or 3.13"
    )


def real_python(command: str) -> str | None:
    """Return the path of a Python's executable; None if it does not run."""
    script = "import os, sys; print(os.path.realpath(sys.executable))"
    result = subprocess.run([command, "-c", script], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def host_kind() -> str:
    """Return the kind of host, `gpu` or `cpu`: from RLSYS_DEVICE, or else by whether an NVIDIA driver responds.

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
    """Return the file of pinned versions for a kind of host; None if RLSYS_LOCKED is not set.

    Raises:
        SetupError: RLSYS_LOCKED is neither 1 nor empty.
    """
    value = os.environ.get(LOCKED, "")
    if value not in ("", "1"):
        raise SetupError(f"{LOCKED} = {value}: expected 1, or an unset variable")
    return LOCKS[kind] if value else None


def fingerprint(choices: str) -> str:
    """Return a digest of all inputs of a set-up.

    These are pyproject.toml, this file, `choices` (Python, kind of host and pinned versions), and ROOT, because
    installed scripts contain its path.
    """
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{choices} {ROOT}".encode())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or truncated."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


def installed_extras(inputs: str) -> list[str]:
    """Return the extras that earlier set-ups with the fingerprint `inputs` have installed."""
    stamp = read_json(STAMP) or {}
    return list(stamp["extras"]) if stamp.get("fingerprint") == inputs and PYTHON.exists() else []


def venv_kind() -> str | None:
    """Return the kind of host for which .venv was set up; None if no set-up has finished."""
    extras = (read_json(STAMP) or {}).get("extras", [])
    return next((kind for kind in KINDS.values() if kind in extras), None)


def venv_record() -> list[str | None] | None:
    """Return the Python and the kind of host of .venv; None if .venv is missing, or its pip does not work."""
    if not PYTHON.exists():
        return None
    if (record := read_json(VENV / VENV_RECORD)) is not None:
        return [record["python"], record["kind"]]
    # An earlier version of this file wrote STAMP alone.
    return [os.path.realpath(PYTHON), venv_kind()] if venv_kind() else None


def check_disk(kind: str) -> None:
    """Check that the disk has enough free space for a kind of host.

    Raises:
        SetupError: it has not.
    """
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB[kind]:
        raise SetupError(
            f"the disk of {ROOT} has {free:.1f} GB of free space; expected at least {DISK_GB[kind]} GB"
        )


def create_venv(python: str, kind: str) -> None:
    """Create .venv if it is missing, incomplete, of another Python, or for the other kind of host.

    Otherwise remove the packages that an interrupted set-up has installed only partly.

    Raises:
        SetupError: the user keeps the existing .venv, or Python cannot create it.
    """
    if venv_record() == [python, kind]:
        if read_json(STAMP) is None:
            remove_partial_packages()
    else:
        if VENV.exists():
            confirm_replacement(python, kind)
            # Remove these files first, so that an interrupted removal does not leave a .venv that looks complete.
            for marker in (STAMP, VENV / VENV_RECORD):
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
    """Remove the metadata of packages that an interrupted pip has installed partly, so that pip installs them again.

    pip considers a package installed as soon as METADATA exists. It renames a package that it replaces to `~name`.
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
    """Make the kernel kill this child process with its parent, so that no pip writes during the next set-up."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its exit code and output."""
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)


def pip(label: str, *args: str) -> None:
    """Run `pip install` with `args`; show its duration under `label`, and append its output to the log.

    Raises:
        SetupError: pip failed.
    """
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--retries", "2"]
    with LOG.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [*command, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        try:
            show_progress(label, process)
        finally:
            process.kill()  # no effect if it has ended
            process.wait()
    if process.returncode:
        output = LOG.read_bytes()[log_start:].decode(errors="replace")
        raise SetupError(f"{label}: {cause(output)} (log: {LOG})")


def show_progress(label: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and show its duration: continuously on a terminal, else as lines."""
    start = time.monotonic()
    live = sys.stdout.isatty()
    print(f"  {label} ...", end="" if live else "\n", flush=True)
    next_report = REPORT_SECONDS
    while process.poll() is None:
        time.sleep(0.2)
        seconds = time.monotonic() - start
        if live:
            print(f"\r  {label} ... {seconds:3.0f} s", end="", flush=True)
        elif seconds >= next_report:
            print(f"  {label} ... {seconds:.0f} s", flush=True)
            next_report = seconds + REPORT_SECONDS
    summary = f"{label}: {time.monotonic() - start:.0f} s"
    print(f"\r  {summary}        " if live else f"  {summary}", flush=True)


def install_torchvision() -> None:
    """Install torchvision in a separate folder, and remove it from the environment."""
    shutil.rmtree(ENGINE_FOLDER, ignore_errors=True)
    pip("torchvision, for SGLang", "--no-deps", "--target", str(ENGINE_FOLDER), TORCHVISION)
    run([str(PYTHON), "-m", "pip", "uninstall", "--yes", "torchvision"])


def compile_patched_modules() -> None:
    """Compile the modules of megatron-core that megatron_patches changes. pip has compiled all others.

    Raises:
        SetupError: megatron-core cannot be imported.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("ab") as log:
        command = [str(PYTHON), "-m", "megatron_patches"]
        result = subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    if result.returncode:
        raise SetupError(f"megatron-core cannot be imported (log: {LOG})")


def cause(output: str) -> str:
    """Return the cause of pip's failure: a known one, or else the last error line of its output."""
    for text, known_cause in CAUSES:
        if text in output:
            return known_cause
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip failed"


def set_up(dev: bool) -> None:
    """Create .venv and install all packages, unless an earlier set-up with the same inputs has done so.

    Args:
        dev: whether to install the packages for tests and checks, too.
    """
    python = find_python()
    kind = host_kind()
    extras = [kind, "dev"] if dev else [kind]
    locked_versions = lock_file(kind)
    inputs = fingerprint(f"{python} {kind} {locked_versions.read_text() if locked_versions else ''}")
    installed = installed_extras(inputs)
    if set(extras) <= set(installed):
        return
    print(f"rlsys: setting up .venv for a {kind.upper()} host with {python}; log: {LOG}", flush=True)
    start = time.monotonic()
    if not installed:
        check_disk(kind)
        create_venv(python, kind)
    STAMP.unlink(missing_ok=True)  # the environment is incomplete until pip has finished
    if not installed and kind == "cpu":
        pip("torch", TORCH)
    target = f".[{','.join(extras)}]"
    pip(f"packages of {target}", "-e", target, *(("-c", str(locked_versions)) if locked_versions else ()))
    if kind == "cpu" and not installed:
        pip("sglang", "--no-deps", SGLANG)
        install_torchvision()
        compile_patched_modules()
    write_json(STAMP, {"fingerprint": inputs, "extras": sorted({*installed, *extras})})
    print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)


def set_up_parity() -> None:
    """Install the libraries with which parity tests compare. A folder with other versions is replaced."""
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
    parser = argparse.ArgumentParser(description="Create .venv and install the packages for this machine.")
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
