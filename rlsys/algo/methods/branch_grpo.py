"""BranchGRPO: advantages of responses that are branches of a tree.

A node of the tree is a range of tokens between two positions at which branches fork; a sample's response is a path of
nodes, and samples can share nodes. The depth of a node is the number of forks before it on the path from the prompt.
Shapes: n samples of a group, T packed tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, deviation
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import groups_of


class Node(NamedTuple):
    """A range of response tokens.

    Attributes:
        owner: Index in the group of the sample that other samples with these tokens branch off.
        start: Index of the first token in the response.
    """

    owner: int
    start: int


def paths(stems: Sequence[int], forks: Sequence[int]) -> list[list[Node]]:
    """Return the nodes of each sample of a group, in the order of its tokens.

    Args:
        stems: index of the sample that each sample branches off; -1 for none.
        forks: number of tokens that each sample shares with its stem.
    """
    owners = list(stems)
    # A fork within the tokens that its stem shares with another sample branches off that sample.
    for index, length in enumerate(forks):
        while owners[index] >= 0 and stems[owners[index]] >= 0 and length <= forks[owners[index]]:
            owners[index] = stems[owners[index]]
    cuts: list[set[int]] = [set() for _ in stems]  # positions at which other samples branch off
    for owner, length in zip(owners, forks, strict=True):
        if owner >= 0 and length > 0:
            cuts[owner].add(length)

    def path(index: int, end: float) -> list[Node]:
        """Return the nodes of the sample's tokens before `end`."""
        shared = forks[index] if owners[index] >= 0 else 0
        shared_nodes = path(owners[index], min(shared, end)) if shared else []
        starts = [] if shared >= end else [shared, *sorted(c for c in cuts[index] if shared < c < end)]
        return shared_nodes + [Node(index, start) for start in starts]

    return [path(index, float("inf")) for index in range(len(stems))]


def subtree(nodes: Sequence[list[Node]], in_tree: Sequence[bool]) -> list[list[Node]]:
    """Return the nodes of each sample in the tree of a subset of the samples.

    Consecutive nodes that the same samples of the subset share become one node.

    Args:
        nodes: nodes of each sample in the whole tree.
        in_tree: whether the sample is in the subset.

    Returns:
        Nodes of each sample; empty for samples outside of the subset.
    """
    members: dict[Node, set[int]] = {}
    for row in (row for row, present in enumerate(in_tree) if present):
        for node in nodes[row]:
            members.setdefault(node, set()).add(row)
    remaining_nodes = []
    for sample_nodes, present in zip(nodes, in_tree, strict=True):
        forks = [
            node
            for previous, node in pairwise(sample_nodes)
            if present and members[previous] != members[node]
        ]
        remaining_nodes.append([*sample_nodes[:1], *forks] if present else [])
    return remaining_nodes


def sharers(nodes: Sequence[list[Node]], trained: Sequence[bool]) -> list[list[int]]:
    """Return for each node of each sample the number of trained samples that share it.

    Args:
        nodes: nodes of each sample.
        trained: whether the sample is trained.
    """
    count = Counter(
        node for sample_nodes, trains in zip(nodes, trained, strict=True) if trains for node in sample_nodes
    )
    return [[count[node] for node in sample_nodes] for sample_nodes in nodes]


def by_depth(rewards: Tensor, tree: Sequence[list[Node]], eps: float = 1e-8) -> list[list[tuple[int, float]]]:
    """Compute the advantage of each node of a group's tree.

    The reward of a node is the mean over the samples that share it. Its advantage is (R - mean) / (std + eps) over
    the nodes of its depth, where std has the divisor n - 1. It is 0 for the only node of a depth, and if all rewards
    of the depth are equal.

    Args:
        rewards: rewards of the samples, `[n]`.
        tree: nodes of each sample.
        eps: added to the standard deviation.

    Returns:
        (first token, advantage) of each node of each sample.
    """
    smallest_std = max(1e-6, REWARD_TOLERANCE * float(rewards.abs().max()))  # 1e-6: the authors' bound
    members: dict[Node, list[int]] = {}
    depth: dict[Node, int] = {}
    for index, nodes in enumerate(tree):
        for level, node in enumerate(nodes):
            members.setdefault(node, []).append(index)
            depth[node] = level
    advantages: dict[Node, float] = {}
    for level in set(depth.values()):
        nodes = [node for node, node_level in depth.items() if node_level == level]
        means = torch.stack([rewards[members[node]].mean() for node in nodes])
        std = deviation(means)
        scaled = (means - means.mean()) / (std + eps) if std > smallest_std else torch.zeros_like(means)
        advantages |= dict(zip(nodes, scaled.tolist(), strict=True))
    return [[(node.start, advantages[node]) for node in nodes] for nodes in tree]


class BranchGrpo(Advantage):
    """Advantages of the token ranges between forks in a tree of responses, relative to ranges of the same depth.

    The reward of a range is the mean reward of the samples that share it. BranchGRPO was published for images, where
    a depth is a denoising step. For text, rlsys defines the depth as the number of forks before the range. Without
    forks the method is GRPO.

    A range that k trained samples share has the weight of one range, as in the authors' code
    (collect_all_transitions): it is in the batch k times, each time with 1 / k of its advantage.
    """

    paper: ClassVar[str] = "BranchGRPO (arXiv 2509.06040), depth-wise advantage"
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    eps: Eps = 1e-8
    """Added to the standard deviation."""

    def needs(self) -> frozenset[str]:
        return frozenset({"forks"})

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        nodes: dict[int, list[tuple[int, float]]] = {}
        for rows in groups_of(samples.group_ids):
            nodes |= zip(rows.tolist(), self._group_nodes(advantages, samples, rows), strict=True)
        return [part.masked(_token_advantages(part, nodes)) for part in parts]

    def _group_nodes(
        self, rewards: Tensor, samples: Samples, rows: Tensor
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield for each sample of a group (first token, advantage / number of sharing trained samples) of its nodes.

        Args:
            rewards: rewards of all samples of the step, `[N]`.
            samples: the sample table.
            rows: rows of the group's samples, `[n]`.
        """
        in_tree = samples.column("eligible")[rows].tolist()
        trained = in_tree if samples.selected is None else samples.selected[rows].tolist()
        positions = {int(index): i for i, index in enumerate(samples.column("index_in_group")[rows])}
        stems = [positions.get(int(stem), -1) for stem in samples.column("stem")[rows]]
        forks = [int(fork) for fork in samples.column("fork_at")[rows]]
        tree = subtree(paths(stems, forks), in_tree)
        node_advantages = by_depth(rewards[rows], tree, self.eps)
        for nodes, counts in zip(node_advantages, sharers(tree, trained), strict=True):
            yield [
                (start, advantage / max(count, 1))
                for (start, advantage), count in zip(nodes, counts, strict=True)
            ]


def _token_advantages(part: Batch, nodes: dict[int, list[tuple[int, float]]]) -> Tensor:
    """Return the advantage of each token's node, `[T]`.

    Args:
        part: a packed batch.
        nodes: row of a sample -> (first token, advantage) of its nodes, in order.
    """
    token_advantages = torch.zeros_like(part.mu)
    response = (part.versions >= 0).long().cpu()
    bounds = part.cu_seqlens.tolist()
    for row, start, end in zip(part.rows.tolist(), bounds[:-1], bounds[1:], strict=True):
        first = end - int(response[start:end].sum())
        for node_start, advantage in nodes.get(row, []):
            token_advantages[min(first + node_start, end) : end] = advantage
    return token_advantages
