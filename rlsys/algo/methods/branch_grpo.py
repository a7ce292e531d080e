"""Advantages of responses that are branches of a tree: BranchGRPO's, by depth.

Shapes: N samples, T packed tokens. A node is a stretch of tokens between two places where branches fork; all samples
that have it share it. A node's depth is the number of forks before it on the way from the prompt.
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
    """Response tokens from `start` on of the sample at `owner`, which is the first that has them."""

    owner: int
    start: int


def paths(stems: Sequence[int], forks: Sequence[int]) -> list[list[Node]]:
    """The nodes of each sample of a group, from the prompt to its end.

    `stems`: the place of the sample that each branches off, -1 for none. `forks`: at which of its tokens.
    """
    owners = list(stems)
    for place, at in enumerate(
        forks
    ):  # one that forks within what its stem was given branches off that one's stem
        while owners[place] >= 0 and stems[owners[place]] >= 0 and at <= forks[owners[place]]:
            owners[place] = stems[owners[place]]
    cuts: list[set[int]] = [set() for _ in stems]  # where others branch off it
    for owner, at in zip(owners, forks, strict=True):
        if owner >= 0 and at > 0:
            cuts[owner].add(at)

    def path(place: int, end: float) -> list[Node]:
        """Of its tokens before `end`."""
        shared = forks[place] if owners[place] >= 0 else 0
        before = path(owners[place], min(shared, end)) if shared else []
        own = [] if shared >= end else [shared, *sorted(c for c in cuts[place] if shared < c < end)]
        return before + [Node(place, start) for start in own]

    return [path(place, float("inf")) for place in range(len(stems))]


def subtree(nodes: Sequence[list[Node]], in_tree: Sequence[bool]) -> list[list[Node]]:
    """Return each sample's nodes in the tree of the `in_tree` samples alone; none for another sample.

    Nodes that the same samples have become one: nothing forks there any more.
    """
    members: dict[Node, set[int]] = {}
    for row in (row for row, present in enumerate(in_tree) if present):
        for node in nodes[row]:
            members.setdefault(node, set()).add(row)
    out = []
    for own, present in zip(nodes, in_tree, strict=True):
        forks = [node for previous, node in pairwise(own) if present and members[previous] != members[node]]
        out.append([*own[:1], *forks] if present else [])
    return out


def sharers(nodes: Sequence[list[Node]], trained: Sequence[bool]) -> list[list[int]]:
    """Count the trained samples of a group that have each of a sample's nodes, in order."""
    count = Counter(node for own, trains in zip(nodes, trained, strict=True) if trains for node in own)
    return [[count[node] for node in own] for own in nodes]


def by_depth(rewards: Tensor, tree: Sequence[list[Node]], eps: float = 1e-8) -> list[list[tuple[int, float]]]:
    """Return (first token, advantage) of each sample's nodes in order, for a group with this tree.

    A node's reward is the mean over the samples `[n]` that have it. Its advantage is (R - mean) / (std + eps) among
    the nodes of its depth, std with n - 1; 0 where it is alone at its depth, or all rewards there agree.
    """
    least = max(1e-6, REWARD_TOLERANCE * float(rewards.abs().max()))  # the authors' bound, and rounding
    members: dict[Node, list[int]] = {}
    depth: dict[Node, int] = {}
    for place, nodes in enumerate(tree):
        for level, node in enumerate(nodes):
            members.setdefault(node, []).append(place)
            depth[node] = level
    advantages: dict[Node, float] = {}
    for level in set(depth.values()):
        nodes = [node for node, at in depth.items() if at == level]
        means = torch.stack([rewards[members[node]].mean() for node in nodes])
        spread = means.std() if len(nodes) > 1 else means.new_zeros(())
        scaled = (means - means.mean()) / (spread + eps) if spread > least else torch.zeros_like(means)
        advantages |= dict(zip(nodes, scaled.tolist(), strict=True))
    return [[(node.start, advantages[node]) for node in nodes] for nodes in tree]


class BranchGrpo(Advantage):
    """The responses of a group as the branches of a tree: each stretch of tokens between two forks is compared with
    the stretches that have as many forks before them.

    A stretch has the mean reward of the samples that share it. BranchGRPO is a method for images, where a depth is a
    denoising step; that a depth is a number of forks is our reading for text. Without forks it is GRPO.

    A stretch that k trained samples share is trained once, as by the authors (collect_all_transitions): it is in the
    batch k times, each with 1 / k of its advantage.
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
            in_tree = samples.column("counted")[rows].tolist()
            trained = in_tree if samples.kept is None else samples.kept[rows].tolist()
            place = {int(p): i for i, p in enumerate(samples.column("place")[rows])}
            stems = [place.get(int(s), -1) for s in samples.column("stem")[rows]]
            forks = [int(f) for f in samples.column("fork_at")[rows]]
            tree = subtree(paths(stems, forks), in_tree)
            found = by_depth(advantages[rows], tree, self.eps)
            for row, of_nodes, counts in zip(rows.tolist(), found, sharers(tree, trained), strict=True):
                nodes[row] = [(at, a / max(k, 1)) for (at, a), k in zip(of_nodes, counts, strict=True)]
        return [part.masked(self._spread(part, nodes)) for part in parts]

    def _spread(self, part: Batch, nodes: dict[int, list[tuple[int, float]]]) -> Tensor:
        out = torch.zeros_like(part.mu)
        response = (part.versions >= 0).long().cpu()
        bounds = part.cu_seqlens.tolist()
        for row, start, end in zip(part.rows.tolist(), bounds[:-1], bounds[1:], strict=True):
            first = end - int(response[start:end].sum())
            for at, advantage in nodes.get(row, []):
                out[min(first + at, end) : end] = advantage
        return out
