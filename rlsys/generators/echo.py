"""The generator `echo`: trees that branch where the model is uncertain (ECHO, entropy and confidence).

Branches are sampled in windows. After each window, a branch of high entropy in a group of low confidence forks
at the most uncertain token of the window, into the most probable tokens that were not sampled. A branch is
pruned if its confidence is too low, falls in consecutive windows, or if its entropy spikes repeatedly; its slot
in the group is then free. When the group is full, or after `most_steps` tokens, all branches continue by
sampling.
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
from rlsys.generators.trees import Tree, TreeGenerator, untruncated_tokenizer
from rlsys.generators.turns import GenerateTurn
from rlsys.router.turn_ends import turn_ends

Share = Annotated[float, Field(ge=0, le=1)]


class EchoParams(Section):
    """rollout.generator_params of the generator `echo`. The paper states no thresholds; these are our own."""

    window: Positive = 16
    """Length of a window in tokens: entropy and confidence are averaged over it, and branches fork after it."""
    tops: Annotated[int, Field(ge=2, le=128)] = 8
    """Number of most probable ids from which entropy and confidence are estimated."""
    widest: Annotated[int, Field(ge=2, le=64)] = 4
    """Largest number of branches that continue a branch, including itself."""
    confident: Share = 0.0
    """A branch is pruned when its confidence in a window is below this; 0: never."""
    falls: Positive = 4
    """A branch is pruned after this many consecutive windows in which its confidence fell."""
    spikes: Positive = 4
    """A branch is pruned after this many windows with an entropy above `spike`."""
    spike: Share = 0.9
    """Entropy of a spike, as a share of the maximum."""
    most_steps: Positive = 1024
    """Tokens after which all branches continue by sampling, at the latest."""


class Certainty:
    """Entropy and confidence of one token.

    `entropy`: over the reported ids and the sum of all others, as a share of the maximum. `confidence`: the largest
    probability.
    """

    def __init__(self, tops: list[tuple[float, int]]) -> None:
        probabilities = [exp(p) for p, _ in tops]
        probabilities.append(max(0.0, 1 - sum(probabilities)))
        self.entropy = -sum(p * log(p) for p in probabilities if p > 0) / log(len(probabilities))
        self.confidence = probabilities[0]


@dataclass(eq=False)
class Branch:
    """A branch. `fallen`: consecutive windows in which its confidence fell; `spiked`: windows of high entropy."""

    sample: Sample
    confidence: float = 1.0
    lowest: float = 1.0
    fallen: int = 0
    spiked: int = 0
    children: list[Branch] = field(default_factory=list)


def width(entropy: float, confidence: float, widest: int) -> int:
    """Return the number of branches that continue a branch: more if entropy is high and confidence low."""
    return 1 + round((widest - 1) * entropy * (1 - confidence))


class Echo(TreeGenerator):
    resumable = True

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: EchoParams
    ) -> None:
        super().__init__(generate_turn)
        self._p, self._ends = params, turn_ends(config, tokenizer)
        self._max_tokens = min(params.most_steps, config.rollout.max_response_tokens)

    async def grow(self, tree: Tree) -> None:
        branch_of = {id(s): Branch(s) for s in (tree.root, *(s for s, _ in tree.saved_branches))}
        for sample, source in tree.saved_branches:
            branch_of[id(source)].children.append(branch_of[id(sample)])
        branches, start = list(branch_of.values()), 0
        while start < self._max_tokens and tree.free:
            end = min(start + self._p.window, self._max_tokens)
            growing = [b for b in branches if not self._ends.is_ended(b.sample.response_ids)]
            await tree.grow([b.sample for b in growing], end, self._p.tops, greedy=False)
            growing = [
                b
                for b in growing
                if b.sample.tokens >= end and not self._ends.is_ended(b.sample.response_ids)
            ]
            if not growing:
                break
            read = {id(b): self._read(tree, b, start, end) for b in growing}
            for branch in growing:
                self._judge(branch, *read[id(branch)])
            self._prune(tree, branches, growing)
            growing = [b for b in growing if b in branches]
            group_confidence = sum(b.confidence for b in growing) / max(1, len(growing))
            for branch in growing:
                self._fork(
                    tree,
                    branches,
                    branch,
                    start,
                    end,
                    width(read[id(branch)][0], group_confidence, self._p.widest),
                )
            start = end

    def _read(self, tree: Tree, branch: Branch, start: int, end: int) -> tuple[float, float]:
        """Return mean entropy and confidence of the window; (0, 1) without reported log-probs."""
        certainties = [Certainty(tops) for at in range(start, end) if (tops := tree.tops(branch.sample, at))]
        if not certainties:
            return 0.0, 1.0
        return sum(c.entropy for c in certainties) / len(certainties), sum(
            c.confidence for c in certainties
        ) / len(certainties)

    def _judge(self, branch: Branch, entropy: float, confidence: float) -> None:
        branch.fallen = branch.fallen + 1 if confidence < branch.confidence else 0
        branch.spiked += entropy > self._p.spike
        branch.confidence, branch.lowest = confidence, min(branch.lowest, confidence)

    def _prune(self, tree: Tree, branches: list[Branch], growing: list[Branch]) -> None:
        """Prune branches below the thresholds, except the root and branches with children."""
        p = self._p
        for branch in growing:
            is_bad = branch.lowest < p.confident or branch.fallen >= p.falls or branch.spiked >= p.spikes
            if is_bad and branch.sample is not tree.root and not branch.children:
                branches.remove(branch)
                for remaining in branches:
                    if branch in remaining.children:
                        remaining.children.remove(branch)
                tree.truncate(branch.sample, 0)
                self.counts["tree_pruned"] += 1

    def _fork(
        self, tree: Tree, branches: list[Branch], branch: Branch, start: int, end: int, wide: int
    ) -> None:
        """Fork the branch at the most uncertain token of the window, into `wide` branches including itself."""
        entropies = [
            (Certainty(tops).entropy, -at)
            for at in range(start, end)
            if (tops := tree.tops(branch.sample, at))
        ]
        if wide < 2 or not entropies:
            return
        at = -max(entropies)[1]
        sampled = branch.sample.response_ids[at]
        alternatives = [(p, token) for p, token in tree.tops(branch.sample, at) if token != sampled]
        for logp, token in alternatives[: min(wide - 1, len(tree.free))]:
            child = Branch(
                tree.fork(branch.sample, at, Forced(token, logp)), branch.confidence, branch.lowest
            )
            branch.children.append(child)
            branches.append(child)
            self.counts["tree_forks"] += 1


def echo(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any) -> Echo:
    """Create the generator of `rollout.generator: echo`."""
    tokenizer = untruncated_tokenizer(config, tokenizer, "echo")
    return Echo(
        config, tokenizer, generate_turn, parse_params("rollout.generator_params", EchoParams, params)
    )
