"""The gated delta rule (Yang et al. 2024) in plain torch, for trainer and engine.

A head has a state S `[p, w]`. Token t multiplies S by exp(g_t), reads the value that S stores under the key k_t, and
adds the difference between v_t and that value, scaled by beta_t:

    S_t = exp(g_t) S_{t-1} + k_t u_t'      u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t)      o_t = S_t' q_t

Shapes: R sequences of L tokens, H heads, p size of a key, w size of a value, C tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64
"""C: number of tokens for which one triangular system is solved."""


def normalize(x: Tensor) -> Tensor:
    """Scale vectors along the last axis to length 1. The epsilon is that of the reference implementation."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule.

    Within a chunk, u is the solution of a triangular system: each u_t depends on the earlier ones and on the state at
    the start of the chunk.

    Args:
        q: `[R, L, H, p]` float32, like all tensors.
        k: `[R, L, H, p]`.
        v: `[R, L, H, w]`.
        g: `[R, L, H]`, at most 0.
        beta: `[R, L, H]`.
        state: `[R, H, p, w]`, the state before the first token; None: zeros.

    Returns:
        o `[R, L, H, w]`, and the state after the last token `[R, H, p, w]`.
    """
    length = q.shape[1]
    missing = -length % CHUNK  # tokens that neither decay nor write

    def chunks(x: Tensor) -> Tensor:
        """Pad `[R, L, H, ...]` and divide it into chunks, `[R, H, chunks, C, ...]`."""
        padded = pad(x, (*(0, 0) * (x.dim() - 2), 0, missing))
        return padded.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    start_decay, end_decay = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    system = k @ k.transpose(-1, -2) * decay * beta[..., None]
    right_hand_side = torch.cat([v * beta[..., None], k * beta[..., None] * start_decay], dim=-1)
    solved = torch.linalg.solve_triangular(system, right_hand_side, upper=False, unitriangular=True)
    u_from_values, u_from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = q @ k.transpose(-1, -2) * decay
    if state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(k.shape[2]):
        u = u_from_values[:, :, i] - u_from_state[:, :, i] @ state
        outputs.append((q[:, :, i] * start_decay[:, :, i]) @ state + attention[:, :, i] @ u)
        state = state * start_decay[:, :, i, -1:] + (k[:, :, i] * end_decay[:, :, i]).transpose(-1, -2) @ u
    return torch.stack(outputs, dim=2).movedim(1, 3).flatten(1, 2)[:, :length], state
