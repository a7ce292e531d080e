"""The generator `echo`: trees that branch where the model is unsure (ECHO, entropy and confidence).

Branches are sampled a window at a time. After each window, a branch of high entropy in a group of low confidence
forks at the most uncertain token of the window, into the most probable tokens that were not drawn. A branch whose
confidence has fallen too low, or falls window after window, or whose entropy spikes again and again, is pruned, and
its place in the group is free. When the group is full, or after `most_steps` tokens, all go on by sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from typing import Annotated, Any

from pydantic import Field

from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Positive, Section
from rlsys.core.forks import Forced
from rlsys.core.types import Sample
from rlsys.data import Tokenizer
from rlsys.generators.trees import Tree, TreeGenerator, of_all_ids
from rlsys.generators.turns import Speak
from rlsys.router.turn_ends import turn_ends

Share = Annotated[float, Field(ge=0, le=1)]


class EchoParams(Section):
    """rollout.generator_params of the generator `echo`. The paper states no thresholds: these are ours."""

    window: Positive = 16
    """Tokens over which entropy and confidence are smoothed, and after which branches fork."""
    tops: Annotated[int, Field(ge=2, le=128)] = 8
    """Most probable ids from which they are estimated."""
    widest: Annotated[int, Field(ge=2, le=64)] = 4
    """Branches into which one may go on, itself among them."""
    confident: Share = 0.0
    """A branch whose smoothed confidence has once been below this is pruned; 0: none is."""
    falls: Positive = 4
    """So many windows in a row with less confidence than before, and a branch is pruned."""
    spikes: Positive = 4
    """So many windows of more than `spike` entropy, and a branch is pruned."""
    spike: Share = 0.9
    """Entropy of a spike, as a share of the largest there can be."""
    most_steps: Positive = 1024
    """Tokens after which sampling goes on, at the latest."""


class Certainty:
    """Of one token: `entropy`, as a share of the largest possible over the ids that were told and one for all others;
    `confidence`, the probability of the most probable one."""

    def __init__(self, tops: list[tuple[float, int]]) -> None:
        found = [exp(p) for p, _ in tops]
        found.append(max(0.0, 1 - sum(found)))
        self.entropy = -sum(p * log(p) for p in found if p > 0) / log(len(found))
        self.confidence = found[0]


@dataclass(eq=False)
class Branch:
    """`fallen`: windows in a row with less confidence; `spiked`: windows of high entropy."""

    sample: Sample
    confidence: float = 1.0
    lowest: float = 1.0
    fallen: int = 0
    spiked: int = 0
    children: list[Branch] = field(default_factory=list)


def width(entropy: float, confidence: float, widest: int) -> int:
    """Branches into which one goes on: wide where its window is uncertain and the group not confident."""
    return 1 + round((widest - 1) * entropy * (1 - confidence))


class Echo(TreeGenerator):
    goes_on = True

    def __init__(self, config: Config, tokenizer: Tokenizer, speak: Speak, params: EchoParams) -> None:
        super().__init__(speak)
        self._p, self._ends = params, turn_ends(config, tokenizer)
        self._most = min(params.most_steps, config.rollout.max_response_tokens)

    async def grow(self, tree: Tree) -> None:
        found = {id(s): Branch(s) for s in (tree.root, *(s for s, _ in tree.begun))}
        for sample, source in tree.begun:
            found[id(source)].children.append(found[id(sample)])
        branches, start = list(found.values()), 0
        while start < self._most and tree.free:
            end = min(start + self._p.window, self._most)
            going = [b for b in branches if not self._ends.is_ended(b.sample.response_ids)]
            await tree.grow([b.sample for b in going], end, self._p.tops, greedy=False)
            going = [
                b for b in going if b.sample.tokens >= end and not self._ends.is_ended(b.sample.response_ids)
            ]
            if not going:
                break
            read = {id(b): self._read(tree, b, start, end) for b in going}
            for branch in going:
                self._judge(branch, *read[id(branch)])
            self._prune(tree, branches, going)
            going = [b for b in going if b in branches]
            together = sum(b.confidence for b in going) / max(1, len(going))
            for branch in going:
                self._fork(
                    tree, branches, branch, start, end, width(read[id(branch)][0], together, self._p.widest)
                )
            start = end

    def _read(self, tree: Tree, branch: Branch, start: int, end: int) -> tuple[float, float]:
        """Mean entropy and confidence of the window; of tokens of which nothing was told, neither."""
        told = [Certainty(tops) for at in range(start, end) if (tops := tree.tops(branch.sample, at))]
        if not told:
            return 0.0, 1.0
        return sum(c.entropy for c in told) / len(told), sum(c.confidence for c in told) / len(told)

    def _judge(self, branch: Branch, entropy: float, confidence: float) -> None:
        branch.fallen = branch.fallen + 1 if confidence < branch.confidence else 0
        branch.spiked += entropy > self._p.spike
        branch.confidence, branch.lowest = confidence, min(branch.lowest, confidence)

    def _prune(self, tree: Tree, branches: list[Branch], going: list[Branch]) -> None:
        """The root stays: somebody has to."""
        p = self._p
        for branch in going:
            hopeless = branch.lowest < p.confident or branch.fallen >= p.falls or branch.spiked >= p.spikes
            if hopeless and branch.sample is not tree.root and not branch.children:
                branches.remove(branch)
                for other in branches:
                    if branch in other.children:
                        other.children.remove(branch)
                tree.cut(branch.sample, 0)
                self.counts["tree_pruned"] += 1

    def _fork(
        self, tree: Tree, branches: list[Branch], branch: Branch, start: int, end: int, wide: int
    ) -> None:
        """At its most uncertain token of the window."""
        told = [
            (Certainty(tops).entropy, -at)
            for at in range(start, end)
            if (tops := tree.tops(branch.sample, at))
        ]
        if wide < 2 or not told:
            return
        at = -max(told)[1]
        drawn = branch.sample.response_ids[at]
        others = [(p, token) for p, token in tree.tops(branch.sample, at) if token != drawn]
        for logp, token in others[: min(wide - 1, len(tree.free))]:
            made = Branch(tree.fork(branch.sample, at, Forced(token, logp)), branch.confidence, branch.lowest)
            branch.children.append(made)
            branches.append(made)
            self.counts["tree_forks"] += 1


def echo(config: Config, tokenizer: Tokenizer | None, speak: Speak, **params: Any) -> Echo:
    """The generator of `rollout.generator: echo`."""
    tokenizer = of_all_ids(config, tokenizer, "echo")
    return Echo(config, tokenizer, speak, parse_params("rollout.generator_params", EchoParams, params))
