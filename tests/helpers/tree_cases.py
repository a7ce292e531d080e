"""A generator that forks, cuts and prunes whatever the model says, and a planner that repairs whatever it said."""

from __future__ import annotations

from rlsys.algo.planners import Accept, Decision, More, Planner, Prefix
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
        at = min(3, group.samples[0].tokens - 1)
        return More(2, prefixes=(Prefix(0, at, (98, 99)),) * 2)
