"""Reference hashes of SGLang's kernel. The module does not import pytest, because the GPU drill uses it too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Hashes of `sample(n, dtype)` by SGLang 0.5.23's kernel in Triton's interpreter, which
# tests/integration/test_gpu_hash.py runs.
GOLDEN = {
    (1, "uint8"): "ec41b5cf3048f8a6",
    (7, "bfloat16"): "ea2abefe28008dce",
    (4096, "float32"): "675b0d9b37698ff7",
    (8192, "float32"): "6d6b022f16622cf5",
    (8193, "float32"): "a084dbca41c341ed",
    (50001, "bfloat16"): "e91852dda844070f",
}


def sample(n: int, dtype: str) -> Tensor:
    """Return a tensor of `n` elements with random bytes."""
    values = np.random.default_rng(n).integers(
        0, 256, n * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    )
    return torch.from_numpy(values.astype(np.uint8)).view(getattr(torch, dtype))
