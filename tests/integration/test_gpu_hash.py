"""SGLang's own kernel, run by Triton's interpreter, gives the hashes that the unit tests hold ours to."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT
from tests.unit.weights.test_hashes import GOLDEN

pytestmark = [pytest.mark.integration, pytest.mark.gate]

# The kernel's file is loaded without its two assertions that the tensor is on a GPU.
_SCRIPT = """
import importlib.util, json, pathlib, sys
from tests.unit.weights.test_hashes import GOLDEN, sample
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


def test_the_golden_hashes_are_the_kernels(tmp_path: object) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == list(GOLDEN.values())
