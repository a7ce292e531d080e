"""Hook into SGLang's sampler: a seeded sample does not depend on the other requests of its batch.

Symptom: one greedy, `top_k` or `top_p` request in a batch changes the tokens of all other seeded samples, until the
batch is empty. One with `min_p` ends the engine in an assertion.

Cause: SGLang's deterministic inference adds noise to each log-probability, computed from the seed, the position and
the column. The column is the token id if every request of the batch draws from the whole vocabulary, and otherwise
the rank by probability.

With this hook the column is always the token id: truncation sets the probability of the dropped ids to 0 without
moving them. A request that draws from the whole vocabulary gets exactly the results of SGLang's own path for such
batches.

Delete this when SGLang draws by token id (github.com/sgl-project/sglang/pull/35697); seen in 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TARGET = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
_FIXED_POINT_ONE = 2**40
"""Probability 1 in fixed point. Sums of integers are exact, so they do not depend on the order of summation."""


def draw_by_token_id(
    upstream: Callable[..., Any],
    sampler: Any,
    probs: Tensor,
    info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> Any:
    """Draw one token for each row of `probs`. This function wraps SGLang's own one.

    Args:
        upstream: SGLang's function.
        sampler: SGLang's sampler.
        probs: Probabilities of the next token, `[rows, vocabulary]`.
        info: SGLang's SamplingBatchInfo of the rows; `sampling_seed` is None on an engine that is not deterministic.
        positions: Positions of the tokens in their sequences, `[rows]`.
        simple_sampling_case: Whether every row draws from the whole vocabulary.

    Returns:
        Token ids `[rows]` int32, and the sampling masks of the rows with `return_sampling_mask`.
    """
    if info.sampling_seed is None or simple_sampling_case:
        return upstream(sampler, probs, info, positions, simple_sampling_case)
    from sglang.srt.layers import sampler as sglang_sampler

    truncated = truncate(probs, info.top_ks, info.top_ps, info.min_ps)
    columns = sglang_sampler.multinomial_with_seed(torch.log(truncated), info.sampling_seed, positions)
    rows = info.sampling_mask_batch_indices
    capture = None
    if rows is not None:
        weights = truncated.index_select(0, rows)
        capture = sglang_sampler._SamplingMaskCapture(
            weights=weights,
            token_ids=None,
            selected_weight=weights.gather(1, columns.index_select(0, rows)).squeeze(1),
            batch_rows=rows,
        )
    return columns.view(-1).to(torch.int32), capture


def truncate(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Set the probabilities of dropped ids to 0, without renormalisation.

    Ids are ranked by probability, equal ones by id. An id is kept if

    - its rank, from 0, is below `top_k`;
    - the probability mass of all ids before it is at most `top_p`;
    - its probability is at least `min_p` times the largest one.

    A row of the result depends only on the same row of the arguments.

    Args:
        probs: `[rows, vocabulary]`.
        top_ks: `[rows]`.
        top_ps: `[rows]`.
        min_ps: `[rows]`.

    Returns:
        `[rows, vocabulary]`, by token id.
    """
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    parts = (values.double() * _FIXED_POINT_ONE).long()
    preceding_mass = parts.cumsum(-1) - parts
    dropped = ranks >= top_ks[:, None]
    dropped |= (top_ps < 1)[:, None] & (preceding_mass > (top_ps.double() * _FIXED_POINT_ONE).long()[:, None])
    dropped |= values < values[:, :1] * min_ps[:, None]
    return torch.zeros_like(probs).scatter_(1, ids, values.masked_fill(dropped, 0.0))
