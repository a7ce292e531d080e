"""The generator `echo`: trees that branch where the model is uncertain, by entropy and confidence (ECHO).

Branches are sampled in windows of `window` tokens. After each window:

- A branch of high entropy in a group of low confidence forks at the most uncertain token of the window, into the most
  probable tokens that were not sampled.
- A branch is pruned if its confidence is too low, if its confidence fell in several consecutive windows, or if its
  entropy spiked in several windows. Its sample is then free for another branch.

When the group is full, or after `most_steps` tokens, all branches continue by sampling.
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
    """rollout.generator_params of the generator `echo`. The thresholds are ours, because the paper states none."""

    window: Positive = 16
    """Length of a window, in tokens. Entropy and confidence are averages over a window. Branches fork after it."""
    tops: Annotated[int, Field(ge=2, le=128)] = 8
    """Number of most probable ids from which entropy and confidence are estimated."""
    widest: Annotated[int, Field(ge=2, le=64)] = 4
    """Largest number of branches into which a branch forks, including itself."""
    confident: Share = 0.0
    """A branch is pruned if its confidence in a window is below this value. 0: never."""
    falls: Positive = 4
    """A branch is pruned after this many consecutive windows in which its confidence fell."""
    spikes: Positive = 4
    """A branch is pruned after this many windows with an entropy above `spike`."""
    spike: Share = 0.9
    """Entropy above which a window counts as a spike, as a share of the largest possible entropy."""
    most_steps: Positive = 1024
    """Largest number of tokens of the tree. Afterwards all branches continue by sampling."""


class Certainty:
    """Entropy and confidence of the model at one token.

    Attributes:
        entropy: entropy of the most probable ids, with all other ids as one outcome, divided by its largest value.
        confidence: the largest probability.
    """

    def __init__(self, tops: list[tuple[float, int]]) -> None:
        """Compute both from (log-prob, id) of the most probable ids, most probable first."""
        probabilities = [exp(p) for p, _ in tops]
        probabilities.append(max(0.0, 1 - sum(probabilities)))
        self.entropy = -sum(p * log(p) for p in probabilities if p > 0) / log(len(probabilities))
        self.confidence = probabilities[0]


@dataclass(eq=False)
class Branch:
    """A branch of the tree.

    Attributes:
        confidence: confidence in the last window.
        lowest_confidence: lowest confidence of all windows.
        falls: number of windows in a row in which the confidence fell.
        spikes: number of windows with an entropy above `spike`.
    """

    sample: Sample
    confidence: float = 1.0
    lowest_confidence: float = 1.0
    falls: int = 0
    spikes: int = 0
    children: list[Branch] = field(default_factory=list)


def width(entropy: float, confidence: float, widest: int) -> int:
    """Return the number of branches into which a branch forks: more for a higher entropy and a lower confidence.

    Args:
        entropy: mean entropy of the branch in the window, in [0, 1].
        confidence: mean confidence of all growing branches, in [0, 1].
        widest: largest number of branches.
    """
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
            entropies = {}
            for branch in growing:
                entropy, confidence = self._window_means(tree, branch, start, end)
                entropies[id(branch)] = entropy
                self._update(branch, entropy, confidence)
            self._prune(tree, branches, growing)
            growing = [b for b in growing if b in branches]
            group_confidence = sum(b.confidence for b in growing) / max(1, len(growing))
            for branch in growing:
                branch_width = width(entropies[id(branch)], group_confidence, self._p.widest)
                self._fork(tree, branches, branch, start, end, branch_width)
            start = end

    def _window_means(self, tree: Tree, branch: Branch, start: int, end: int) -> tuple[float, float]:
        """Return the mean entropy and confidence of tokens [start, end); (0, 1) if no log-probs are known."""
        certainties = [Certainty(tops) for i in range(start, end) if (tops := tree.tops(branch.sample, i))]
        if not certainties:
            return 0.0, 1.0
        entropy = sum(c.entropy for c in certainties) / len(certainties)
        confidence = sum(c.confidence for c in certainties) / len(certainties)
        return entropy, confidence

    def _update(self, branch: Branch, entropy: float, confidence: float) -> None:
        """Add the mean entropy and confidence of a window to the counts of a branch."""
        branch.falls = branch.falls + 1 if confidence < branch.confidence else 0
        branch.spikes += entropy > self._p.spike
        branch.confidence = confidence
        branch.lowest_confidence = min(branch.lowest_confidence, confidence)

    def _prune(self, tree: Tree, branches: list[Branch], growing: list[Branch]) -> None:
        """Prune branches below the thresholds, except the root and branches with children."""
        p = self._p
        for branch in growing:
            is_uncertain = (
                branch.lowest_confidence < p.confident or branch.falls >= p.falls or branch.spikes >= p.spikes
            )
            if is_uncertain and branch.sample is not tree.root and not branch.children:
                branches.remove(branch)
                for remaining in branches:
                    if branch in remaining.children:
                        remaining.children.remove(branch)
                tree.truncate(branch.sample, 0)
                self.counts["tree_pruned"] += 1

    def _fork(
        self, tree: Tree, branches: list[Branch], branch: Branch, start: int, end: int, width: int
    ) -> None:
        """Fork a branch at the most uncertain token of a window.

        The forks begin with the likeliest alternatives to this token.

        Args:
            tree: the tree.
            branches: all branches of the tree; the new ones are appended.
            branch: branch to fork.
            start: index of the window's first response token.
            end: index after the window's last response token.
            width: desired number of branches, including `branch`; the group's free samples limit it.
        """
        entropies = [
            (Certainty(tops).entropy, -i) for i in range(start, end) if (tops := tree.tops(branch.sample, i))
        ]
        if width < 2 or not entropies:
            return
        position = -max(entropies)[1]  # the first of equally uncertain tokens
        sampled_id = branch.sample.response_ids[position]
        alternatives = [(p, token) for p, token in tree.tops(branch.sample, position) if token != sampled_id]
        for logp, token in alternatives[: min(width - 1, len(tree.free))]:
            sample = tree.fork(branch.sample, position, Forced(token, logp))
            child = Branch(sample, branch.confidence, branch.lowest_confidence)
            branch.children.append(child)
            branches.append(child)
            self.counts["tree_forks"] += 1


def echo(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any) -> Echo:
    """Create the generator of `rollout.generator: echo`. `params`: fields of EchoParams.

    Raises:
        UserError: a parameter is invalid, there is no tokenizer, or the run changes the sampling distribution.
    """
    tokenizer = untruncated_tokenizer(config, tokenizer, "echo")
    return Echo(
        config, tokenizer, generate_turn, parse_params("rollout.generator_params", EchoParams, params)
    )
