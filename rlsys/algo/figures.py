"""Loss metrics of a train step: sums over each micro-batch, and metrics from the sums over micro-batches and ranks.

Most metrics measure the difference between the trainer's and the engine's log-probs, by age of the token.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import LOG_RATIO_LIMIT, Sums
from rlsys.algo.segments import sum_by

AGES = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 2**31))
"""Classes of token age: smallest and largest age in weight versions."""
SHARES = {"clipped": "clip_share", "rejected": "rejected_share"}
"""Name of a sum -> metric that is its share of the counted tokens. A rejected token does not count as clipped."""
MEANS = (
    "kl", "kl_beta", "value_error", "anchor_missing", "entropy_coefficient", "capped_share", "held_share",
    "divergence",
)  # fmt: skip
"""Metrics of loss terms: means over the counted tokens."""


def mismatch_sums(logp: Tensor, batch: Batch, clipped: Tensor, rejected: Tensor) -> Sums:
    """Return sums over the counted tokens of each age class, `[5]` float64, with d = logp - mu and w = exp(d).

    The sums are named mismatch_tokens (number of tokens), mismatch_abs (|d|), mismatch_k3 (w - 1 - d), mismatch_w
    (w), mismatch_w2 (w^2), mismatch_clipped and mismatch_rejected (numbers of such tokens).

    Args:
        logp: log-probs of the current weights, `[T]`.
        batch: the micro-batch.
        clipped: whether a loss term clips the token, `[T]` bool.
        rejected: whether corrections reject the token, `[T]` bool.
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
    """Return sums and histograms of |logp - mu|.

    `mismatch` is the sum over the comparable tokens, and `mismatch_counts` the histogram `[bins]` of its log10 from
    -12 to 2. `mismatch_kept` and `mismatch_kept_counts` are over the comparable tokens of responses that older
    weights started.

    Args:
        logp: log-probs of the weights at the start of the step, `[T]`.
        batch: the micro-batch.
        bins: number of bins of each histogram.
    """
    gaps, alike = (logp.detach() - batch.mu).abs(), comparable(batch)
    sums: Sums = {}
    for name, tokens in (("mismatch", alike), ("mismatch_kept", alike & carried_over(batch))):
        gap = gaps[tokens]
        sums[name] = gap.sum()
        sums[f"{name}_counts"] = torch.histc(gap.clamp(min=1e-12).log10(), bins, -12, 2)
    return sums


def comparable(batch: Batch) -> Tensor:
    """Return the mask of the tokens whose engine and trainer log-probs are comparable, `[T]` bool.

    The weights at the start of the step sampled such a token, from the prompt that it is trained on.
    """
    tokens = batch.keep & (batch.versions == batch.version)
    return tokens if batch.transferred is None else tokens & ~batch.transferred


def carried_over(batch: Batch) -> Tensor:
    """Return the mask of the tokens of responses that older weights started, `[T]` bool.

    With router.interruption = in_place, the engine predicts the later tokens of such a response from the KV cache of
    the older weights.
    """
    older = (batch.versions >= 0) & (batch.versions < batch.version)
    from_older = sum_by(older.long(), batch.ids, batch.sequences) > 0
    return from_older[batch.ids]


def loss_metrics(sums: Sums, needs: Collection[str]) -> dict[str, float]:
    """Convert sums over micro-batches, ranks and updates into a step's metrics.

    `active_share` is the share of the tokens with an advantage that are neither clipped nor rejected. `policy_kl` is
    KL(previous version || weights at the update), estimated by k3 over the tokens that the previous version sampled.
    If there are none, it is estimated over the tokens of the current version; it is then 0 at the first update of a
    step.

    Args:
        sums: sums that the objective returned.
        needs: `Requirements.needs` of the objective.
    """
    tokens = max(float(sums["tokens"]), 1.0)
    metrics = dict.fromkeys(SHARES.values(), 0.0) | mismatch_metrics(sums)
    active, without_gradient = float(sums["active"]), float(sums["active_lost"])
    metrics["active_share"] = 1 - without_gradient / active if active else 1.0
    metrics["weight_mean"] = float(sums["weight"]) / tokens
    metrics |= {name: float(sums[name]) / tokens for name in MEANS if name in sums}
    if "entropy" in needs:
        metrics["entropy"] = float(sums["entropy"]) / tokens
    movement = metrics.get("drift_k3_age1", metrics.get("drift_k3_age0"))
    return metrics if movement is None else metrics | {"policy_kl": movement}


def mismatch_metrics(sums: Sums) -> dict[str, float]:
    """Return mean |d|, mean k3, effective sample size per token, and the shares of clipped and rejected tokens.

    Each metric is over all counted tokens and, with suffix `_ageN`, over each age class that has tokens.
    """
    metrics: dict[str, float] = {}
    tokens = sums["mismatch_tokens"]
    age_classes = [("", slice(None)), *((f"_age{low}", slice(i, i + 1)) for i, (low, _) in enumerate(AGES))]
    for name, age_slice in age_classes:
        n = float(tokens[age_slice].sum())
        if n:
            w, w2 = float(sums["mismatch_w"][age_slice].sum()), float(sums["mismatch_w2"][age_slice].sum())
            metrics[f"drift_mean{name}"] = float(sums["mismatch_abs"][age_slice].sum()) / n
            metrics[f"drift_k3{name}"] = float(sums["mismatch_k3"][age_slice].sum()) / n
            metrics[f"drift_ess{name}"] = w * w / w2 / n
            for name_of_sum, share in SHARES.items():
                metrics[f"{share}{name}"] = float(sums[f"mismatch_{name_of_sum}"][age_slice].sum()) / n
    return metrics
