"""Random legal objectives on awkward batches keep their loss and gradients under changes that mean nothing.

tests/helpers/objective_fuzz.py has the batches, the rules and who is exempt from which. RLSYS_FUZZ_CASES sets the
number of cases: 300 in `make test`, 5000 for evidence.
"""

from __future__ import annotations

import os

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.losses import View
from rlsys.algo.reduction import single_rank
from rlsys.algo.registry import TABLE
from rlsys.algo.token_advantages import whiten_tokens
from tests.helpers.algo_world import DOUBLE, packed, table
from tests.helpers.objective_fuzz import EXEMPT, RULES, sample_table, violations

CASES, CHUNK = int(os.environ.get("RLSYS_FUZZ_CASES", "300")), 5


@pytest.mark.gate
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_a_random_objective_is_invariant_under_neutral_changes(chunk: int) -> None:
    numbers = range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES))
    bad = [line for number in numbers for line in violations(number)]
    assert not bad, "\n".join(bad)


# -- exemptions ---------------------------------------------------------------------------------------------


def test_each_exemption_is_of_a_rule_and_a_method_and_has_a_reason() -> None:
    method_names = {name for names in TABLE.values() for name in names}
    for rule, methods in EXEMPT.items():
        assert rule in RULES
        for method, reason in methods.items():
            assert reason
            assert method == "minibatches" or method.split(" ")[0] in method_names


def test_a_deviation_over_n_minus_1_of_the_step_changes_with_a_second_copy() -> None:
    """Rewards 1, 0: deviation sqrt(1/2); twice, sqrt(1/3). Exempt from `duplicate`: gae, reinforce_pp, mapo, mssr."""
    for copies, deviation in ((1, 0.5**0.5), (2, (1 / 3) ** 0.5)):
        part = packed([1] * 2 * copies)
        (advantages,) = whiten_tokens(
            [torch.tensor([1.0, 0.0] * copies, dtype=DOUBLE)], [part], single_rank, eps=0.0
        )
        assert float(advantages[0]) == pytest.approx(0.5 / deviation)


def test_lite_ppos_deviation_changes_with_a_second_copy() -> None:
    for copies, deviation in ((1, 0.5**0.5), (2, (1 / 3) ** 0.5)):
        rewards, groups = [1.0, 0.0] * copies, [g for g in range(copies) for _ in range(2)]
        advantages = build("advantage", "lite_ppo", eps=0.0)(sample_table(rewards, groups))
        assert float(advantages[0]) == pytest.approx(0.5 / deviation)


def test_a_rounded_number_of_samples_is_no_share() -> None:
    """d3s with a half: round(1.5) = 2 of three; of six, 3."""
    for copies, expected in ((1, 2), (2, 3)):
        samples = sample_table([2.0, 1.0, 0.0] * copies, [0] * 3 * copies)
        weight = build("selector", "d3s", samples_start=0.5)(samples, samples.rewards - 1)
        assert int((weight != 0).sum()) == expected


def test_a_rounded_number_of_tokens_is_no_share() -> None:
    """top_entropy: 0.5 of three tokens drops ceil(0.5 x 2) = 1; of six, ceil(0.5 x 5) = 3."""
    for copies, expected_count in ((1, 2), (2, 3)):
        part = packed([3] * copies, entropy=[1.0, 2.0, 3.0, 1.5, 2.5, 3.5][: 3 * copies])
        part.weight = torch.ones(3 * copies)
        (token_mask,) = build("selector", "top_entropy", share=0.5).per_token(
            [part], table([0.0], [0]), single_rank
        )
        assert int(token_mask.sum()) == expected_count


def test_an_advantage_by_the_deviation_is_no_multiple_of_the_reward() -> None:
    """MC-GRPO by hand: rewards 0, 1, 3 have the median 1 and distances of MAD 1: (R - 1) / (1 + 1) times 3/2; four
    times the rewards: MAD 4, (R - 4) / 5 times 3/2."""
    method = build("advantage", "mc_grpo")
    for factor, expected in ((1.0, [-0.75, 0.0, 1.5]), (4.0, [-1.2, 0.0, 2.4])):
        advantages = method(sample_table([0.0, factor, 3 * factor], [0] * 3))
        assert advantages.tolist() == pytest.approx(expected)


def test_puzzlecrafts_weight_is_no_multiple_of_the_reward() -> None:
    """(R - d) 4 d (1 - d), d the mean, two answers of two. Rewards 1, 0: 0.5; half of them: 0.25 x 4 x 3 / 16."""
    answers = torch.tensor([1, 2])
    for factor, expected in ((1.0, 0.5), (0.5, 0.1875)):
        samples = table([factor, 0.0], [0, 0], answers=answers)
        assert float(build("advantage", "puzzlecraft")(samples)[0]) == pytest.approx(expected)


def test_gae_makes_an_episode_of_each_sequence() -> None:
    """lam 1, gamma 1, values 0: each token has what is to come: 1 in both sequences, whatever their order; without a
    critic's value two sequences have twice the return of one. Exempt from `split`."""
    method = build("advantage", "gae", lam=0.5, whiten=False)
    for lengths, expected in (([4], [0.125, 0.25, 0.5, 1.0]), ([2, 2], [0.5, 1.0, 0.5, 1.0])):
        part = packed(lengths, values=[0.0] * 4)
        part.rows = torch.zeros(len(lengths), dtype=torch.long)
        (advantages,) = method.per_token(
            torch.tensor([1.0], dtype=DOUBLE), table([1.0], [0], [4]), [part], single_rank
        )
        assert advantages.tolist() == pytest.approx(expected)


def test_a_correction_of_a_sequence_compares_one_context() -> None:
    """Log-ratios 0.1, 0.3: the product over one sequence is exp(0.4); of two sequences exp(0.1) and exp(0.3)."""
    for lengths, expected in (([2], [0.4, 0.4]), ([1, 1], [0.1, 0.3])):
        part = packed(lengths, [-1.0, -1.0])
        part.rows = torch.zeros(len(lengths), dtype=torch.long)
        anchor = part.mu + torch.tensor([0.1, 0.3], dtype=DOUBLE)
        correction = build("correction", "tis", level="sequence")(View(part, anchor, anchor), None)
        assert correction.weight.log().tolist() == pytest.approx(expected)
