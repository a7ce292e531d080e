"""The optimal token baseline, and VCPO's, against numbers by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.methods import optimal_token_baseline
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from rlsys.config.algo import AlgoSection
from tests.helpers.algo_world import DOUBLE, packed, table

close = torch.testing.assert_close


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def advantages(part: Batch, rewards: list[float], groups: list[int], **params: object) -> torch.Tensor:
    method = build("advantage", "optimal_token_baseline", **params)
    samples = table(rewards, groups, part.lengths.long().tolist())
    (token_advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    assert isinstance(token_advantages, torch.Tensor)
    return token_advantages


def two_responses(**fields: list[float]) -> Batch:
    """pi 1/2, 1/2, 1/4 | 1, 1/4, of sums of squares 1/2, 1/4, 1/8 | 1, 1/8: norms 1/2, 1/4, 5/8 | 0, 5/8."""
    chosen = [1 / 2, 1 / 2, 1 / 4, 1.0, 1 / 4]
    return packed(
        [3, 2], old=[math.log(p) for p in chosen], sum_pi_squared=[1 / 2, 1 / 4, 1 / 8, 1.0, 1 / 8], **fields
    )


def test_the_optimal_token_baseline_by_hand() -> None:
    """W = 1/2, 3/4, 11/8 | 0, 5/8; rewards 1, 0: B = 1, (3/4) / (11/8) = 6/11; the third token has no partner."""
    token_advantages = advantages(two_responses(), [1.0, 0.0], [0, 0], eps=0.0)
    close(token_advantages, vector(0, 5 / 11, 1, -1, -6 / 11))
    token_advantages = advantages(two_responses(), [1.0, 0.0], [0, 0], eps=0.0, lone=False)
    close(token_advantages, vector(0, 5 / 11, 0, -1, -6 / 11))
    alone_in_its_group = advantages(two_responses(), [3.0, 2.0], [0, 1])
    close(alone_in_its_group, vector(3, 3, 3, 2, 2))


def test_importance_weights_scale_the_scores_by_hand() -> None:
    """old - mu = ln 2 on the first response, ln 9 on the other, truncated at 3: W times 4 and 9."""
    part = two_responses()
    log_ratio = vector(2, 2, 2, 9, 9).log()
    part.mu = part.signal("old") - log_ratio
    token_advantages = advantages(part, [1.0, 0.0], [0, 0], eps=0.0, cap=3.0)
    first_weight, second_weight = 4 * 3 / 4, 9 * 5 / 8
    close(
        token_advantages[[1, 4]],
        vector(
            1 - first_weight / (first_weight + second_weight), -first_weight / (first_weight + second_weight)
        ),
    )


def test_tool_tokens_do_not_affect_advantages() -> None:
    """Neither in the sums nor in the count of places, whatever stands under the mask."""
    nan = math.nan
    plain_batch = packed([2, 2], old=[-1.0, -2.0, -1.5, -0.5], sum_pi_squared=[0.5, 0.4, 0.3, 0.6])
    holes = packed(
        [3, 3],
        old=[-1.0, nan, -2.0, -1.5, -0.5, nan],
        sum_pi_squared=[0.5, nan, 0.4, 0.3, 0.6, nan],
        mask=[1.0, 0.0, 1.0, 1.0, 1.0, 0.0],
    )
    close(advantages(holes, [1.0, 0.0], [0, 0])[holes.keep], advantages(plain_batch, [1.0, 0.0], [0, 0]))


def test_many_groups_are_summed_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held at once does not grow with the step."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (24,), generator=generator).tolist()
    total = sum(lengths)
    part = packed(
        lengths,
        old=(-torch.rand(total, generator=generator, dtype=DOUBLE)).tolist(),
        sum_pi_squared=torch.rand(total, generator=generator, dtype=DOUBLE).tolist(),
    )
    rewards, groups = torch.rand(24, generator=generator, dtype=DOUBLE).tolist(), [i % 6 for i in range(24)]
    reference = advantages(part, rewards, groups)
    sizes: list[int] = []

    def summed(values: torch.Tensor) -> torch.Tensor:
        sizes.extend(values.shape[1:])
        return values

    monkeypatch.setattr(optimal_token_baseline, "CHUNK", 7)
    method, samples = build("advantage", "optimal_token_baseline"), table(rewards, groups, lengths)
    (token_advantages,) = method.per_token(method(samples), samples, [part], summed)
    close(token_advantages, reference)
    assert max(sizes) == 7 and len(sizes) > 3


def test_vcpos_baseline_by_the_scores_by_hand() -> None:
    """On-policy, |g|^2 = 11/8 and 5/8 by the tokens of `two_responses`: b = (11 R_1 + 5 R_2) / 16, R = 1, 0."""
    objective = Objective(
        AlgoSection.model_validate({"advantage": {"name": "vcpo", "eps": 0}, "anchor": "old"})
    )
    part = two_responses()
    part.mu = part.signal("old")
    plan = objective.plan(table([1, 0], [0, 0], [3, 2]))
    objective.finish(plan, [part])
    deviation = math.sqrt(1 / 2)
    close(part.signal("advantages")[[0, 3]], vector(1 - 11 / 16, -11 / 16) / deviation)
