"""Advantages of responses that are branches of a tree: BranchGRPO's, by depth.

Shapes: N samples, T packed tokens. A node is a range of tokens between two positions where branches fork; all samples
that contain it share it. A node's depth is the number of forks before it on the path from the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import groups_of


class Node(NamedTuple):
    """Response tokens from `start` on of the sample `owner`, which is the first sample with these tokens."""

    owner: int
    start: int


def paths(stems: Sequence[int], forks: Sequence[int]) -> list[list[Node]]:
    """Return the nodes of each sample of a group, from the prompt to its end.

    `stems`: the index of the sample that each branches off, -1 for none. `forks`: at which of its tokens.
    """
    owners = list(stems)
    for index, at in enumerate(
        forks
    ):  # a fork within the shared tokens of its stem branches off the stem's stem
        while owners[index] >= 0 and stems[owners[index]] >= 0 and at <= forks[owners[index]]:
            owners[index] = stems[owners[index]]
    cuts: list[set[int]] = [set() for _ in stems]  # where others branch off it
    for owner, at in zip(owners, forks, strict=True):
        if owner >= 0 and at > 0:
            cuts[owner].add(at)

    def path(index: int, end: float) -> list[Node]:
        """Return the nodes of the sample's tokens before `end`."""
        shared = forks[index] if owners[index] >= 0 else 0
        shared_nodes = path(owners[index], min(shared, end)) if shared else []
        starts = [] if shared >= end else [shared, *sorted(c for c in cuts[index] if shared < c < end)]
        return shared_nodes + [Node(index, start) for start in starts]

    return [path(index, float("inf")) for index in range(len(stems))]


def sharers(stems: Sequence[int], forks: Sequence[int]) -> list[list[int]]:
    """Count the samples of a group that share each of a sample's nodes, in order."""
    node_paths = paths(stems, forks)
    count = Counter(node for nodes in node_paths for node in nodes)
    return [[count[node] for node in nodes] for nodes in node_paths]


def by_depth(
    rewards: Tensor, stems: Sequence[int], forks: Sequence[int], eps: float = 1e-8
) -> list[list[tuple[int, float]]]:
    """Return (first token, advantage) of each sample's nodes in order.

    A node's reward is the mean over the samples `[n]` that share it. Its advantage is (R - mean) / (std + eps) among
    the nodes of its depth, std with n - 1; 0 if it is the only one at its depth, or all rewards there are equal.
    """
    node_paths = paths(stems, forks)
    members: dict[Node, list[int]] = {}
    depth: dict[Node, int] = {}
    for index, nodes in enumerate(node_paths):
        for level, node in enumerate(nodes):
            members.setdefault(node, []).append(index)
            depth[node] = level
    advantages: dict[Node, float] = {}
    for level in set(depth.values()):
        nodes = [node for node, at in depth.items() if at == level]
        means = torch.stack([rewards[members[node]].mean() for node in nodes])
        spread = means.std() if len(nodes) > 1 else means.new_zeros(())
        scaled = (means - means.mean()) / (spread + eps) if spread > 1e-6 else torch.zeros_like(means)
        advantages |= dict(zip(nodes, scaled.tolist(), strict=True))
    return [[(node.start, advantages[node]) for node in nodes] for nodes in node_paths]


class BranchGrpo(Advantage):
    """Compare each range of tokens between two forks with the ranges after as many forks, in a tree of responses.

    A range has the mean reward of the samples that share it. BranchGRPO is a method for images, where a depth is a
    denoising step; a depth that is a number of forks is our adaptation to text. Without forks it is GRPO.

    A range that k samples share is trained once, as by the authors (collect_all_transitions): it is in the batch k
    times, each with 1 / k of its advantage.
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
            rows = rows[samples.column("eligible")[rows]]
            index_of = {int(p): i for i, p in enumerate(samples.column("index_in_group")[rows])}
            stems = [index_of.get(int(s), -1) for s in samples.column("stem")[rows]]
            forks = [int(f) for f in samples.column("fork_at")[rows]]
            branch_advantages = by_depth(advantages[rows], stems, forks, self.eps)
            for row, node_advantages, counts in zip(
                rows.tolist(), branch_advantages, sharers(stems, forks), strict=True
            ):
                nodes[row] = [(at, a / k) for (at, a), k in zip(node_advantages, counts, strict=True)]
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
