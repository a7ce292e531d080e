"""Loss metrics of a train step: sums of each micro-batch, which ranks add, and metrics of the sums.

Most measure the distance between the trainer's and the engine's log-probs and its effects, by the age of the token.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import LOG_RATIO_LIMIT, Sums
from rlsys.algo.segments import sum_by

AGES = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 2**31))
"""Classes of token age in weight versions, both bounds included."""
SHARES = {"clipped": "clip_share", "rejected": "rejected_share"}
"""Sum -> metric: a share of the trained tokens. A rejected token is not counted as clipped."""
MEANS = (
    "kl", "kl_beta", "value_error", "anchor_missing", "entropy_coefficient", "capped_share", "held_share",
    "divergence",
)  # fmt: skip
"""Figures of loss terms whose mean over the trained tokens is a metric."""


def mismatch_sums(logp: Tensor, batch: Batch, clipped: Tensor, rejected: Tensor) -> Sums:
    """Sum per age class `[5]` over counted tokens: their number, |d|, k3, w, w^2, and clipped and rejected tokens.

    d = logp - mu and w = exp(d). `clipped`, `rejected` `[T]` bool. float64.
    """
    gap = batch.masked(logp.detach() - batch.mu).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    age = batch.version - batch.versions
    classes = torch.stack(
        [batch.counted_tokens & (age >= low) & (age <= high) for low, high in AGES]
    ).double()
    weight = gap.exp()
    fields = {
        "tokens": torch.ones_like(gap),
        "abs": gap.abs(),
        "k3": weight - 1 - gap,
        "w": weight,
        "w2": weight**2,
        "clipped": clipped.double(),
        "rejected": rejected.double(),
    }
    return {f"mismatch_{name}": classes @ value for name, value in fields.items()}


def engine_gaps(logp: Tensor, batch: Batch, bins: int) -> Sums:
    """Sum |logp - mu| over comparable tokens, and over those in responses that older weights started.

    The sums are `mismatch` and `mismatch_kept`.

    The entries `_counts` are histograms with `bins` bins of log10 from -12 to 2. logp `[T]`: of the weights at the
    start of the step.
    """
    gaps, alike = (logp.detach() - batch.mu).abs(), comparable(batch)
    sums: Sums = {}
    for name, tokens in (("mismatch", alike), ("mismatch_kept", alike & carried_over(batch))):
        gap = gaps[tokens]
        sums[name] = gap.sum()
        sums[f"{name}_counts"] = torch.histc(gap.clamp(min=1e-12).log10(), bins, -12, 2)
    return sums


def comparable(batch: Batch) -> Tensor:
    """`[T]` bool: trained tokens that the weights at the start of the step sampled for this prompt."""
    tokens = batch.keep & (batch.versions == batch.version)
    return tokens if batch.transferred is None else tokens & ~batch.transferred


def carried_over(batch: Batch) -> Tensor:
    """`[T]` bool: tokens of responses that older weights started.

    With router.interruption = in_place the remaining tokens were predicted from the older weights' keys and values,
    else from those of the current weights.
    """
    older = (batch.versions >= 0) & (batch.versions < batch.version)
    from_older = sum_by(older.long(), batch.ids, batch.sequences) > 0
    return from_older[batch.ids]


def loss_metrics(sums: Sums, needs: Collection[str]) -> dict[str, float]:
    """Convert sums over micro-batches, ranks and updates into a step's metrics. needs: of rlsys.algo.asks.

    active_share: share of the tokens with an advantage that neither clip nor rejection removes. policy_kl: KL(version
    before || weights at the update), k3 over the tokens which that version sampled; without such tokens, the movement
    within the step, over those of the current version (0 at its first update).
    """
    tokens = max(float(sums["tokens"]), 1.0)
    out = dict.fromkeys(SHARES.values(), 0.0) | mismatch_metrics(sums)
    active, without_gradient = float(sums["active"]), float(sums["active_lost"])
    out["active_share"] = 1 - without_gradient / active if active else 1.0
    out["weight_mean"] = float(sums["weight"]) / tokens
    out |= {name: float(sums[name]) / tokens for name in MEANS if name in sums}
    if "entropy" in needs:
        out["entropy"] = float(sums["entropy"]) / tokens
    movement = out.get("drift_k3_age1", out.get("drift_k3_age0"))
    return out if movement is None else out | {"policy_kl": movement}


def mismatch_metrics(sums: Sums) -> dict[str, float]:
    """Compute mean |d|, k3, the effective share of tokens, and the shares of clipped and rejected tokens.

    They are given over all tokens and per age class with tokens.
    """
    out: dict[str, float] = {}
    tokens = sums["mismatch_tokens"]
    picks = [("", slice(None)), *((f"_age{low}", slice(i, i + 1)) for i, (low, _) in enumerate(AGES))]
    for name, pick in picks:
        n = float(tokens[pick].sum())
        if n:
            w, w2 = float(sums["mismatch_w"][pick].sum()), float(sums["mismatch_w2"][pick].sum())
            out[f"drift_mean{name}"] = float(sums["mismatch_abs"][pick].sum()) / n
            out[f"drift_k3{name}"] = float(sums["mismatch_k3"][pick].sum()) / n
            out[f"drift_ess{name}"] = w * w / w2 / n
            for name_of_sum, share in SHARES.items():
                out[f"{share}{name}"] = float(sums[f"mismatch_{name_of_sum}"][pick].sum()) / n
    return out
