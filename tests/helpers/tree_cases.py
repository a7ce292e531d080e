"""A generator that forks, cuts and prunes whatever the model says, and a planner that repairs whatever it said."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rlsys.algo.planners import Accept, AddSamples, Decision, Planner, Prefix
from rlsys.config import Config
from rlsys.core.forks import Forced
from rlsys.core.types import SampleGroup
from rlsys.generators.trees import Tree, TreeGenerator
from rlsys.generators.turns import GenerateTurn


class Bushes(TreeGenerator):
    async def grow(self, tree: Tree) -> None:
        """The root and two branches; one of these is pruned, becomes another one, and the root loses its end."""
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


def bushes(config: Config, tokenizer: object, speak: GenerateTurn) -> Bushes:
    return Bushes(speak)


class Repairing(Planner):
    """Each group gets two more samples, once: they begin with three tokens of its first one, and two others."""

    def limit(self, size: int) -> int:
        return size + 2

    def decide(self, group: SampleGroup) -> Decision:
        if len(group.samples) > 4:
            return Accept()
        prefix_length = min(3, group.samples[0].tokens - 1)
        return AddSamples(2, prefixes=(Prefix(0, prefix_length, (98, 99)),) * 2)


def token_names(stems: Sequence[int], forks: Sequence[int], lengths: Sequence[int]) -> list[list[str]]:
    """Of each sample of a group, its tokens by name: equal where they are shared, and only there. stems: the place of
    the sample that each branches off, -1 for none; forks: at which of its tokens."""
    names: dict[int, list[str]] = {}

    def of(place: int) -> list[str]:
        if place not in names:
            stem = stems[place]
            shared = of(stem)[: forks[place]] if stem >= 0 else []
            names[place] = shared + [f"{place}.{t}" for t in range(len(shared), lengths[place])]
        return names[place]

    return [of(place) for place in range(len(stems))]


def depth_wise_advantages(rewards: Sequence[float], texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """BranchGRPO's advantage of each token of a group, divided among the samples that share it, in float64.

    Token by token from the texts alone: a node is the set of samples with the same prefix, a fork is where that set
    changes, and a node is compared with all nodes behind as many forks.
    """
    everybody = range(len(texts))

    def sharing(i: int, t: int) -> frozenset[int]:
        prefix = list(texts[i][: t + 1])
        return frozenset(j for j in everybody if list(texts[j][: t + 1]) == prefix)

    nodes = [[sharing(i, t) for t in range(len(texts[i]))] for i in everybody]
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
