"""SGLang's operators of a gated delta net (Qwen3-Next) in plain torch, for hosts without CUDA.

Shapes: T tokens of all prompts, concatenated; B requests with one token each; H value heads; p size of a key, w of a
value. A pool has a slot for each request: states `[slots, H, w, p]`, the last inputs of the convolution
`[slots, channels, width - 1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from rlsys.ops.delta_rule import delta_rule, normalize

SILU = ("silu", "swish")
"""Names of the activation SiLU in SGLang."""


def _check_argument(name: str, value: object, *expected: object) -> None:
    """Check that an argument has a value that the replacements support.

    Raises:
        ValueError: `value` is not one of `expected`.
    """
    if value not in expected:
        raise ValueError(f"{name} = {value!r}: expected {' or '.join(map(repr, expected))}")


def split_projections(
    mixed: Tensor, gates: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the projections, which are ordered by key head.

    Args:
        mixed: `[T, projected]`.
        gates: `[T, 2 H]`.

    Returns: Queries, keys and values `[T, channels]`, the gates of values `[T, H, w]`, b and a `[T, H]`.
    """
    group_size = value_heads // key_heads * value_size
    *qkv, z = mixed.unflatten(1, (key_heads, -1)).split([key_size, key_size, group_size, group_size], -1)
    b, a = (x.flatten(1).contiguous() for x in gates.unflatten(1, (key_heads, -1)).chunk(2, -1))
    return torch.cat([x.flatten(1) for x in qkv], 1), z.reshape(len(z), value_heads, value_size), b, a


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str = "silu",
    **_: Any,
) -> Tensor:
    """Convolve prompts (causal_conv1d), and store each prompt's last inputs in its slot.

    Args:
        x: Inputs `[channels, T]`.
        weight: `[channels, width]`.
        bias: `[channels]`, or None.
        conv_states: Pool of last inputs; the prompts' slots are updated in place.
        query_start_loc: Unused; start of each prompt.
        seq_lens_cpu: Number of tokens of each prompt.
        cache_indices: Slot of each prompt.
        has_initial_state: Whether a prompt continues from its slot.
        activation: silu or swish.

    Returns: `[channels, T]`.

    Raises:
        ValueError: another activation.
    """
    _check_argument("activation", activation, *SILU)
    context = weight.shape[1] - 1
    out, start = torch.empty_like(x), 0
    for i, slot in enumerate(cache_indices.tolist()):
        length = int(seq_lens_cpu[i])
        new = x[:, start : start + length]
        state = conv_states[slot, :, -context:] if has_initial_state[i] else new.new_zeros(len(x), context)
        inputs = torch.cat([state.to(x.dtype), new], 1)
        out[:, start : start + length] = silu(conv1d(inputs[None], weight[:, None], bias, groups=len(x))[0])
        conv_states[slot, :, -context:] = inputs[:, -context:].to(conv_states.dtype)
        start += length
    return out


def convolve_next(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve the next token of each request (causal_conv1d).

    Args:
        x: Inputs `[B, channels]`.
        conv_state: Pool of last inputs; the requests' slots are updated in place.
        weight: `[channels, width]`.
        bias: `[channels]`, or None.
        activation: silu or swish.
        conv_state_indices: Slot of each request `[B]`.

    Returns: `[B, channels]`.

    Raises:
        ValueError: another activation.
    """
    _check_argument("activation", activation, *SILU)
    slots, context = conv_state_indices.long(), weight.shape[1] - 1
    inputs = torch.cat([conv_state[slots][..., -context:].to(x.dtype), x[..., None]], -1)
    conv_state[slots] = inputs[..., -conv_state.shape[-1] :].to(conv_state.dtype)
    out = (inputs * weight).sum(-1)
    return silu(out if bias is None else out + bias)


def decays(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Compute decays and write strengths.

    Args:
        A_log: Logarithm of the decay rate `[H]`.
        a: Input of the decay `[T, H]`.
        b: Input of the write strength `[T, H]`.
        dt_bias: Added to `a` `[H]`.
        beta: Parameter of softplus.
        threshold: Parameter of softplus.

    Returns: Logarithm of the decay `[1, T, H]` float32, and write strength `[1, T, H]` of b.dtype.
    """
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float(), beta, threshold)
    return g[None], b.float().sigmoid().to(b.dtype)[None]


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Apply the delta rule to prompts. Each prompt starts from the state of its slot and stores its last state there.

    Args:
        q: Queries `[1, T, key heads, p]`.
        k: Keys `[1, T, key heads, p]`.
        v: Values `[1, T, H, w]`.
        g: Logarithm of the decay `[1, T, H]`.
        beta: Write strength `[1, T, H]`.
        initial_state: Pool `[slots, H, w, p]`; the prompts' slots are updated in place.
        initial_state_indices: Slot of each prompt.
        cu_seqlens: Start of each prompt, followed by T.
        use_qk_l2norm_in_kernel: Whether to normalize queries and keys; must be true.

    Returns: `[1, T, H, w]`, followed by None for SGLang's other results.

    Raises:
        ValueError: `use_qk_l2norm_in_kernel` is false.
    """
    _check_argument("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel, True)
    repeats = v.shape[2] // k.shape[2]
    out = torch.empty_like(v)
    q, k = (normalize(x.float()).repeat_interleave(repeats, dim=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    ends = cu_seqlens.tolist()
    for start, end, slot in zip(ends, ends[1:], initial_state_indices.tolist(), strict=False):
        q_, k_, v_, g_, beta_ = (x[:, start:end].float() for x in (q, k, v, g, beta))
        state = initial_state[slot].float().transpose(-1, -2)[None]
        values, state = delta_rule(q_, k_, v_, g_, beta_, state)
        out[:, start:end] = values.to(out.dtype)
        initial_state[slot] = state[0].transpose(-1, -2).to(initial_state.dtype)
    return out, None, None


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to the next token of each request.

    The result of a request does not depend on the other requests of the batch.

    Args:
        mixed_qkv: Queries, keys and values `[B, channels]`.
        a: Input of the decay `[B, H]`.
        b: Input of beta `[B, H]`.
        A_log: Logarithm of the decay rate `[H]`.
        dt_bias: Added to `a` `[H]`.
        scale: Factor of the queries.
        initial_state: Pool `[slots, H, w, p]`; the requests' slots are updated in place.
        out: `[B, 1, H, w]`, written in place.
        ssm_state_indices: Slot of each request `[B]`.
        use_qk_l2norm_in_kernel: Whether to normalize queries and keys; must be true.

    Returns: `out` and `initial_state`.

    Raises:
        ValueError: `use_qk_l2norm_in_kernel` is false.
    """
    _check_argument("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel, True)
    heads, w, p = initial_state.shape[1:]
    slots, keys = ssm_state_indices.long(), (mixed_qkv.shape[1] - heads * w) // 2
    q, k, v = mixed_qkv.float().split([keys, keys, heads * w], dim=1)
    q, k = (normalize(x.unflatten(1, (-1, p))).repeat_interleave(heads * p // keys, dim=1) for x in (q, k))
    g, beta = decays(A_log, a, b, dt_bias)
    state = initial_state[slots].float() * g[0].exp()[..., None, None]
    prediction = (state * k[:, :, None]).sum(-1)
    write = (v.unflatten(1, (heads, w)) - prediction) * beta[0].float()[..., None]
    state = state + write[..., None] * k[:, :, None]
    out[:, 0] = (state * (q * scale)[:, :, None]).sum(-1).to(out.dtype)
    initial_state[slots] = state.to(initial_state.dtype)
    return out, initial_state


def gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Apply RMSNorm over the last axis, then multiply by SiLU of the gate.

    The norm is computed in float32 and rounded to x.dtype before the multiplication by the weight.

    Args:
        x: Inputs `[..., w]`.
        g: Gate `[..., w]`.
        weight: `[w]`.
        bias: Must be None.
        activation: silu or swish.
        residual: Must be None.
        prenorm: Must be false.
        residual_in_fp32: Unused, because there is no residual.
        eps: Added to the mean of squares.

    Returns: `[..., w]` of x.dtype.

    Raises:
        ValueError: another activation, a bias, a residual or a prenorm.
    """
    _check_argument("activation", activation, *SILU)
    if bias is not None or residual is not None or prenorm:
        shapes = [None if x is None else list(x.shape) for x in (bias, residual)]
        raise ValueError(
            f"bias of shape {shapes[0]}, residual of shape {shapes[1]}, prenorm = {prenorm}: expected None, None, "
            "False"
        )
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype) * silu(g.float())).to(x.dtype)


_OPS = "sglang.kernels.ops."
REPLACED: dict[str, Callable[..., Any]] = {
    _OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat": split_projections,
    _OPS + "mamba.causal_conv1d_triton.causal_conv1d_fn": convolve_prompts,
    _OPS + "mamba.causal_conv1d_triton.causal_conv1d_update": convolve_next,
    _OPS + "attention.linear.fused_gdn_gating.fused_gdn_gating": decays,
    _OPS + "attention.fla.chunk.chunk_gated_delta_rule": prefill,
    _OPS + "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": decode,
    _OPS + "attention.fla.fused_norm_gate.rms_norm_gated": gated_norm,
}
"""SGLang's operator -> its replacement."""
