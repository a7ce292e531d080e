"""Attention head sizes that SGLang's attention backends support on CUDA.

The sizes come from the sources of SGLang 0.5.23 and its kernel packages:

- Triton multiplies blocks of at least 16 (kernels/ops/attention), and supports sizes up to 512.
- FlashAttention 3 supports multiples of 8 up to 256.
- FlashInfer compiles kernels for four sizes.

Other backends are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_fields

_SIZES: dict[str, tuple[str, Callable[[int], bool]]] = {
    "triton": ("9 to 512", lambda n: 9 <= n <= 512),
    "fa3": ("multiples of 8 up to 256", lambda n: n % 8 == 0 and n <= 256),
    "flashinfer": ("64, 128, 256 and 512", lambda n: n in (64, 128, 256, 512)),
}


def check_head_size(path: Path, backend: str | None) -> None:
    """Check that the backend has kernels for the model's attention heads.

    Args:
        path: Model folder; a missing folder is not checked.
        backend: SGLang's attention backend; None if SGLang selects it by the GPU, so that it is enough if one backend
            supports the head size.

    Raises:
        UserError: The head size is not supported.
    """
    if (size := head_size(path)) is None or (backend is not None and backend not in _SIZES):
        return
    backends = _SIZES if backend is None else {backend: _SIZES[backend]}
    if any(supports(size) for _, supports in backends.values()):
        return
    supported = "; ".join(f"{name} supports {sizes}" for name, (sizes, _) in backends.items())
    raise UserError(
        f"model.path = {path}: attention heads of size {size}, which SGLang does not support on CUDA ({supported}); "
        "expected another model, or engine.extra_args: [--attention-backend, NAME]"
    )


def head_size(path: Path) -> int | None:
    """Return the size of the attention heads according to the model's config.json.

    Returns:
        None if the folder has no config.json or the file no head size, and for latent attention, which has separate
            kernels.
    """
    try:
        fields = read_fields(path)
    except FileNotFoundError:
        return None
    if fields.get("kv_lora_rank"):
        return None
    if (size := fields.get("head_dim")) is None and (heads := fields.get("num_attention_heads")):
        size = fields.get("hidden_size", 0) // heads
    return size or None
