"""The same numbers as TRL and verl on random inputs, where they compute the same thing; differences in the names.

Neither library is a dependency: `make test` puts them, and what they import, into a folder that nothing else sees
(launch/bootstrap.py --parity).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.bootstrap import PARITY_STAMP
from rlsys.algo import build
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.objective import Objective
from rlsys.config.algo import AlgoSection
from tests.helpers import parity
from tests.helpers.algo_world import DOUBLE

pytestmark = [
    pytest.mark.gate,  # only `make test` installs them
    pytest.mark.skipif(not PARITY_STAMP.is_file(), reason="TRL and verl: launch/bootstrap.py --parity"),
]

LENGTHS = [1, 7, 4, 9, 3, 2, 8, 5]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
B, L = len(LENGTHS), max(LENGTHS)


@pytest.fixture(scope="module")
def libraries() -> Iterator[SimpleNamespace]:
    """Their modules."""
    with parity.importable():
        from trl.rewards import get_soft_overlong_punishment
        from trl.trainer.grpo_trainer import GRPOTrainer
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig

        yield SimpleNamespace(
            trl=GRPOTrainer,
            overlong=get_soft_overlong_punishment,
            verl=core_algos,
            corrections=rollout_corr_helper,
            actor=ActorConfig,
        )


class Padded:
    """Random `[B, L]` log-probs, rewards and values; `pack` gives them to rlsys."""

    def __init__(self, spread: float = 0.5) -> None:
        g = torch.Generator().manual_seed(0)
        self.mask = (torch.arange(L)[None] < torch.tensor(LENGTHS)[:, None]).to(DOUBLE)
        self.old = -torch.rand(B, L, generator=g, dtype=DOUBLE)
        self.mu = self.old + spread * torch.randn(B, L, generator=g, dtype=DOUBLE)
        self.logp = self.old + spread * torch.randn(B, L, generator=g, dtype=DOUBLE)
        self.ref = self.old + 0.2 * torch.randn(B, L, generator=g, dtype=DOUBLE)
        self.values = torch.randn(B, L, generator=g, dtype=DOUBLE)
        self.rewards = torch.rand(B, 2, generator=g, dtype=DOUBLE)
        self.token_rewards = torch.zeros(B, L, dtype=DOUBLE)
        self.token_rewards[torch.arange(B), torch.tensor(LENGTHS) - 1] = self.rewards[:, 0]
        self.current, self.entropy = self.old, self.values.abs()
        self.truncated = torch.zeros(B, dtype=torch.bool)

    def flat(self, padded: Tensor) -> Tensor:
        return padded[self.mask > 0]

    def samples(self, rewards: Tensor | None = None) -> Samples:
        rewards = self.rewards[:, 0] if rewards is None else rewards
        return Samples(
            rewards=rewards, group_ids=torch.tensor(GROUPS), lengths=torch.tensor(LENGTHS), truncated=self.truncated
        )  # fmt: skip

    def batch(self) -> Batch:
        total = sum(LENGTHS)
        names = ("mu", "old", "current", "ref", "values", "entropy")
        fields = {name: self.flat(getattr(self, name)) for name in names}
        return Batch(
            tokens=torch.zeros(total, dtype=torch.long), cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0),
            rows=torch.arange(B), mask=torch.ones(total, dtype=DOUBLE), versions=torch.zeros(total).long(),
            **fields,
        )  # fmt: skip

    def advantages(self, name: str, rewards: Tensor | None = None, **params: Any) -> Tensor:
        """rlsys's advantages of the trained tokens."""
        objective = Objective(section(advantage={"name": name, **params}, loss=["clip", "kl"]))
        plan, batch = objective.plan(self.samples(rewards)), self.batch()
        objective.finish(plan, [batch])
        return batch.signal("advantages")

    def loss(
        self, advantages: Tensor, reducer: Any, entropy: Tensor | None = None, **fields: Any
    ) -> tuple[Tensor, Tensor]:
        """rlsys's loss with the advantages `[B]` given, and its gradient `[T]`."""
        objective = Objective(section(reducer=reducer, **{"anchor": "old", **fields}))
        plan, batch = objective.plan(self.samples()), self.batch()
        plan.rows = list(range(B))
        objective.finish(plan, [batch])
        batch.advantages = batch.expand(advantages)
        objective.prepare([batch])
        leaf = self.flat(self.logp).clone().requires_grad_()
        total = objective(leaf, batch, entropy)[0] / plan.denominator
        total.backward()
        assert leaf.grad is not None
        return total.detach(), leaf.grad


def section(**fields: Any) -> AlgoSection:
    return AlgoSection.model_validate(fields)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), atol=1e-6, rtol=1e-6)


DUAL = {"name": "dual_clip", "dual": 1.5}
WIDE_GSPO = {"name": "gspo", "clip_low": 0.2, "clip_high": 0.28}
OPSM = {"name": "opsm", "delta": 0.1}
TOKEN_MEAN, SEQUENCE_MEAN = "token_mean", "sequence_mean"


@pytest.mark.parametrize(
    "name",
    ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "grpo_passk", "gpg"],
)
def test_verl_advantages(libraries: SimpleNamespace, name: str) -> None:
    data, verl, index = Padded(), libraries.verl, torch.tensor(GROUPS).numpy()
    args = (data.token_rewards.clone(), data.mask)
    verl_advantages = {
        "grpo": lambda: verl.compute_grpo_outcome_advantage(*args, index),
        "dr_grpo": lambda: verl.compute_grpo_outcome_advantage(*args, index, norm_adv_by_std_in_grpo=False),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(*args, index),
        "reinforce_pp": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
            *args, SimpleNamespace(gamma=1.0)
        ),
        "reinforce_pp_baseline": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            *args, index
        ),
        "opo": lambda: verl.compute_opo_outcome_advantage(*args, index),
        "grpo_passk": lambda: verl.compute_grpo_passk_outcome_advantage(*args, index, config={}),
        "gpg": lambda: verl.compute_gpg_outcome_advantage(*args, index),
    }[name]()[0]
    params: dict[str, object] = {"eps": 0.0} if name.startswith("reinforce") else {}
    params |= {"counts": "rewarded"} if name == "gpg" else {}
    close(data.advantages(name, **params), data.flat(verl_advantages))


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "importance weights"])
def test_verl_optimal_token_baseline(libraries: SimpleNamespace, weighed: bool) -> None:
    data, cap = Padded(), 1.5
    squares = data.values.abs().clamp(max=1)
    verl_advantages, _ = libraries.verl.compute_optimal_token_baseline_advantage(
        data.token_rewards, data.mask, torch.tensor(GROUPS).numpy(), data.old, squares,
        rollout_is_weights=(data.old - data.mu).exp().clamp(max=cap) if weighed else None,
    )  # fmt: skip
    method = build("advantage", "optimal_token_baseline", cap=cap if weighed else None)
    samples, batch = data.samples(), data.batch()
    batch.sum_pi_squared = data.flat(squares)
    (advantages,) = method.per_token(method(samples), samples, [batch], lambda total: total)
    close(advantages, data.flat(verl_advantages))


def test_trl_sync_of_the_reference(libraries: SimpleNamespace) -> None:
    from trl.trainer.callbacks import SyncRefModelCallback

    policy, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    hook = build("hook", "sync_ref", interval=1, alpha=0.6)
    hook.start(reference.named_parameters())
    for _ in range(3):
        with torch.no_grad():
            policy.weight.add_(0.5)
        SyncRefModelCallback._sync_target_model(policy, reference, 0.6)
        hook.after_version(policy.named_parameters(), 1.0)
    for name, parameter in reference.named_parameters():
        close(hook.reference()[name], parameter.detach())


def test_trl_scale_rewards_batch(libraries: SimpleNamespace) -> None:
    """Its formula with its own deviation: it stands inside a method that also generates."""
    from trl.trainer.grpo_trainer import nanstd

    data = Padded()
    rewards, mean = data.rewards[:, 0], data.rewards[:, 0].view(2, 4).mean(1).repeat_interleave(4)
    trl_advantages = (rewards - mean) / (nanstd(rewards) + 1e-4)
    close(data.advantages("lite_ppo"), data.flat(trl_advantages[:, None].expand(B, L)))


def test_verl_gae_and_returns(libraries: SimpleNamespace) -> None:
    data = Padded()
    verl_advantages, returns = libraries.verl.compute_gae_advantage_return(
        data.token_rewards, data.values, data.mask, 0.99, 0.9
    )
    objective = Objective(
        section(advantage={"name": "gae", "gamma": 0.99, "lam": 0.9}, loss=["clip", "value"])
    )
    plan, batch = objective.plan(data.samples()), data.batch()
    objective.finish(plan, [batch])
    close(batch.signal("advantages"), data.flat(verl_advantages))
    close(batch.signal("returns"), data.flat(returns))


def test_verl_gdpo_but_verl_whitens_over_tokens_and_we_over_samples(libraries: SimpleNamespace) -> None:
    """Before the whitening both are the same: compared up to the one shift and scale that whitening is."""
    data, index = Padded(), torch.tensor(GROUPS).numpy()
    verl_advantages = sum(
        libraries.verl.compute_grpo_outcome_advantage(
            data.rewards[:, k : k + 1].clone(), torch.ones(B, 1), index
        )[0]
        for k in range(2)
    )
    advantages = data.advantages("gdpo", data.rewards)
    first = torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    expected = verl_advantages[:, 0] / verl_advantages[:, 0].std()
    close(advantages[first], expected - expected.mean())


def actor(libraries: SimpleNamespace, **fields: Any) -> Any:
    config = libraries.actor.__new__(libraries.actor)
    values = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 1e9,
        **fields,
    }
    for name, value in {"global_batch_info": {}, "tau_pos": 1.0, "tau_neg": 1.05, **values}.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize(
    ("theirs", "mode", "ours", "fields"),
    [
        ("vanilla", "token-mean", {"loss": [{"name": "clip"}], "reducer": TOKEN_MEAN}, {}),
        ("vanilla", "seq-mean-token-mean", {"loss": ["clip"], "reducer": SEQUENCE_MEAN}, {}),
        ("vanilla", "seq-mean-token-sum-norm", {"loss": ["clip"], "reducer": {"name": "constant", "length": L}}, {}),
        ("vanilla", "token-mean", {"loss": [DUAL], "reducer": TOKEN_MEAN}, {"clip_ratio_c": 1.5}),
        ("gspo", "seq-mean-token-mean", {"loss": [WIDE_GSPO], "reducer": SEQUENCE_MEAN}, {}),
        ("sapo", "seq-mean-token-mean", {"loss": ["sapo"], "reducer": SEQUENCE_MEAN}, {}),
        ("cispo", "token-mean", {"loss": [{"name": "cispo", "clip_low": 0.2}], "reducer": TOKEN_MEAN}, {}),
    ],
    ids=["clip token mean", "clip sequence mean", "clip constant", "dual clip", "gspo", "sapo", "cispo"],
)  # fmt: skip
def test_verl_losses_and_gradients(
    libraries: SimpleNamespace, theirs: str, mode: str, ours: dict[str, Any], fields: dict[str, Any]
) -> None:
    data, config = Padded(), actor(libraries, **fields)
    advantages = torch.linspace(-2, 2, B, dtype=DOUBLE)
    leaf = data.logp.clone().requires_grad_()
    function = getattr(libraries.verl, f"compute_policy_loss_{theirs}")
    expected, _ = function(data.old, leaf, advantages[:, None].expand(B, L), data.mask, mode, config)
    expected.backward()
    loss, gradient = data.loss(advantages, **ours)
    close(loss, expected.detach())
    close(gradient, data.flat(leaf.grad))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalise", [False, True])
def test_verl_tis_but_verl_normalises_sequences_and_we_tokens(
    libraries: SimpleNamespace, level: str, normalise: bool
) -> None:
    data = Padded()
    data.logp = data.old  # a step's first update: `reinforce` has its corrections follow logp
    ratio = data.old - data.mu
    weights, _ = libraries.corrections.compute_rollout_correction_weights(ratio, data.mask, level, 2.0, False)
    if normalise:  # their token rule, at both levels
        weights = weights / ((weights * data.mask).sum() / data.mask.sum())
    advantages = torch.linspace(-2, 2, B, dtype=DOUBLE)
    correction = {"name": "tis", "level": level, "cap": 2.0, "normalise": normalise}
    _, gradient = data.loss(advantages, TOKEN_MEAN, loss=["reinforce"], corrections=[correction])
    close(gradient, data.flat(-weights * advantages[:, None]) / sum(LENGTHS))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_icepop(libraries: SimpleNamespace, level: str) -> None:
    data = Padded()
    data.logp = data.old  # a step's first update: `reinforce` has its corrections follow logp
    weights, _ = libraries.corrections.compute_rollout_correction_weights(
        data.old - data.mu, data.mask, level, "0.7_1.5"
    )
    keep_mask = data.flat(weights) > 0
    assert keep_mask.any() and not keep_mask.all()
    advantages = torch.ones(B, dtype=DOUBLE)
    correction = {"name": "icepop", "low": 0.7, "high": 1.5, "level": level}
    _, gradient = data.loss(advantages, TOKEN_MEAN, loss=["reinforce"], corrections=[correction])
    close(gradient, data.flat(-weights) / sum(LENGTHS))


@pytest.mark.parametrize(
    ("level", "theirs"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_verl_rejection_but_verl_bounds_the_inverse_ratio(
    libraries: SimpleNamespace, level: str, theirs: str
) -> None:
    """Masked importance sampling without weights, geometric included: their k1 is mu - old."""
    data = Padded()
    data.logp = data.old  # a step's first update: `reinforce` has its corrections follow logp
    mask, _ = libraries.corrections.compute_rollout_rejection_mask(
        data.old - data.mu, data.mask, theirs, "0.8_1.25"
    )
    keep_mask = data.flat(mask)
    assert 0 < keep_mask.sum() < len(keep_mask)
    correction = {"name": "icepop", "low": 1 / 1.25, "high": 1 / 0.8, "level": level, "weighted": False}
    advantages = torch.ones(B, dtype=DOUBLE)
    _, gradient = data.loss(advantages, TOKEN_MEAN, loss=["reinforce"], corrections=[correction])
    close(gradient, -keep_mask / sum(LENGTHS))


@pytest.mark.parametrize(("above", "threshold"), [("clamp", "1.5"), ("mask", "1e-9_1.5")])
def test_verl_decoupled_ppo(libraries: SimpleNamespace, above: str, threshold: str) -> None:
    """Their three policies: clip around old, weighted by old / mu, clamped or rejected above the cap."""
    data, config = Padded(), actor(libraries)
    advantages = torch.linspace(-2, 2, B, dtype=DOUBLE)
    weights, _ = libraries.corrections.compute_rollout_correction_weights(
        data.old - data.mu, data.mask, "token", threshold
    )
    leaf = data.logp.clone().requires_grad_()
    expected, _ = libraries.verl.compute_policy_loss_vanilla(
        data.old, leaf, advantages[:, None].expand(B, L), data.mask, "token-mean", config, weights
    )
    expected.backward()
    correction = {"name": "decoupled_ppo", "cap": 1.5, "above": above}
    loss, gradient = data.loss(advantages, TOKEN_MEAN, loss=["clip"], corrections=[correction])
    close(loss, expected.detach())
    close(gradient, data.flat(leaf.grad))


def test_trl_overlong_punishment(libraries: SimpleNamespace) -> None:
    """Up to the cap, which no response of ours exceeds."""
    data = Padded()
    trl_penalties = libraries.overlong(9, 4)(completion_ids=[[1] * n for n in LENGTHS])
    shaped_rewards = build("shaping", "overlong", cap=9, buffer=4)(data.samples())
    close(shaped_rewards - data.rewards[:, 0], torch.tensor(trl_penalties))
    assert min(trl_penalties) == -1 and len(set(trl_penalties)) > 3


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_verl_kl_estimates_within_their_clamp_of_ten(libraries: SimpleNamespace, kind: str) -> None:
    from rlsys.algo.kl import kl_estimate

    data = Padded()
    verl_kl = libraries.verl.kl_penalty_forward(
        data.logp, data.ref, {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}[kind]
    )
    close(kl_estimate(data.logp, data.ref, kind), verl_kl)


@pytest.mark.parametrize(("gradient", "theirs"), [("estimate", "k3"), ("k2", "k3+")])
def test_verl_kl_with_its_clamp_and_straight_through(
    libraries: SimpleNamespace, gradient: str, theirs: str
) -> None:
    """Some tokens are so far from the reference that k3 is cut at 10."""
    data = Padded()
    data.ref = data.ref + 4 * (data.mu - data.old)
    leaf = data.logp.clone().requires_grad_()
    penalty = libraries.verl.kl_penalty(leaf, data.ref, theirs)
    assert (data.flat(penalty.detach()) == 10).any()
    (penalty * data.mask).sum().backward()
    kl = {"name": "kl", "beta": 1.0, "gradient": gradient}
    loss, loss_gradient = data.loss(torch.zeros(B, dtype=DOUBLE), TOKEN_MEAN, loss=["clip", kl])
    close(loss, (penalty * data.mask).sum().detach() / sum(LENGTHS))
    close(loss_gradient, data.flat(leaf.grad) / sum(LENGTHS))


def test_verl_adaptive_kl_of_one_sample_an_update(libraries: SimpleNamespace) -> None:
    controller = libraries.verl.AdaptiveKLController(0.01, 0.1, 50.0)
    term = build("loss", "adaptive_kl", beta=0.01, target=0.1, horizon=50.0)
    for kl in (0.3, 0.105, 0.01, 0.2):
        controller.update(kl, n_steps=1)
        term.observe({"kl": kl})
        assert term.weight() == pytest.approx(controller.value, rel=1e-12)


def test_verl_value_loss(libraries: SimpleNamespace) -> None:
    from rlsys.algo.losses import View

    data, batch = Padded(), Padded().batch()
    returns, new = data.values + 0.5 * data.ref, data.values + data.logp
    expected, _ = libraries.verl.compute_value_loss(new, returns, data.values, data.mask, 0.2)
    batch.returns = data.flat(returns)
    loss = build("loss", "value", coefficient=1.0)(
        View(batch, batch.mu, batch.mu, values=data.flat(new)), None
    )[0]
    close(loss.mean(), expected)


def trl_loss(
    libraries: SimpleNamespace,
    data: Padded,
    advantages: Tensor,
    entropy: Tensor | None = None,
    *,
    args: dict[str, Any] | None = None,
    inputs: dict[str, Tensor] | None = None,
    keep: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Tensor, Tensor]:
    """GRPOTrainer._compute_loss on given log-probs: only what it asks of `self` is there. Its attributes that `keep`
    names are in there afterwards."""
    leaf = data.logp.clone().requires_grad_()
    entropy = torch.zeros_like(leaf) if entropy is None else entropy
    quiet = SimpleNamespace(
        gather=lambda t: t, num_processes=1, sync_gradients=True, gather_for_metrics=lambda t: t,
        reduce=lambda t, reduction: t,
    )  # fmt: skip
    trl_args = {
        "use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1, **(args or {}),
    }  # fmt: skip
    this = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
        args=SimpleNamespace(**trl_args),
        importance_sampling_level="token", loss_type="grpo", epsilon_low=0.2, epsilon_high=0.28, use_vllm=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=L,
        accelerator=quiet, _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=libraries.trl.get_off_policy_mask, vllm_importance_sampling_correction=False,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(this, name, value)
    trl_inputs = {
        "prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": torch.zeros(B, L),
        "completion_mask": data.mask, "advantages": advantages, "old_per_token_logps": data.old,
        "ref_per_token_logps": data.ref, "sampling_per_token_logps": data.mu, "num_items_in_batch": data.mask.sum(),
        **(inputs or {}),
    }  # fmt: skip
    loss = libraries.trl._compute_loss(this, None, trl_inputs)
    loss.backward()
    if keep is not None:
        keep |= {name: getattr(this, name) for name in keep}
    assert leaf.grad is not None
    return loss.detach(), data.flat(leaf.grad)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "grpo"}, {"loss": ["clip"], "reducer": SEQUENCE_MEAN}),
        ({"loss_type": "dapo"}, {"loss": ["clip"], "reducer": TOKEN_MEAN}),
        ({"loss_type": "dr_grpo"}, {"loss": ["clip"], "reducer": {"name": "constant", "length": L}}),
        ({"loss_type": "sapo"}, {"loss": ["sapo"], "reducer": SEQUENCE_MEAN}),
        ({"loss_type": "cispo", "epsilon_high": 1.28}, {"loss": ["cispo"], "reducer": TOKEN_MEAN}),
        ({"beta": 0.1}, {"loss": ["clip", {"name": "kl", "beta": 0.1}], "reducer": SEQUENCE_MEAN}),
        ({"off_policy_mask_threshold": 0.1}, {"loss": ["clip"], "corrections": [OPSM], "reducer": SEQUENCE_MEAN}),
    ],
    ids=["grpo", "dapo", "dr_grpo", "sapo", "cispo whose epsilon is 1 + ours", "kl", "opsm"],
)  # fmt: skip
def test_trl_losses_and_gradients(
    libraries: SimpleNamespace, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    data, advantages = Padded(), torch.linspace(-2, 2, B, dtype=DOUBLE)
    expected, expected_gradient = trl_loss(libraries, data, advantages, **theirs)
    loss, gradient = data.loss(advantages, **ours)
    close(loss, expected)
    close(gradient, expected_gradient)


def test_trl_entropy_bonus_but_trl_takes_its_mean_over_tokens_whatever_the_reducer(
    libraries: SimpleNamespace,
) -> None:
    data, advantages = Padded(), torch.linspace(-2, 2, B, dtype=DOUBLE)
    trl_entropy, entropy = data.values.abs().requires_grad_(), data.flat(data.values.abs()).requires_grad_()
    expected, expected_gradient = trl_loss(
        libraries, data, advantages, trl_entropy,
        loss_type="dapo", _entropy_bonus_enabled=True, use_adaptive_entropy=False, entropy_coef=0.3,
    )  # fmt: skip
    terms = ["clip", {"name": "entropy", "coefficient": 0.3}]
    loss, gradient = data.loss(advantages, TOKEN_MEAN, entropy, loss=terms)
    close(loss, expected)
    close(gradient, expected_gradient)
    assert trl_entropy.grad is not None and entropy.grad is not None
    close(entropy.grad, data.flat(trl_entropy.grad))


def test_trl_bias_corrected_kl_but_trl_takes_the_ratio_to_its_old_policy(libraries: SimpleNamespace) -> None:
    """The same where old is mu."""
    data, advantages = Padded(), torch.linspace(-2, 2, B, dtype=DOUBLE)
    data.mu = data.old
    expected = trl_loss(libraries, data, advantages, beta=0.1, args={"use_bias_correction_kl": True})
    kl = {"name": "kl", "beta": 0.1, "gradient": "ratio"}
    result = data.loss(advantages, SEQUENCE_MEAN, loss=["clip", kl], anchor="mu")
    close(result[0], expected[0])
    close(result[1], expected[1])


def test_trl_adaptive_entropy_but_trl_has_no_bonus_before_it_has_measured(libraries: SimpleNamespace) -> None:
    """Its state after windows of mean entropy near 0.8, 0.4, 0.8 for a target of 0.6."""
    data, term = Padded(), build("loss", "adaptive_entropy", coefficient=0.1, target=0.6, delta=0.03)
    state: dict[str, Any] = {
        "entropy_coef": 0.1,
        "_last_world_entropy": float("inf"),
        "_entropy_window_stats": None,
    }
    args = {
        "entropy_target": 0.6,
        "entropy_coef_delta": 0.03,
        "entropy_coef_max": 1.0,
        "entropy_coef_min": 0.0,
    }
    for step, scale in enumerate((1.0, 0.5, 1.0)):
        entropy = data.values.abs() * scale
        state["_metrics"] = defaultdict(lambda: defaultdict(list))
        trl_bonus = trl_loss(
            libraries, data, torch.zeros(B, dtype=DOUBLE), entropy, loss_type="dapo", args=args, keep=state,
            _entropy_bonus_enabled=True, use_adaptive_entropy=True, **state,
        )[0]  # fmt: skip
        mean = float(data.flat(entropy).mean())
        if step:
            close(trl_bonus, torch.tensor(-term.weight() * mean))
        term.observe({"entropy": mean})
        assert term.state_dict() == pytest.approx(
            {"coefficient": state["entropy_coef"], "entropy": state["_last_world_entropy"]}
        )


def test_trl_sequence_level_matches_gspo_under_the_sequence_mean(libraries: SimpleNamespace) -> None:
    """TRL differentiates the mean of the log-ratios, we each token's own: with the sequence mean they agree."""
    data, advantages = Padded(0.05), torch.linspace(-2, 2, B, dtype=DOUBLE)
    expected = trl_loss(libraries, data, advantages, importance_sampling_level="sequence")
    result = data.loss(advantages, SEQUENCE_MEAN, loss=[WIDE_GSPO])
    close(result[0], expected[0])
    close(result[1], expected[1])
