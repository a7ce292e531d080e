"""Advantages against numbers worked out by hand, and the properties that hold for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algo import build
from rlsys.algo.advantages import grpo
from rlsys.algo.batch import Samples
from rlsys.algo.methods.gae import gae
from rlsys.algo.reduction import single_rank
from rlsys.algo.registry import TABLE
from rlsys.algo.segments import discounted_suffix_sum, running_min
from rlsys.core.errors import UserError
from tests.helpers.algo_world import DOUBLE, packed, table

close = torch.testing.assert_close


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_rloo_by_hand() -> None:
    """Others' means: (0 + 1)/2, (2 + 1)/2, (2 + 0)/2; a group of one gets 0."""
    close(build("advantage", "rloo")(table([2, 0, 1, 5], [0, 0, 0, 1])), vector(1.5, -1.5, 0, 0))


def test_gdpo_by_hand() -> None:
    """Rewards (1,0),(0,1),(0,0): columns have mean 1/3 and std 1/sqrt 3; sums (1,1,-2)/sqrt 3, of std 1."""
    samples = table([0, 0, 0], [4, 4, 4])
    samples = Samples(
        rewards=torch.tensor([[1, 0], [0, 1], [0, 0]], dtype=DOUBLE),
        group_ids=samples.group_ids,
        lengths=samples.lengths,
    )
    advantages = build("advantage", "gdpo", eps=0.0)(samples)
    close(advantages, vector(1, 1, -2) / math.sqrt(3))


def test_gdpo_separates_rewards_with_equal_sums() -> None:
    """(1, 0) and (0, 1) have one sum, but the second reward is the rarer: it counts for more."""
    rewards = torch.tensor([[1.0, 0], [0, 1], [0, 0], [1, 0]], dtype=DOUBLE)
    samples = Samples(rewards=rewards, group_ids=torch.zeros(4), lengths=torch.ones(4))
    advantages = build("advantage", "gdpo")(samples)
    assert advantages[1] > advantages[0] + 0.1
    grpo = build("advantage", "grpo")(samples)
    assert grpo[0] == grpo[1]


def test_gdpo_weights_must_fit() -> None:
    with pytest.raises(UserError, match=r"algo.advantage.weights = \[1.0\]: expected 2 weights"):
        build("advantage", "gdpo", weights=[1.0])(
            Samples(rewards=torch.zeros(2, 2), group_ids=torch.zeros(2), lengths=torch.ones(2))
        )


def test_gapo_by_hand() -> None:
    """Sorted 0, 1, 1.2, 5: the two neighbours of smallest range are 1, 1.2, so Q = 1.1;
    squares 1.21, 0.01, 0.01, 15.21, sum 16.44, over 3 is 5.48."""
    advantages = build("advantage", "gapo", eps=0.0)(table([5, 0, 1.2, 1], [0] * 4))
    close(advantages, vector(3.9, -1.1, 0.1, -0.1) / math.sqrt(5.48))


def test_gapo_is_not_moved_by_an_outlier() -> None:
    gapo = build("advantage", "gapo", tau=0.5)
    plain, wild = gapo(table([0, 0.9, 1, 1.1, 2], [0] * 5)), gapo(table([0, 0.9, 1, 1.1, 50], [0] * 5))
    assert plain[2] == wild[2] == 0


def test_mc_grpo_by_hand() -> None:
    """0, 1, 2, 4, 9: median 2, distances 2, 1, 0, 2, 7, MAD 2; times 5/4."""
    advantages = build("advantage", "mc_grpo")(table([0, 1, 2, 4, 9], [0] * 5))
    close(advantages, vector(-2, -1, 0, 2, 7) / 3 * 1.25)


def test_mc_grpo_weights_all_binary_reward_groups_equally() -> None:
    """The MAD is 0 in each: a lone success of 5 or of 33 gets its group's size, k of n get n / k. The authors'
    eps gives a thousand times as much."""
    for n, k in ((5, 1), (5, 2), (9, 4), (33, 1)):
        samples = table([1] * k + [0] * (n - k), [0] * n)
        advantages = build("advantage", "mc_grpo")(samples)
        close(advantages, vector(*[n / k] * k, *[0] * (n - k)))
        close(build("advantage", "mc_grpo", eps=1e-3)(samples), 1000 * advantages)


def test_mc_grpo_refuses_even_groups() -> None:
    with pytest.raises(ValueError, match="a group has 4 samples; expected an odd number"):
        build("advantage", "mc_grpo")(table([0, 1, 0, 1], [0] * 4))


def test_xrpo_by_hand() -> None:
    """Rewards 1, 1, 0: GRPO gives 1/sqrt 3, 1/sqrt 3, -2/sqrt 3. Scores -2, -1, -3, mean -2: eta 1, e, 1/e.
    The first gets min(lam (1 - 1), ..) = 0, the second nothing (eta > 1); with score -4 it gets the full bonus."""
    base, none = 1 / math.sqrt(3), torch.zeros(3, dtype=torch.bool)
    xrpo = build("advantage", "xrpo")
    assert (xrpo.lam, xrpo.kappa) == (2.5, 0.5)
    likely = table([1, 1, 0], [0] * 3, log_likelihood=vector(-2, -1, -3), transferred=none)
    close(xrpo(likely), vector(base, base, -2 * base), atol=1e-5, rtol=0)
    rare = table([1, 1, 0], [0] * 3, log_likelihood=vector(-1, -4, -1), transferred=none)
    close(xrpo(rare), vector(base, 1.5 * base, -2 * base), atol=1e-5, rtol=0)  # 2.5 (1 - e^-2) > kappa A
    little = build("advantage", "xrpo", lam=0.1)(rare)
    close(little[1], vector(base + 0.1 * (1 - math.exp(-2)))[0], atol=1e-5, rtol=0)


def test_xrpo_novelty_excludes_successes_from_seeded_prompts() -> None:
    """The seeded success (-0.1) takes no part: mean of the others -4.2, so that -6 is new and gets its bonus. With it
    in the mean, -3.2, the success at -3.5 would have been new as well."""
    base = grpo(torch.tensor([1, 1, 0, 1.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long))
    seeded = torch.tensor([False, False, False, True])
    samples = table([1, 1, 0, 1], [0] * 4, log_likelihood=vector(-6, -3.5, -3, -0.1), transferred=seeded)
    close(build("advantage", "xrpo")(samples), base * vector(1.5, 1, 1, 1), atol=1e-9, rtol=0)


def test_puzzlecraft_by_hand() -> None:
    """Mean 1/4: A = 3/4, -1/4 ..; 4 d (1 - d) = 3/4; three distinct answers of four: delta = 2/3. As choices of
    K = 8 options: entropy 1.5 bits of 3; one without an answer chose none of them."""
    samples = table([1, 0, 0, 0], [0] * 4, answers=torch.tensor([1, 2, 2, 3]))
    weighed = vector(0.75, -0.25, -0.25, -0.25) * 0.75
    close(build("advantage", "puzzlecraft")(samples), weighed * math.sqrt(2 / 3))
    choices = build("advantage", "puzzlecraft", diversity="entropy", options=8)
    close(choices(samples), weighed * math.sqrt(1.5 / 3))
    some = table([1, 0, 0, 0], [0] * 4, answers=torch.tensor([1, 2, -1, -1]))
    close(choices(some), weighed * math.sqrt(1 / 3))
    for answers in (torch.full((4,), -1), torch.full((4,), 3)):
        close(choices(table([1, 0, 0, 0], [0] * 4, answers=answers)), weighed * 0)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"diversity": "entropy"}, "options = null with diversity = entropy: expected the number of options"),
        ({"options": 4}, "options = 4 with diversity = distinct: expected null"),
    ],
)
def test_puzzlecraft_requires_options_only_for_entropy_diversity(params: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        build("advantage", "puzzlecraft", **params)


def test_outcome_exploration_by_hand() -> None:
    """History: unseen 1 - 1/2; after 16 visits 1/4 - 1/2. Groups of one reward show the bonus alone."""
    method = build("advantage", "outcome_exploration", c=1.0)
    samples = table([1, 1], [0, 0], answers=torch.tensor([7, -1]), prompt_index=torch.tensor([3, 3]))
    close(method(samples), vector(0.5, 0))  # no answer, no bonus
    for _ in range(15):
        method(samples)
    close(method(samples), vector(0.25 - 0.5, 0))
    elsewhere = table([1, 1], [0, 0], answers=torch.tensor([7, 7]), prompt_index=torch.tensor([4, 4]))
    close(method(elsewhere), vector(0.5, 0.5))


def test_outcome_exploration_within_a_batch_and_centred() -> None:
    samples = table([1, 1, 1, 1], [0] * 4, answers=torch.tensor([5, 5, 5, 6]), prompt_index=torch.zeros(4))
    close(
        build("advantage", "outcome_exploration", c=1.0, mode="batch")(samples), vector(-0.5, -0.5, -0.5, 0)
    )
    close(build("advantage", "outcome_exploration", c=1.0, mode="ucb_mean")(samples), vector(0, 0, 0, 0))


def test_outcome_exploration_centres_on_responses_with_an_answer_by_hand() -> None:
    """After 16 visits 1/4, unseen 1: their mean is 5/8. The one without an answer neither gets nor moves anything."""
    method = build("advantage", "outcome_exploration", c=1.0, mode="ucb_mean")
    index = torch.zeros(1, dtype=torch.long)
    for _ in range(16):
        method(table([1], [0], answers=index + 7, prompt_index=index))
    samples = table([1, 1, 1], [0] * 3, answers=torch.tensor([7, 9, -1]), prompt_index=torch.zeros(3).long())
    close(method(samples), vector(-3 / 8, 3 / 8, 0))
    silent = table([1, 1], [0, 0], answers=torch.tensor([-1, -1]), prompt_index=torch.zeros(2).long())
    close(method(silent), vector(0, 0))


def test_minimum_variance_by_hand() -> None:
    """w^2 = 1, 4; |g|^2 ~ 3, 1: b = (3 R1 + 4 R2) / 7 with R = 1, 0; std = 1/sqrt 2."""
    samples = table([1, 0], [0, 0], [3, 1], log_weight=vector(0, math.log(2)))
    advantages = build("advantage", "vcpo", norm="length", eps=0.0)(samples)
    close(advantages, vector(1 - 3 / 7, -3 / 7) * math.sqrt(2))
    equal = table(
        [1, 0], [0, 0], [3, 1], log_weight=vector(700, 700)
    )  # on-policy up to a factor: no overflow
    close(build("advantage", "vcpo", norm="one", eps=0.0)(equal), vector(0.5, -0.5) * math.sqrt(2))


def test_reinforce_pp_whitens_over_tokens_by_hand() -> None:
    """Rewards 1 on one token, 0 on three: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4."""
    method, samples = build("advantage", "reinforce_pp", eps=0.0), table([1, 0], [0, 0], [1, 3])
    (advantages,) = method.per_token(method(samples), samples, [packed([1, 3])], single_rank)
    close(advantages, vector(1.5, -0.5, -0.5, -0.5))


def test_reinforce_pp_subtracts_the_future_kl_from_the_return() -> None:
    """Two tokens with KL 0.1 and 0.3, beta 1, reward 1: 1 - 0.4 and 1 - 0.3; whitened +-1/sqrt 2."""
    method, samples = build("advantage", "reinforce_pp", beta=1.0, eps=0.0), table([1], [0], [2])
    part = packed([2], old=[0.1, 0.3], ref=[0.0, 0.0])
    (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    close(advantages, vector(-1, 1) / math.sqrt(2))


def test_reinforce_pp_baseline_by_hand() -> None:
    """Rewards 3, 1 | 5, 5 less their groups' means: 1, -1, 0, 0 on 1, 2, 1, 1 tokens, mean -1/5, variance
    (1.44 + 2 * 0.64 + 2 * 0.04) / 4 = 0.7."""
    method, samples = build("advantage", "reinforce_pp_baseline", eps=0.0), table([3, 1, 5, 5], [0, 0, 1, 1])
    (advantages,) = method.per_token(method(samples), samples, [packed([1, 2, 1, 1])], single_rank)
    close(advantages, vector(1.2, -0.8, -0.8, 0.2, 0.2) / math.sqrt(0.7))


def test_gae_whitens_by_default_by_hand() -> None:
    """gamma 1, lambda 0.95. V = 1, 2 | 1/2, r = 0, 3 | 0: delta = 1, 1 | -1/2, A = 1.95, 1 | -0.5 of mean 2.45 / 3.
    The critic's targets are those before the whitening."""
    method, samples = build("advantage", "gae"), table([3, 0], [0, 0], [2, 1])
    part = packed([2, 1], values=[1.0, 2.0, 0.5])
    (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    plain = [1.95 - 2.45 / 3, 1 - 2.45 / 3, -0.5 - 2.45 / 3]
    deviation = math.sqrt(sum(x * x for x in plain) / 2)
    close(advantages, vector(*plain) / deviation, atol=1e-5, rtol=0)
    close(part.returns, vector(2.95, 3, 0))


def test_gae_by_hand() -> None:
    """gamma 1/2, lambda 1/2, V = 1, 2; r = 0, 3. delta = 0 + 1/2 * 2 - 1 = 0; 3 - 2 = 1. A = 0 + 1/4 * 1, 1."""
    advantages = gae(vector(0, 3, 5), vector(1, 2, 4), torch.tensor([0, 0, 1]), 0.5, 0.5)
    close(advantages, vector(0.25, 1, 1))


def test_gae_skips_masked_tokens_and_sets_returns() -> None:
    """A tool token between two trained ones is not there: the value before it looks at the value after it."""
    method, samples = build("advantage", "gae", gamma=1.0, lam=0.0, whiten=False), table([3], [0], [2])
    part = packed([3], values=[1.0, 99.0, 2.0], mask=[1.0, 0.0, 1.0])
    (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    close(advantages, vector(1, 0, 1))  # 0 + 2 - 1; 3 + 0 - 2
    close(part.returns, vector(2, 0, 3))


def test_mssr_by_hand() -> None:
    """Prior mean 1/2: r - v = 1/2, -1/2, whitened +-1/sqrt 2. Then alpha = .96 + 1, beta = .96: v = 1.96 / 2.92."""
    method = build("advantage", "mssr", lam=0.0)
    samples = table([1, 0], [0, 1], prompt_index=torch.tensor([8, 9]))
    close(method(samples), vector(1, -1) / math.sqrt(2), atol=1e-5, rtol=0)
    assert method.state_dict()["record"]["8"] == pytest.approx([1.96, 0.96])
    for _ in range(3):
        method.observe({"policy_kl": 0.005})  # half of the target: eta half-way between .96 and .875
    method(samples)
    eta = 0.96 - 0.5 * (0.96 - 0.875)
    assert method.state_dict()["record"]["8"] == pytest.approx([1.96 * eta + 1, 0.96 * eta])


def test_mssr_takes_a_half_for_a_prompt_without_a_record() -> None:
    """Records 1.96, 0.96 and 0.96, 1.96: v = 0.5 + d, 0.5 - d with d = 0.5 / 2.92; a new prompt has v = 0.5. Rewards
    1: r - v = 0.5 - d, 0.5 + d, 0.5, of deviation d."""
    method = build("advantage", "mssr", lam=0.0)
    method(table([1, 0], [0, 1], prompt_index=torch.tensor([8, 9])))
    advantages = method(table([1, 1, 1], [0, 1, 2], prompt_index=torch.tensor([8, 9, 7])))
    close(advantages, vector(-1, 1, 0), atol=1e-4, rtol=0)


def test_mssr_bonus_by_hand() -> None:
    """a + min(|a| / 0.4, 2 H): a = -1 with H = 0.5 gives -1 + 1; with H = 9 it is bounded: -1 + 2.5."""
    method, samples = build("advantage", "mssr"), table([1], [0], prompt_index=torch.tensor([1]))
    (advantages,) = method.per_token(vector(-1), samples, [packed([2], entropy=[0.5, 9.0])], single_rank)
    close(advantages, vector(0, 1.5))


def test_scans_by_hand() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1])
    close(discounted_suffix_sum(vector(1, 2, 4, 1, 1), ids, 0.5), vector(3, 4, 4, 1.5, 1))
    close(running_min(vector(3, 1, 2, 5, 4), ids, inclusive=True), vector(3, 1, 1, 5, 4))
    inf = math.inf
    close(running_min(vector(3, 1, 2, 5, 4), ids, inclusive=False), vector(inf, 3, 1, inf, 5))


def test_a_scan_of_one_long_sequence_equals_the_plain_loop() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    expected, carry = [], 0.0
    for x in reversed(values.tolist()):
        carry = x + 0.9 * carry
        expected.append(carry)
    close(
        discounted_suffix_sum(values, torch.zeros(1000, dtype=torch.long), 0.9), vector(*reversed(expected))
    )


# -- what holds for all of them ------------------------------------------------------------------------------

SHIFT = (
    "grpo", "dr_grpo", "rloo", "gapo", "mc_grpo", "vcpo", "gdpo", "reinforce_pp_baseline", "lite_ppo", "opo",
    "grpo_passk",
)  # fmt: skip
SCALE = ("grpo", "gapo", "vcpo", "gdpo", "lite_ppo", "grpo_passk")


def columns(n: int) -> dict[str, torch.Tensor]:
    return {
        "prompt_index": torch.arange(n) // 3,
        "answers": torch.arange(n) % 2,
        "log_likelihood": torch.linspace(-2, -1, n, dtype=DOUBLE),
        "transferred": torch.zeros(n, dtype=torch.bool),
        "log_weight": torch.linspace(-1, 1, n, dtype=DOUBLE),
        "score_norm": torch.linspace(1, 3, n, dtype=DOUBLE),
        "turn_rewards": torch.linspace(0, 1, 2 * n, dtype=DOUBLE).view(n, 2),
        "turn_matches": torch.ones(n, 2, dtype=torch.bool),
        "turn_counts": 1 + torch.arange(n) % 2,
    }


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 8), min_size=9, max_size=9), st.sampled_from(SHIFT))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[int], name: str) -> None:
    method, groups = build("advantage", name), [0] * 3 + [1] * 3 + [2] * 3
    base = method(table(rewards, groups, **columns(9)))
    close(method(table([r + 4 for r in rewards], groups, **columns(9))), base, atol=1e-6, rtol=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 8), min_size=4, max_size=4))
def test_a_shift_of_all_rewards_leaves_the_tokens_of_reinforce_pp(rewards: list[int]) -> None:
    """Without a group baseline it is the whitening that takes the shift off."""
    method, part = build("advantage", "reinforce_pp"), packed([1, 2, 3, 1])

    def tokens(shift: int) -> torch.Tensor:
        samples = table([r + shift for r in rewards], [0, 1, 2, 3])
        (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
        return torch.as_tensor(advantages)

    close(tokens(4), tokens(0), atol=1e-6, rtol=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 8), min_size=9, max_size=9), st.sampled_from(SCALE))
def test_a_scale_of_all_rewards_changes_nothing(rewards: list[int], name: str) -> None:
    method, groups = build("advantage", name, eps=1e-12), [0] * 3 + [1] * 3 + [2] * 3
    base = method(table(rewards, groups, **columns(9)))
    close(method(table([4 * r for r in rewards], groups, **columns(9))), base, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in TABLE["advantage"] if n != "gae"])
@pytest.mark.parametrize(
    "groups", [[0] * 9, [0] * 3 + [1] * 6, list(range(9))], ids=["one", "mixed", "singles"]
)
@pytest.mark.parametrize("rewards", [[1.0] * 9, [0.0] * 9, [1.0] + [0.0] * 8, [1e6] * 4 + [-1e6] * 5])
def test_no_nan(name: str, groups: list[int], rewards: list[float]) -> None:
    if name == "mc_grpo" and 6 in [groups.count(g) for g in groups]:
        groups = [0] * 3 + [1] * 3 + [2] * 3
    advantages = build("advantage", name)(table(rewards, groups, **columns(9)))
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("name", [n for n in TABLE["advantage"] if n != "gae"])
def test_group_local_advantages_depend_on_one_group_only(name: str) -> None:
    """Else a step's first groups would be trained on before the others are there, with other advantages."""
    samples = table([1, 0, 3, 5, 1, 0, 2, 2, 1], [0] * 3 + [1] * 3 + [2] * 3, **columns(9))
    method = build("advantage", name)
    apart = [method(samples.take(torch.arange(3 * g, 3 * g + 3))) for g in range(3)]
    if method.group_local:
        close(torch.cat(apart), method(samples), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "grpo", "dr_grpo", "rloo", "gapo", "mc_grpo", "xrpo", "puzzlecraft", "vcpo", "gdpo", "lite_ppo", "maxrl",
        "opo", "grpo_passk", "gpg",
    ],
)  # fmt: skip
def test_groups_of_one_reward_get_zero(name: str) -> None:
    advantages = build("advantage", name)(table([1] * 5 + [0] * 5, [0] * 5 + [1] * 5, **columns(10)))
    close(advantages, torch.zeros(10, dtype=DOUBLE), atol=1e-9, rtol=0)


def test_limits_are_grpo() -> None:
    """One reward: GDPO. No sharpening: XRPO. No bonus: outcome exploration. On-policy and equal norms: VCPO."""
    samples = table(
        [1, 0, 0, 2, 1, 1], [0, 0, 0, 1, 1, 1], **columns(6) | {"log_weight": torch.zeros(6, dtype=DOUBLE)}
    )
    grpo = build("advantage", "grpo")(samples)
    variants = {"gdpo": {}, "xrpo": {"lam": 0.0}, "outcome_exploration": {"c": 0.0}, "vcpo": {"norm": "one"}}
    for name, params in variants.items():
        close(build("advantage", name, **params)(samples), grpo)
