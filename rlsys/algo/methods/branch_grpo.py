"""Advantages of responses that are branches of a tree: BranchGRPO's, by depth.

Shapes: N samples, T packed tokens. A node is a range of tokens between two positions where branches fork; all samples
that contain it share it. A node's depth is the number of forks before it on the path from the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import groups_of


class Node(NamedTuple):
    """Response tokens from `start` on of the sample `owner`, which is the first sample with these tokens."""

    owner: int
    start: int


def paths(stems: Sequence[int], forks: Sequence[int]) -> list[list[Node]]:
    """Return the nodes of each sample of a group, from the prompt to its end.

    Args:
        stems: for each sample the index of the sample that it branches off, -1 for none.
        forks: for each sample the number of tokens that it shares with its stem.
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
    """Return each sample's nodes in the tree of only the `in_tree` samples; none for the other samples.

    Consecutive nodes of the same samples are merged.
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
    """Return for each sample, in the order of its nodes, the number of trained samples that share the node."""
    count = Counter(
        node for sample_nodes, trains in zip(nodes, trained, strict=True) if trains for node in sample_nodes
    )
    return [[count[node] for node in sample_nodes] for sample_nodes in nodes]


def by_depth(rewards: Tensor, tree: Sequence[list[Node]], eps: float = 1e-8) -> list[list[tuple[int, float]]]:
    """Return (first token, advantage) of each sample's nodes in order, for a group with this tree.

    A node's reward is the mean over the samples `[n]` that share it. Its advantage is (R - mean) / (std + eps) among
    the nodes of its depth, std with n - 1; 0 if it is the only one at its depth, or all rewards there are equal.
    """
    least = max(1e-6, REWARD_TOLERANCE * float(rewards.abs().max()))  # the authors' bound, and rounding
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
        spread = means.std() if len(nodes) > 1 else means.new_zeros(())
        scaled = (means - means.mean()) / (spread + eps) if spread > least else torch.zeros_like(means)
        advantages |= dict(zip(nodes, scaled.tolist(), strict=True))
    return [[(node.start, advantages[node]) for node in nodes] for nodes in tree]


class BranchGrpo(Advantage):
    """Advantages of the ranges between two forks in a tree of responses, relative to ranges of the same depth.

    A range has the mean reward of the samples that share it. BranchGRPO is a method for images, in which a depth is
    a denoising step; for text, rlsys defines the depth as the number of forks before the range. Without forks it is
    GRPO.

    A range that k trained samples share has the weight of one, as in the authors' code (collect_all_transitions): it
    is in the batch k times, each with 1 / k of its advantage.
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
            in_tree = samples.column("eligible")[rows].tolist()
            trained = in_tree if samples.selected is None else samples.selected[rows].tolist()
            index_of = {int(p): i for i, p in enumerate(samples.column("index_in_group")[rows])}
            stems = [index_of.get(int(s), -1) for s in samples.column("stem")[rows]]
            forks = [int(f) for f in samples.column("fork_at")[rows]]
            tree = subtree(paths(stems, forks), in_tree)
            branch_advantages = by_depth(advantages[rows], tree, self.eps)
            for row, node_advantages, counts in zip(
                rows.tolist(), branch_advantages, sharers(tree, trained), strict=True
            ):
                nodes[row] = [
                    (start, a / max(k, 1)) for (start, a), k in zip(node_advantages, counts, strict=True)
                ]
        return [part.masked(self._spread(part, nodes)) for part in parts]

    def _spread(self, part: Batch, nodes: dict[int, list[tuple[int, float]]]) -> Tensor:
        token_advantages = torch.zeros_like(part.mu)
        response = (part.versions >= 0).long().cpu()
        bounds = part.cu_seqlens.tolist()
        for row, start, end in zip(part.rows.tolist(), bounds[:-1], bounds[1:], strict=True):
            first = end - int(response[start:end].sum())
            for node_start, advantage in nodes.get(row, []):
                token_advantages[min(first + node_start, end) : end] = advantage
        return token_advantages
