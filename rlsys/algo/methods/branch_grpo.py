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


def subtree(found: Sequence[list[Node]], counted: Sequence[bool]) -> list[list[Node]]:
    """Of the nodes of each sample, those of the tree that the counted samples alone make; none of another sample.

    What the same samples have is one node: nothing forks there any more.
    """
    having: dict[Node, set[int]] = {}
    for place in (place for place, counts in enumerate(counted) if counts):
        for node in found[place]:
            having.setdefault(node, set()).add(place)
    out = []
    for nodes, counts in zip(found, counted, strict=True):
        forks = [node for before, node in pairwise(nodes) if counts and having[before] != having[node]]
        out.append([*nodes[:1], *forks] if counts else [])
    return out


def sharers(found: Sequence[list[Node]], kept: Sequence[bool]) -> list[list[int]]:
    """How many kept samples of a group have each of a sample's nodes, in order."""
    count = Counter(node for nodes, trained in zip(found, kept, strict=True) if trained for node in nodes)
    return [[count[node] for node in nodes] for nodes in found]


def by_depth(
    rewards: Tensor, found: Sequence[list[Node]], eps: float = 1e-8
) -> list[list[tuple[int, float]]]:
    """Of each sample of a group with these nodes, (first token, advantage) of its nodes in order.

    A node's reward is the mean over the samples `[n]` that have it. Its advantage is (R - mean) / (std + eps) among
    the nodes of its depth, std with n - 1; 0 where it is alone at its depth, or all rewards there agree.
    """
    least = max(1e-6, REWARD_TOLERANCE * float(rewards.abs().max()))  # the authors' bound, and rounding
    members: dict[Node, list[int]] = {}
    depth: dict[Node, int] = {}
    for place, nodes in enumerate(found):
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
    return [[(node.start, advantages[node]) for node in nodes] for nodes in found]


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
            counted = samples.column("counted")[rows].tolist()
            kept = counted if samples.kept is None else samples.kept[rows].tolist()
            place = {int(p): i for i, p in enumerate(samples.column("place")[rows])}
            stems = [place.get(int(s), -1) for s in samples.column("stem")[rows]]
            forks = [int(f) for f in samples.column("fork_at")[rows]]
            tree = subtree(paths(stems, forks), counted)
            found = by_depth(advantages[rows], tree, self.eps)
            for row, of_nodes, counts in zip(rows.tolist(), found, sharers(tree, kept), strict=True):
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
