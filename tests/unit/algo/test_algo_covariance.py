"""Which tokens lower the entropy: Clip-Cov, KL-Cov and the most uncertain tokens, by hand and over layouts."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.draws import token_draws
from rlsys.algo.losses import View
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from rlsys.core.errors import UserError
from tests.helpers.algo_world import DOUBLE, World, packed, run, section, table

close = torch.testing.assert_close


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


ADVANTAGES, NOW = [3.0, 1.0, -1.0, -3.0], [-0.5, -1.5, -1.0, -3.0]
"""Means 0 and -1.5: covariances 3, 0, -0.5, 4.5."""


def batch_of(now: list[float] = NOW) -> Batch:
    return packed([2, 2], mu=list(now), advantages=ADVANTAGES, current=now)


def gradient(name: str, batch: Batch, **params: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    plugin = build("loss", name, **params)
    update_stats = plugin.prepare([batch], [batch.mu], single_rank)
    assert batch.current is not None
    leaf = batch.current.clone().requires_grad_()
    loss, figures = plugin(View(batch, leaf, batch.mu), update_stats)
    loss.sum().backward()
    assert leaf.grad is not None
    return leaf.grad, figures


def test_clip_cov_drops_as_many_as_its_share_among_those_that_covary() -> None:
    """Between 1 and 5 are the first and the last token; a share of 1/4 is one of them, of 1/2 both."""
    grad, figures = gradient("clip_cov", batch_of(), share=0.5)
    close(grad, vector(0, -1, 1, 0))
    assert figures["clipped"].tolist() == [True, False, False, True]
    for share in (0.25, 1e-4):  # at least one
        grad, _ = gradient("clip_cov", batch_of(), share=share)
        assert (grad[[0, 3]] == 0).sum() == 1
    grad, _ = gradient("clip_cov", batch_of(), share=0.5, cov_high=4.0)
    close(grad, vector(0, -1, 1, 3))


def test_clip_cov_excludes_clipped_tokens_from_its_draw() -> None:
    batch = batch_of()
    batch.mu = batch.mu - vector(1, 0, 0, 0)  # r = e: clipped
    grad, _ = gradient("clip_cov", batch, share=0.25)
    close(grad, vector(0, -1, 1, 0))  # the one that is drawn is the last
    assert gradient("clip_cov", batch, share=0.25, cov_low=4.0)[0][3] == 0


def test_kl_cov_holds_the_share_that_covaries_most() -> None:
    """The last token has 4.5, then the first; |logp - anchor| has a gradient of 1 or -1."""
    batch = batch_of()
    batch.mu = batch.mu + vector(0.1, 0.1, 0.1, 0.1)
    ratio = math.exp(-0.1)
    for share, mask in ((0.25, [0, 0, 0, 1]), (0.5, [1, 0, 0, 1]), (1e-4, [0, 0, 0, 1]), (1.0, [1, 1, 1, 1])):
        grad, figures = gradient("kl_cov", batch, share=share, coefficient=0.5)
        close(grad, -ratio * vector(*ADVANTAGES) - 0.5 * vector(*mask))
        assert figures["held_share"].tolist() == mask


def test_covariance_is_about_the_mean_of_the_advantages() -> None:
    """One more for each advantage: mean 1, and the covariances 3, 0, -0.5, 4.5 as before. About -1 the first of them
    would be the largest, 5."""
    batch = batch_of()
    batch.advantages = vector(*ADVANTAGES) + 1
    assert gradient("kl_cov", batch, share=0.25)[1]["held_share"].tolist() == [0, 0, 0, 1]


def test_rounding_at_the_anchor_gives_no_token_a_direction() -> None:
    """A token that has not moved but for 1e-7 of rounding has no penalty to speak of, whichever sign that has."""
    for noise in (1e-7, -1e-7):
        batch = batch_of()
        batch.mu = batch.mu + noise
        grad, _ = gradient("kl_cov", batch, share=1.0, coefficient=1.0)
        close(grad, -vector(*ADVANTAGES), atol=2e-4, rtol=0)


def test_rounding_does_not_decide_between_tied_tokens() -> None:
    """The same response three times in a group: a draw picks one of the three, in every layout the same."""
    masks = []
    for noise in ([0, 1e-7, -1e-7], [1e-7, -1e-7, 0]):
        entropy = [1.7 + n for n in noise]
        assert entropy_weights(0.4, [packed([4], entropy=[*entropy, 0.3])]) == [[1, 1, 1, 0]]
        logps = [-0.5 + n for n in noise]
        batch = packed([4], mu=[0.0] * 4, advantages=[1, 1, 1, -1], current=[*logps, -0.1])
        masks.append(gradient("kl_cov", batch, share=0.25)[1]["held_share"].tolist())
    assert masks[0] == masks[1]
    assert sum(masks[0]) == 1


def test_masked_tokens_are_in_no_mean() -> None:
    batch = packed(
        [3, 2], mu=[*NOW[:2], torch.nan, *NOW[2:]], advantages=[*ADVANTAGES[:2], torch.nan, *ADVANTAGES[2:]],
        current=[*NOW[:2], torch.nan, *NOW[2:]], mask=[1.0, 1.0, 0.0, 1.0, 1.0],
    )  # fmt: skip
    for name in ("clip_cov", "kl_cov"):
        plugin = build("loss", name, share=0.5)
        statistics, cut = plugin.prepare([batch], [batch.mu], single_rank)
        assert (statistics.tokens, statistics.advantage, statistics.logp) == (4, 0, -1.5)
        assert math.isfinite(cut)


def test_draws_are_uniform_and_depend_on_row_position_and_version() -> None:
    long = packed([4000, 4000])
    draws = token_draws(long)
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.02
    assert len(draws.unique()) == 8000
    steps = (draws[1:] - draws[:-1]) % 1
    assert float(steps.std()) > 0.25  # neighbours are not told from each other
    second = packed([4000])
    second.rows = torch.tensor([1])
    close(token_draws(second), draws[4000:])
    second.version = 1
    assert not torch.equal(token_draws(second), draws[4000:])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_samples_of_advantage_zero_are_in_the_means(name: str) -> None:
    objective = Objective(section(loss=[name]))
    assert objective.plan(table([1, 0, 1, 1], [0, 0, 1, 1])).rows == [0, 1, 2, 3]
    assert objective.requirements.needs_whole_step
    assert "current" in objective.requirements.needs


def test_empty_covariance_bounds_are_rejected() -> None:
    with pytest.raises(UserError, match=r"cov_low = 6.0: expected less than cov_high = 5.0"):
        build("loss", "clip_cov", cov_low=6)


def entropy_weights(share: float, parts: list[Batch]) -> list[list[float]]:
    for part in parts:
        part.weight = part.mask
    selector = build("selector", "top_entropy", share=share)
    return [w.tolist() for w in selector.per_token(parts, table([1], [0]), single_rank)]


def test_only_the_most_uncertain_tokens_of_all_parts_are_trained() -> None:
    """Entropies 0 to 9 over two parts: the share 0.2 drops ceil(0.8 x 9) = 8 of them, as a quantile does."""
    parts = [packed([5], entropy=[0, 2, 4, 6, 8]), packed([5], entropy=[1, 3, 5, 7, 9])]
    assert entropy_weights(0.2, parts) == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert entropy_weights(1.0, parts) == [[1] * 5, [1] * 5]
    parts = [packed([3], entropy=[1, torch.nan, 3], mask=[1.0, 0.0, 1.0])]
    assert entropy_weights(0.5, parts) == [[0, 0, 1]]


def test_the_denominator_counts_the_tokens_that_are_sure() -> None:
    world = World()
    plain = run(world, section(loss=["reinforce"]), lambda rows: [rows])
    chosen = run(world, section(loss=["reinforce"], selectors=["top_entropy"]), lambda rows: [rows])
    assert chosen.denominator == plain.denominator
    trained = sum(int((g[0] != 0).sum()) for g in chosen.gradients.values())
    everything = sum(len(s["mask"]) - 2 for s in world.sequences)
    assert len(chosen.rows) == 20
    assert trained <= math.ceil(0.2 * everything)
    for row, gradient in chosen.gradients.items():
        mask = gradient[0] != 0
        close(gradient[0][mask], plain.gradients[row][0][mask])
