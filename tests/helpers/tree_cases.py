"""A tree generator with a fixed sequence of forks and truncations, a planner that adds samples with prefixes, and a
reference implementation of BranchGRPO's advantages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rlsys.algo.planners import Accept, AddSamples, Decision, Planner, Prefix
from rlsys.config import Config
from rlsys.core.forks import Forced
from rlsys.core.types import SampleGroup
from rlsys.generators.trees import Tree, TreeGenerator
from rlsys.generators.turns import GenerateTurn


class FixedTrees(TreeGenerator):
    """Generator of trees with fixed forks and truncations, regardless of the model's tokens."""

    async def grow(self, tree: Tree) -> None:
        """Grow the root and two branches, truncate a branch and the root, and fork again from the root."""
        root = tree.root
        await tree.grow([root], 6, 2, greedy=False)
        if root.tokens < 6:
            return
        first, second = tree.fork(root, 2, Forced(99, -1.0)), tree.fork(root, 4, Forced(98, -2.0))
        await tree.grow([first, second], 9, 2, greedy=False)
        tree.truncate(first, 0)
        tree.truncate(root, 5)
        await tree.grow([root], 8, 2, greedy=False)
        if root.tokens == 8:
            await tree.grow([tree.fork(root, 7, Forced(97, -3.0))], 12, 2, greedy=False)


def fixed_trees(config: Config, tokenizer: object, speak: GenerateTurn) -> FixedTrees:
    return FixedTrees(speak)


class PrefixPlanner(Planner):
    """Planner that adds two samples to each group, with three tokens of its first sample and two others as prefix."""

    def limit(self, size: int) -> int:
        return size + 2

    def decide(self, group: SampleGroup) -> Decision:
        if len(group.samples) > 4:
            return Accept()
        prefix_length = min(3, group.samples[0].tokens - 1)
        return AddSamples(2, prefixes=(Prefix(0, prefix_length, (98, 99)),) * 2)


def token_names(stems: Sequence[int], forks: Sequence[int], lengths: Sequence[int]) -> list[list[str]]:
    """Return names for the tokens of each sample in a group. Two names are equal only if the token is shared.

    Args:
        stems: Index of the sample from which each sample forks, -1 for none.
        forks: Position of the fork in that sample.
        lengths: Number of tokens of each sample.
    """
    names: dict[int, list[str]] = {}

    def sample_names(index: int) -> list[str]:
        if index not in names:
            stem = stems[index]
            shared = sample_names(stem)[: forks[index]] if stem >= 0 else []
            names[index] = shared + [f"{index}.{t}" for t in range(len(shared), lengths[index])]
        return names[index]

    return [sample_names(index) for index in range(len(stems))]


def depth_wise_advantages(rewards: Sequence[float], texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return BranchGRPO's advantage of each token of a group, divided by the number of samples that share the token.

    This float64 reference uses only the texts. A node is the set of samples with the same prefix, and its depth
    is the number of changes of this set along the text. The advantage of a node is relative to all nodes
    of the same depth.
    """
    sample_range = range(len(texts))

    def node_at(i: int, t: int) -> frozenset[int]:
        prefix = list(texts[i][: t + 1])
        return frozenset(j for j in sample_range if list(texts[j][: t + 1]) == prefix)

    nodes = [[node_at(i, t) for t in range(len(texts[i]))] for i in sample_range]
    depths = [
        [sum(path_nodes[k] != path_nodes[k - 1] for k in range(1, t + 1)) for t in range(len(path_nodes))]
        for path_nodes in nodes
    ]
    means = {node: fmean(rewards[m] for m in node) for path_nodes in nodes for node in path_nodes}
    at_depth: dict[int, set[frozenset[int]]] = {}
    for path_nodes, levels in zip(nodes, depths, strict=True):
        for node, depth in zip(path_nodes, levels, strict=True):
            at_depth.setdefault(depth, set()).add(node)
    out = []
    for path_nodes, levels in zip(nodes, depths, strict=True):
        values = []
        for node, depth in zip(path_nodes, levels, strict=True):
            peers = [means[peer] for peer in at_depth[depth]]
            spread = stdev(peers) if len(peers) > 1 else 0.0
            advantage = 0.0 if spread < 1e-6 else (means[node] - fmean(peers)) / (spread + 1e-8)
            values.append(advantage / len(node))
        out.append(values)
    return out
