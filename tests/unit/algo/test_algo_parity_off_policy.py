"""Losses for stale samples, rejection and entropy: the same numbers as TRL and verl; differences in the names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.algo.test_algo_parity import (
    DOUBLE,
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    WIDE_GSPO,
    B,
    L,
    Padded,
    actor,
    close,
    libraries,  # noqa: F401 - the fixture
    pytestmark,  # noqa: F401
    trl_loss,
)

COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}

CLIP_COV = {"name": "clip_cov", "share": 1.0, "cov_low": 0.1, "cov_high": 1.5}
GMPO = {"name": "gmpo", "clip_low": 0.3, "clip_high": 0.4}
DPPO_KL = {"name": "dppo", "divergence": "kl"}
CAPPED = {"name": "dppo", "low": 0.9, "high": 0.9, "cap": 1.5}


def bounds(low: float, high: float) -> dict[str, float]:
    return {"low": low, "high": high}


def widths(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


def steep(data: Padded) -> Tensor:
    """Advantages of the samples, `[B]`."""
    return torch.linspace(-2, 2, B, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("theirs", "mode", "ours", "fields"),
    [
        ("dppo_tv", "token-mean", {"loss": [{"name": "dppo", **bounds(0.02, 0.04)}]}, widths(0.02, 0.04)),
        ("dppo_tv", "token-mean", {"loss": [CAPPED]}, {**widths(0.9, 0.9), "clip_ratio_c": 1.5}),
        ("dppo_kl", "token-mean", {"loss": [{**DPPO_KL, **bounds(0.005, 0.01)}]}, widths(0.005, 0.01)),
        ("dro", "seq-mean-token-mean", {"loss": [{"name": "dro", "beta": 0.3}], "reducer": SEQUENCE_MEAN}, {}),
        ("geo_mean", "unused", {"loss": [GMPO], "reducer": SEQUENCE_MEAN}, widths(0.3, 0.4)),
        ("clip_cov", "token-mean", {"loss": [CLIP_COV]}, {}),
        ("kl_cov", "token-mean", {"loss": [{"name": "kl_cov", "share": 0.2, "coefficient": 0.7}]}, {}),
    ],
    ids=["dppo_tv", "dppo_tv capped", "dppo_kl", "dro", "geo_mean", "clip_cov", "kl_cov"],
)  # fmt: skip
def test_verl_losses_for_stale_samples(
    libraries: SimpleNamespace,  # noqa: F811
    theirs: str,
    mode: str,
    ours: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    data = Padded()
    data.old, data.logp = data.old - 2, data.logp - 2  # below 0: dppo takes probabilities
    data.current = data.logp
    policy = SimpleNamespace(**COV, dro_beta=0.3)
    config = actor(libraries, policy_loss=policy, **{"clip_ratio_c": 1e4, **fields})
    advantages = steep(data)
    leaf = data.logp.clone().requires_grad_()
    function = getattr(libraries.verl, f"compute_policy_loss_{theirs}")
    expanded = advantages[:, None].expand(B, L).clone()
    expected, _ = function(data.old, leaf, expanded, data.mask, mode, config)
    expected.backward()
    loss, gradient = data.loss(advantages, **{"reducer": TOKEN_MEAN, **ours})
    assert leaf.grad is not None
    close(loss, expected.detach())
    close(gradient, data.flat(leaf.grad))
    if theirs in ("dppo_tv", "dppo_kl", "geo_mean", "clip_cov") and "cap" not in ours["loss"][0]:
        assert 0 < (gradient == 0).sum() < len(gradient)


@pytest.mark.parametrize(
    ("theirs", "threshold", "ours"),
    [
        ("token_k1", "0.7_1.4", {"kind": "k1", "level": "token", "low": -0.35667494, "high": 0.33647224}),
        ("token_k2", "0.1", {"kind": "k2", "level": "token", "high": 0.1}),
        ("token_k3", "0.1", {"kind": "k3", "level": "token", "high": 0.1}),
        ("seq_sum_k1", "0.5_2", {"kind": "k1", "level": "sequence_sum", "low": -0.6931472, "high": 0.6931472}),
        ("seq_mean_k1", "0.8_1.2", {"kind": "k1", "level": "sequence_mean", "low": -0.22314355, "high": 0.18232156}),
        ("seq_sum_k2", "0.7", {"kind": "k2", "level": "sequence_sum", "high": 0.7}),
        ("seq_mean_k2", "0.1", {"kind": "k2", "level": "sequence_mean", "high": 0.1}),
        ("seq_sum_k3", "0.7", {"kind": "k3", "level": "sequence_sum", "high": 0.7}),
        ("seq_mean_k3", "0.1", {"kind": "k3", "level": "sequence_mean", "high": 0.1}),
        ("seq_max_k2", "0.4", {"kind": "k2", "level": "sequence_max", "high": 0.4}),
        ("seq_max_k3", "0.4", {"kind": "k3", "level": "sequence_max", "high": 0.4}),
    ],
    ids=lambda v: v if isinstance(v, str) and "_k" in v else "",
)  # fmt: skip
def test_verl_rollout_rs(
    libraries: SimpleNamespace,  # noqa: F811
    theirs: str,
    threshold: str,
    ours: dict[str, Any],
) -> None:
    data = Padded()
    mask, _ = libraries.corrections.compute_rollout_rejection_mask(
        data.old - data.mu, data.mask, theirs, threshold
    )
    keep_mask = data.flat(mask)
    assert 0 < keep_mask.sum() < len(keep_mask)
    gradient = data.loss(
        torch.ones(B, dtype=DOUBLE), TOKEN_MEAN, loss=["cispo"], corrections=[{"name": "rejection", **ours}]
    )[1]
    close((gradient != 0).double(), keep_mask)


def test_verl_rollout_rs_in_a_chain(libraries: SimpleNamespace) -> None:  # noqa: F811
    data = Padded()
    mask, _ = libraries.corrections.compute_rollout_rejection_mask(
        data.old - data.mu, data.mask, "token_k2,seq_mean_k3", "0.2,0.15"
    )
    chain = [
        {"name": "rejection", "kind": "k2", "level": "token", "high": 0.2},
        {"name": "rejection", "kind": "k3", "level": "sequence_mean", "high": 0.15},
    ]
    gradient = data.loss(torch.ones(B, dtype=DOUBLE), TOKEN_MEAN, loss=["cispo"], corrections=chain)[1]
    close((gradient != 0).double(), data.flat(mask))


VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def test_trl_vespo(libraries: SimpleNamespace) -> None:  # noqa: F811
    data = Padded()
    weights = libraries.trl.get_gamma_weights
    expected = trl_loss(
        libraries, data, steep(data), loss_type="vespo", args=VESPO, get_gamma_weights=weights
    )
    result = data.loss(steep(data), TOKEN_MEAN, loss=["vespo"])
    close(result[0], expected[0])
    close(result[1], expected[1])


def test_trl_vespo_matches_vespo_with_anchor_mu(libraries: SimpleNamespace) -> None:  # noqa: F811
    data = Padded()
    ratio = (data.old - data.mu).exp().where(data.mask > 0, torch.ones_like(data.mu))
    fields = {"get_gamma_weights": libraries.trl.get_gamma_weights, "args": VESPO}
    expected = trl_loss(
        libraries, data, steep(data), inputs={"importance_sampling_ratio": ratio}, loss_type="vespo", **fields
    )
    result = data.loss(steep(data), TOKEN_MEAN, loss=["vespo"], anchor="mu")
    close(result[0], expected[0])
    close(result[1], expected[1])


def test_trl_luspo(libraries: SimpleNamespace) -> None:  # noqa: F811
    data = Padded(0.05)
    fields = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
    expected = trl_loss(libraries, data, steep(data), **fields)
    result = data.loss(steep(data), SEQUENCE_MEAN, loss=[{**WIDE_GSPO, "name": "luspo"}])
    close(result[0], expected[0])
    close(result[1], expected[1])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.77, 1.0])
def test_trl_top_entropy(libraries: SimpleNamespace, share: float) -> None:  # noqa: F811
    """In the sequence mean, too: the tokens that are left out count in each length."""
    data = Padded()
    entropy = data.values.abs()
    quiet = SimpleNamespace(gather=lambda t: t, pad_across_processes=lambda t, **k: t)

    def mask(entropies: Tensor, of: Tensor, threshold: float) -> Tensor:
        entropy_mask = libraries.trl.get_high_entropy_mask(
            SimpleNamespace(accelerator=quiet), entropies, of, threshold
        )
        assert isinstance(entropy_mask, Tensor)
        return entropy_mask

    fields = {"top_entropy_quantile": share, "get_high_entropy_mask": mask}
    expected = trl_loss(libraries, data, steep(data), entropy, **fields)
    data.entropy = entropy
    result = data.loss(
        steep(data), SEQUENCE_MEAN, loss=["clip"], selectors=[{"name": "top_entropy", "share": share}]
    )
    close(result[0], expected[0])
    close(result[1], expected[1])


@pytest.mark.parametrize(
    ("loss_type", "reducer", "denominator"),
    [
        ("dapo", TOKEN_MEAN, "kept"),
        ("grpo", SEQUENCE_MEAN, "all"),
        ("dr_grpo", {"name": "constant", "length": L}, "all"),
    ],
)  # fmt: skip
def test_trl_mask_truncated_completions(
    libraries: SimpleNamespace,  # noqa: F811
    loss_type: str,
    reducer: Any,
    denominator: str,
) -> None:
    """TRL masks the responses before it counts tokens, but not samples."""
    data, cut = Padded(), torch.tensor([False, True, False, False, False, True, False, False])
    full_mask = data.mask
    data.mask = full_mask * ~cut[:, None]
    expected = trl_loss(libraries, data, steep(data), loss_type=loss_type)
    kept_mask, data.mask = data.mask, full_mask
    data.truncated = cut
    selector = {"name": "overlong_filter", "denominator": denominator}
    result = data.loss(steep(data), reducer, loss=["clip"], selectors=[selector])
    close(result[0], expected[0])
    close(result[1][data.flat(kept_mask) > 0], expected[1])
    assert (result[1][data.flat(kept_mask) == 0] == 0).all()
