"""BranchGRPO's depth-wise advantage: by hand, by brute force over all tokens, and as GRPO where nothing forks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rlsys.algo.advantages import grpo
from rlsys.algo.batch import Batch
from rlsys.algo.methods.branch_grpo import Node, by_depth, paths
from rlsys.algo.reduction import single_rank
from rlsys.algo.registry import build
from tests.helpers.algo_world import DOUBLE, World, packed, table
from tests.helpers.tree_cases import depth_wise_advantages, token_names


def test_the_nodes_of_a_tree_by_hand() -> None:
    """1 forks off 0 at token 4, 2 off 0 at 2, 3 off 1 at 6; 4 stands alone."""
    node_paths = paths([-1, 0, 0, 1, -1], [0, 4, 2, 6, 0])
    assert node_paths == [
        [Node(0, 0), Node(0, 2), Node(0, 4)],
        [Node(0, 0), Node(0, 2), Node(1, 4), Node(1, 6)],
        [Node(0, 0), Node(2, 2)],
        [Node(0, 0), Node(0, 2), Node(1, 4), Node(3, 6)],
        [Node(4, 0)],
    ]


def test_depth_wise_advantages_by_hand() -> None:
    """A trunk of mean 0.5 beside a lone sample of 1; two branches of 1 and 0."""
    advantages = by_depth(torch.tensor([1.0, 0.0, 1.0]), paths([-1, 0, -1], [0, 3, 0]), eps=0.0)
    half = 0.5**0.5  # (1 - 0.5) / std([1, 0]) with n - 1, and as well (1 - 0.75) / std([0.5, 1])
    expected = [[(0, -half), (3, half)], [(0, -half), (3, -half)], [(0, half)]]
    for pairs, expected_pairs in zip(advantages, expected, strict=True):
        assert [token for token, _ in pairs] == [token for token, _ in expected_pairs]
        assert [a for _, a in pairs] == pytest.approx([a for _, a in expected_pairs])


def random_tree(r: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Stems and forks of responses of 12 tokens."""
    stems, forks = [-1], [0]
    for index in range(1, size):
        stem = r.choice([-1, *range(index)])
        stems.append(stem)
        forks.append(r.randrange(1, 12) if stem >= 0 else 0)
    return stems, forks


@pytest.mark.parametrize("seed", range(30))
def test_every_token_has_the_advantage_that_brute_force_finds(seed: int) -> None:
    r = random.Random(seed)
    stems, forks = random_tree(r, 6)
    texts = token_names(stems, forks, [12] * 6)
    rewards = [r.choice([0.0, 0.5, 1.0]) for _ in texts]
    tree = {"index_in_group": torch.arange(6), "stem": torch.tensor(stems), "fork_at": torch.tensor(forks)}
    samples = replace(table(rewards, [0] * 6, [12] * 6, **tree), eligible=torch.ones(6, dtype=torch.bool))
    batch = packed([12] * 6)
    method = build("advantage", "branch_grpo")
    (advantages,) = method.per_token(method(samples), samples, [batch], single_rank)
    expected = torch.tensor(depth_wise_advantages(rewards, texts), dtype=DOUBLE).flatten()
    assert torch.allclose(advantages, expected, atol=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_branches_of_a_dropped_stem_still_share_its_tokens(seed: int) -> None:
    """A `before` selector drops samples: what is left has the advantages of the tree that is left."""
    r = random.Random(seed)
    stems, forks = random_tree(r, 6)
    texts = token_names(stems, forks, [12] * 6)
    rewards = [r.choice([0.0, 0.5, 1.0]) for _ in texts]
    rows = sorted(r.sample(range(6), 4))
    tree = {"index_in_group": torch.arange(6), "stem": torch.tensor(stems), "fork_at": torch.tensor(forks)}
    counted = torch.tensor([row in rows for row in range(6)])
    samples = replace(table(rewards, [0] * 6, [12] * 6, **tree), eligible=counted)
    batch = packed([12] * 4)
    batch.rows = torch.tensor(rows)
    method = build("advantage", "branch_grpo")
    (advantages,) = method.per_token(method(samples), samples, [batch], single_rank)
    expected = depth_wise_advantages([rewards[row] for row in rows], [texts[row] for row in rows])
    assert torch.allclose(advantages, torch.tensor(expected, dtype=DOUBLE).flatten(), atol=1e-9)


def test_a_shared_prefix_is_trained_once_by_the_kept_samples() -> None:
    """Three samples share two tokens; one of them was cut off. Its reward counts, its tokens are not trained."""
    tree = {
        "index_in_group": torch.arange(4),
        "stem": torch.tensor([-1, 0, 0, -1]),
        "fork_at": torch.tensor([0, 2, 2, 0]),
    }
    every, selected_mask = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, False, True])
    samples = replace(
        table([1.0, 0.0, 1.0, 0.0], [0] * 4, [4] * 4, **tree), eligible=every, selected=selected_mask
    )
    batch, method = packed([4] * 4), build("advantage", "branch_grpo", eps=0.0)
    (advantages,) = method.per_token(method(samples), samples, [batch], single_rank)
    tokens = advantages.view(4, 4)[selected_mask]
    root = 0.5**0.5  # of the means 2/3 and 0, deviation with n - 1
    assert float(tokens[:2, 0].sum()) == pytest.approx(root)
    assert float(tokens[2, 0]) == pytest.approx(-root)


@pytest.mark.parametrize("reward", [0.7, 1000.1, 123456.7])
def test_equal_rewards_of_any_size_are_no_advantage(reward: float) -> None:
    """Means of two and of three samples differ by rounding."""
    node_advantages = by_depth(
        torch.full((7,), reward), paths([-1, 0, 0, 1, -1, 4, 5], [0, 2, 4, 6, 0, 3, 5])
    )
    assert {advantage for nodes in node_advantages for _, advantage in nodes} == {0.0}


def test_without_forks_it_is_grpo() -> None:
    world = World()
    lone = {"stem": torch.full((20,), -1), "fork_at": torch.zeros(20).long()}
    samples = replace(world.samples, eligible=torch.ones(20, dtype=torch.bool), **lone)
    part: Batch = world.part(range(20))
    method = build("advantage", "branch_grpo")
    (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    plain = part.masked(part.expand(grpo(samples.reward, samples.group_ids, eps=1e-8)))
    assert torch.allclose(advantages, plain, atol=1e-12)
