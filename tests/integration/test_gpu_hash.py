"""SGLang's own kernel, run by Triton's interpreter, gives the hashes that the unit tests hold ours to, and those of
our kernel, which compiles for a GPU of compute capability 9.0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.golden_hashes import GOLDEN
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.gate]

# The kernel's file is loaded without its two assertions that the tensor is on a GPU.
_SCRIPT = """
import importlib.util, json, pathlib, sys
from tests.helpers.golden_hashes import GOLDEN, sample
spec = importlib.util.find_spec("sglang")
path = pathlib.Path(spec.submodule_search_locations[0]) / "kernels/ops/memory/gpu_tensor_hash.py"
source = path.read_text()
assert source.count('is_cuda, "Use .cuda() first"') == 2
copy = pathlib.Path(sys.argv[1]) / "kernel.py"
copy.write_text("\\n".join(line for line in source.splitlines() if "Use .cuda() first" not in line))
spec = importlib.util.spec_from_file_location("kernel", copy)
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
print(json.dumps([f"{kernel.gpu_tensor_hash(sample(n, dtype)):016x}" for n, dtype in GOLDEN]))
"""

# Tensors of odd sizes and dtypes, whole, in parts, and as columns of a matrix; all in one launch of our kernel.
_OURS = """
import random, torch
from rlsys.weights.hashes import PartDigests, final_hash

digests, of, rng = PartDigests(), [], random.Random(0)
for n, dtype in [(1, "uint8"), (3, "bfloat16"), (8192 * 4, "uint8"), (8192 * 4 + 3, "uint8"), (20001, "bfloat16"),
                 (24583, "float32"), (777, "float64"), (40000, "float8_e4m3fn")]:
    whole = sample(n, dtype)
    words = -(-whole.nbytes // 4)
    of.append((whole, [digests.add(whole, 0, words)]))
    flat = whole.view(torch.uint8)
    cuts = [0, *sorted(4 * rng.randrange(words + 1) for _ in range(3)), len(flat)]
    parts = [(flat[a:b], a // 4) for a, b in zip(cuts, cuts[1:]) if b >= a]
    of.append((whole, [digests.add(part, start, words) for part, start in parts]))
for dtype in ("bfloat16", "float32"):
    matrix = sample(60 * 400, dtype).view(60, 400)
    for columns in (matrix[:, 100:300], matrix[:, 1:301], matrix.t(), matrix[3:40]):
        of.append((columns.contiguous(), [digests.add(columns, 0, -(-columns.nbytes // 4))]))
assert sum(map(len, digests._digested)) == 0, "one launch"
results = digests.results()
wrong = [(t.shape, str(t.dtype)) for t, parts in of
         if final_hash([results[i] for i in parts]) != f"{kernel.gpu_tensor_hash(t):016x}"]
print(json.dumps([len(of), wrong]))
"""

_COMPILED = """
import json
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rlsys.ops import tensor_digest as ops

constants = dict(SEED_HIGH=2**32 - 1, SEED_LOW=1, TILE=ops.TILE, BLOCK=ops.BLOCK, COLUMNS=6)
signature = {"table": "*i64", "out": "*u64", **dict.fromkeys(constants, "constexpr")}
source = ASTSource(ops.tile_digests, signature, constants)
kernel = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": ops.WARPS})
print(json.dumps([len(kernel.asm["cubin"]), kernel.metadata.shared, "sm_90" in kernel.asm["ptx"]]))
"""


def _answer(script: str, *args: str, interpreted: bool) -> list[Any]:
    pytest.importorskip("triton", reason="triton is not installed: its kernels are for CUDA hosts")
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "PYTHONPATH": python_path(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", script, *args], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    answer: list[Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def test_the_golden_hashes_are_the_kernels(tmp_path: Path) -> None:
    assert _answer(_SCRIPT, str(tmp_path), interpreted=True) == list(GOLDEN.values())


def test_our_kernel_gives_sglangs_hashes_of_many_tensors_in_one_launch(tmp_path: Path) -> None:
    tensors, wrong = _answer(_SCRIPT + _OURS, str(tmp_path), interpreted=True)
    assert (tensors, wrong) == (24, [])


def test_our_kernel_compiles_for_compute_capability_9() -> None:
    """Triton needs no card for it."""
    size, shared, for_sm_90 = _answer(_COMPILED, interpreted=False)
    assert size > 0 and for_sm_90
    assert shared < 2**10
