"""Sizes of attention heads that SGLang's attention backends take on CUDA, where rope_hooks.py covers none.

Read in SGLang 0.5.23 and the packages it calls: Triton multiplies blocks of at least 16 (kernels/ops/attention) and
has room for 512; FlashAttention 3 takes multiples of 8 up to 256; FlashInfer compiles four sizes. Of other backends
nothing is known here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsys.errors import UserError
from rlsys.model_folder import read_fields

_SIZES: dict[str, tuple[str, Callable[[int], bool]]] = {
    "triton": ("9 to 512", lambda n: 9 <= n <= 512),
    "fa3": ("multiples of 8 up to 256", lambda n: n % 8 == 0 and n <= 256),
    "flashinfer": ("64, 128, 256 and 512", lambda n: n in (64, 128, 256, 512)),
}


def check_head_size(path: Path, backend: str | None) -> None:
    """Raises UserError where the backend lacks kernels for the heads of the model in `path`. `backend` None: SGLang
    chooses by the GPU, and heads that any of these takes pass. Nothing is known of a folder that is not here."""
    if (size := head_size(path)) is None or (backend is not None and backend not in _SIZES):
        return
    backends = _SIZES if backend is None else {backend: _SIZES[backend]}
    if any(takes(size) for _, takes in backends.values()):
        return
    known = "; ".join(f"{name} takes {sizes}" for name, (sizes, _) in backends.items())
    raise UserError(
        f"model.path = {path}: attention heads of {size}, which SGLang's attention lacks on CUDA ({known}); expected "
        "another model, or engine.extra_args: [--attention-backend, NAME]"
    )


def head_size(path: Path) -> int | None:
    """Of the model's config.json; None without one, and with latent attention, which has kernels of its own."""
    try:
        fields = read_fields(path)
    except FileNotFoundError:
        return None
    if fields.get("kv_lora_rank"):
        return None
    if (size := fields.get("head_dim")) is None and (heads := fields.get("num_attention_heads")):
        size = fields.get("hidden_size", 0) // heads
    return size or None
