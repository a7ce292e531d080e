"""`make setup`: creates .venv and installs what this machine can run. Standard library only, no root.

    python3 launch/bootstrap.py [--dev] [--parity]

RLSYS_DEVICE=cpu or cuda says for which kind of host; without it, an NVIDIA driver that answers decides. A login node
has none: there, say RLSYS_DEVICE=cuda. With RLSYS_LOCKED=1 every package has the version that requirements/*.lock
names; without it, the newest that pyproject.toml allows.

Starts on any Python from 3.8 on, so that one which is too old is told so in a sentence. Doing it again costs
nothing while pyproject.toml, this file and the Python are the same.

An interrupted set-up continues, whatever it was interrupted in: a state on disk counts as complete only by a file
that is written after it. MADE is written when the environment's pip works, STAMP when all packages are installed.
A package without pip's INSTALLER, or without a file of its RECORD, is installed again.
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

from rlsys.devices import gpu_names  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MADE = "rlsys-venv.json"
STAMP = VENV / "rlsys-setup.json"
LOG = VENV / "rlsys-setup.log"
PYTHONS = ((3, 11), (3, 12), (3, 13))
DEVICE = "RLSYS_DEVICE"
KINDS = {"cpu": "cpu", "cuda": "gpu"}  # its words -> our extras
LOCKED = "RLSYS_LOCKED"
LOCKS = {"cpu": ROOT / "requirements/cpu.lock", "gpu": ROOT / "requirements/cuda.lock"}  # by extra
# The registry's torch brings CUDA's libraries along: 6.3 GB installed, and what is downloaded meanwhile.
DISK_GB = {"cpu": 9, "gpu": 15}
# Before everything else: whatever asks for torch later finds it satisfied.
TORCH = "torch==2.13.0"
# Without what its metadata asks for, which is CUDA; what it needs on a CPU stands in pyproject.toml's extra `cpu`.
SGLANG = "sglang==0.5.23"
# SGLang imports it at start. It is built for CUDA, so that transformers, which imports any torchvision that it finds,
# would fail beside a CPU torch: only the engine's processes look into this folder (rlsys/engine/cpu_platform.py).
TORCHVISION = "torchvision==0.28.0"
ENGINE_FOLDER = VENV / "engine"

# What tests compare our formulas with, and what that imports: in a folder of its own, without dependencies, so that
# neither our environment nor torch changes. Packages that the environment has are left out.
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
    """Set-up cannot go on; the message says what is missing."""


def fitting_python() -> str:
    """This Python if it fits, else one found on PATH. Raises SetupError when there is none."""
    if sys.version_info[:2] in PYTHONS:
        return os.path.realpath(sys.executable)
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        # Asked, not believed: a version manager leaves scripts of that name for versions that it lacks.
        if found and (path := real_python(found)):
            return path
    here = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(f"Python 3.11, 3.12 or 3.13 is needed; this is {here}, and no other is on PATH")


def real_python(command: str) -> str | None:
    ask = "import os, sys; print(os.path.realpath(sys.executable))"
    done = subprocess.run([command, "-c", ask], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def host_kind() -> str:
    """`gpu` or `cpu`: what RLSYS_DEVICE says, else by whether an NVIDIA driver answers. Raises SetupError for another
    word."""
    told = os.environ.get(DEVICE, "")
    if told:
        if told not in KINDS:
            raise SetupError(f"{DEVICE} = {told}: expected cpu or cuda")
        return KINDS[told]
    return "gpu" if gpu_names() else "cpu"


def lock(kind: str) -> Path | None:
    """The file of versions to keep to, if RLSYS_LOCKED asks for it. Raises SetupError for another word than 1."""
    told = os.environ.get(LOCKED, "")
    if told not in ("", "1"):
        raise SetupError(f"{LOCKED} = {told}: expected 1, or nothing")
    return LOCKS[kind] if told else None


def fingerprint(python: str) -> str:
    """Changes when the packages, the steps, the Python or the folder (scripts hold its path) change."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{python} {ROOT}".encode())
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """None for a file that is missing or cut short."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Atomic."""
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value))
    os.replace(half, path)


def installed_extras(mark: str) -> list[str]:
    """Extras that an earlier set-up with the same fingerprint installed."""
    stamp = read_json(STAMP) or {}
    return list(stamp["extras"]) if stamp.get("fingerprint") == mark and PYTHON.exists() else []


def venv_kind() -> str | None:
    """The kind of host that .venv was set up for, with whatever packages; None when no set-up came to its end."""
    extras = (read_json(STAMP) or {}).get("extras", [])
    return next((kind for kind in KINDS.values() if kind in extras), None)


def made_for() -> list[str | None] | None:
    """Python and kind of host of a .venv whose pip works; None for one that is missing or half-made."""
    if not PYTHON.exists():
        return None
    if (made := read_json(VENV / MADE)) is not None:
        return [made["python"], made["kind"]]
    # An earlier version of this file wrote STAMP alone.
    return [os.path.realpath(PYTHON), venv_kind()] if venv_kind() else None


def check_disk(kind: str) -> None:
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB[kind]:
        raise SetupError(f"{free:.1f} GB free on the disk of {ROOT}, {DISK_GB[kind]} GB are needed")


def make_venv(python: str, kind: str) -> None:
    """One that is half-made, of another Python, or for the other kind of host (its torch is another build) is made
    anew. Afterwards pip sees no package that is installed in part."""
    if made_for() == [python, kind]:
        if read_json(STAMP) is None:
            forget_half_installed()
    else:
        if VENV.exists():
            for last in (STAMP, VENV / MADE):  # first: the rest is removed in any order
                last.unlink(missing_ok=True)
            shutil.rmtree(VENV)
        done = run([python, "-m", "venv", str(VENV)])
        if done.returncode == 0:
            done = run([str(PYTHON), "-m", "pip", "--version"])
        if done.returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            said = (done.stdout + done.stderr).strip()
            if "ensurepip" in said:
                raise SetupError(f"{python} cannot create .venv: its venv package is not installed")
            raise SetupError(
                f"{python} cannot create .venv: {said.splitlines()[-1] if said else 'no message'}"
            )
    write_json(VENV / MADE, {"python": python, "kind": kind})


def forget_half_installed() -> None:
    """An interrupted pip leaves packages with some of their files, and takes them for installed once METADATA is
    there. Without their METADATA it installs them again, over what is there. `~name` is what it was replacing."""
    for replaced in VENV.glob("lib/python3*/site-packages/~*"):
        shutil.rmtree(replaced) if replaced.is_dir() else replaced.unlink()
    for described in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        record = described / "RECORD"
        if (described / "INSTALLER").is_file() and record.is_file():
            with record.open(newline="", encoding="utf-8") as rows:
                files = [row[0] for row in csv.reader(rows) if row and not row[0].endswith(".pyc")]
            if all((described.parent / file).exists() for file in files):
                continue
        shutil.rmtree(described)


def die_with_parent() -> None:
    """In a child: a pip that outlives a killed set-up would write beside the next one's."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)


def pip(label: str, *args: str) -> None:
    """One pip install, with its seconds shown and its output in the log."""
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
            while process.poll() is None:
                time.sleep(0.2)
                if live:
                    print(f"\r  {label} ... {time.monotonic() - start:3.0f} s", end="", flush=True)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    took = f"{label}: {time.monotonic() - start:.0f} s"
    print(f"\r  {took}        " if live else f"  {took}", flush=True)
    if process.returncode:
        said = LOG.read_bytes()[begin:].decode(errors="replace")
        raise SetupError(f"{label}: {cause(said)} (log: {LOG})")


def install_torchvision() -> None:
    """In a folder of its own; an earlier version of this file installed it among the other packages."""
    shutil.rmtree(ENGINE_FOLDER, ignore_errors=True)
    pip("torchvision, for SGLang", "--no-deps", "--target", str(ENGINE_FOLDER), TORCHVISION)
    run([str(PYTHON), "-m", "pip", "uninstall", "--yes", "torchvision"])


def keep_rewritten() -> None:
    """megatron-core's modules as they are rewritten for a CPU: their bytecode, as pip writes that of the others."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with LOG.open("ab") as log:
        command = [str(PYTHON), "-m", "megatron_patches"]
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    if done.returncode:
        raise SetupError(f"megatron-core cannot be imported (log: {LOG})")


def cause(output: str) -> str:
    """A sentence for what pip said: a known cause, else its last error line."""
    for sign, meaning in CAUSES:
        if sign in output:
            return meaning
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip failed"


def set_up(dev: bool) -> None:
    python = fitting_python()
    kind = host_kind()
    extras = [kind, "dev"] if dev else [kind]
    kept_to = lock(kind)
    mark = fingerprint(f"{python} {kind} {kept_to.read_text() if kept_to else ''}")
    have = installed_extras(mark)
    if set(extras) <= set(have):
        return
    print(f"rlsys: setting up .venv for a {kind.upper()} host with {python}", flush=True)
    start = time.monotonic()
    if not have:
        check_disk(kind)
        make_venv(python, kind)
    STAMP.unlink(missing_ok=True)  # pip changes what an earlier set-up installed
    if not have and kind == "cpu":
        pip("torch", TORCH)
    target = f".[{','.join(extras)}]"
    pip(f"packages of {target}", "-e", target, *(("-c", str(kept_to)) if kept_to else ()))
    if kind == "cpu" and not have:
        pip("sglang", "--no-deps", SGLANG)
        install_torchvision()
        keep_rewritten()
    write_json(STAMP, {"fingerprint": mark, "extras": sorted({*have, *extras})})
    print(f"  ready after {time.monotonic() - start:.0f} s", flush=True)


def set_up_parity() -> None:
    """After `set_up`: the libraries that parity tests compare with. A folder of other versions is made anew."""
    if read_json(PARITY_STAMP) == PARITY:
        return
    shutil.rmtree(PARITY_FOLDER, ignore_errors=True)
    ask = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    have = subprocess.run([str(PYTHON), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    missing = [f"{name}=={version}" for name, version in PARITY.items() if name not in have]
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
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--parity", action="store_true", help="also TRL and verl, in a folder of their own")
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
