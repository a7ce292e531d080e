"""The generator `latr`: look-ahead trees (LATR, Lookahead Tree-Based Rollouts for RLVR).

Each branch of the tree continues with its most probable token. If the second most probable token has a similar
probability, and the group has a free sample, a new branch starts with that token. After `prune_after` tokens, a
branch that repeats its parent is pruned together with its own branches. When the group is full and all branches have
been compared with their parents, or after `most_steps` tokens, all branches continue by sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
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

Share = Annotated[float, Field(gt=0, le=1)]
MATHS = "+-*/\\<>=()[]{}_^&%$0123456789"
"""Mathematical characters. A branch is kept if its parent continues with one of them, because the results differ."""


class LatrParams(Section):
    """rollout.generator_params of the generator `latr`."""

    second: Share = 0.15
    """A branch forks only if the probability of the second most probable token is above this value."""
    max_gap: Share = 0.25
    """A branch forks only if the difference of the two highest probabilities is below this value."""
    prune_after: list[Positive] = Field(default=[20, 30, 50], min_length=1)
    """Ages, in tokens, at which a branch is compared with its parent."""
    suffix: Share = 0.2
    """A branch is pruned if a suffix of more than this share of its tokens occurs in its parent, or vice versa."""
    rouge: Share = 0.5
    """A branch is pruned if its ROUGE-L with its parent is above this value."""
    most_steps: Positive = 1024
    """Largest number of tokens of the tree. Afterwards all branches continue by sampling."""
    share: Share = 1.0
    """Share of a group's samples that may be branches. The others are sampled from the prompt."""
    chunk: Positive = 16
    """Tokens per request. A larger number needs fewer requests, but discards more tokens beyond the tree's end."""


@dataclass(eq=False)
class Branch:
    """A branch of the tree.

    Attributes:
        birth: position of its first token that differs from its parent; 0 for the root.
        is_ended: whether its response has ended.
    """

    sample: Sample
    birth: int = 0
    parent: Branch | None = None
    is_ended: bool = False
    children: list[Branch] = field(default_factory=list)


def restore_branches(tree: Tree) -> list[Branch]:
    """Return the root and the saved branches of a tree, linked with their parents."""
    root = Branch(tree.root)
    branch_of = {id(tree.root): root}
    for sample, _ in tree.saved_branches:
        branch_of[id(sample)] = Branch(sample, sample.fork.at if sample.fork is not None else 0)
    for sample, source in tree.saved_branches:
        branch, parent = branch_of[id(sample)], branch_of[id(source)]
        branch.parent = parent
        parent.children.append(branch)
    return list(branch_of.values())


class Latr(TreeGenerator):
    resumable = True

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: LatrParams
    ) -> None:
        super().__init__(generate_turn)
        self._p = params
        self._decode = tokenizer.decode
        self._ends = turn_ends(config, tokenizer)
        self._budget = config.rollout.max_response_tokens

    async def grow(self, tree: Tree) -> None:
        p = self._p
        max_branches = max(1, round(p.share * tree.size))
        branches, step = restore_branches(tree), 0
        for step in range(min(p.most_steps, self._budget)):
            samples_to_grow = [b.sample for b in branches if not b.is_ended and b.sample.tokens <= step]
            if samples_to_grow:
                limit = min((step // p.chunk + 1) * p.chunk, p.most_steps, self._budget)
                await tree.grow(samples_to_grow, limit, 2, greedy=True)
            for branch in branches:
                branch.is_ended |= branch.sample.tokens <= step
            self._fork(tree, branches, step, max_branches)
            self._prune(tree, branches, step)
            for branch in branches:
                ids = branch.sample.response_ids
                branch.is_ended |= len(ids) <= step or self._ends.is_ended(
                    ids[max(0, step - self._ends.reach) : step + 1]
                )
            all_compared = all(b.birth + max(p.prune_after) < step for b in branches)
            if all(b.is_ended for b in branches) or (len(branches) >= max_branches and all_compared):
                break
        for branch in branches:
            if not branch.is_ended:
                tree.truncate(branch.sample, step + 1)

    def _fork(self, tree: Tree, branches: list[Branch], step: int, max_branches: int) -> None:
        """Fork branches at token `step` where the two most probable tokens are similar, up to `max_branches`."""
        for branch in list(branches):
            if branch.is_ended or len(branches) >= max_branches or not tree.free:
                continue
            tops = tree.tops(branch.sample, step)
            if len(tops) < 2:
                continue
            (first_logp, _), (second_logp, second_id) = tops[:2]
            gap = exp(first_logp) - exp(second_logp)
            if exp(second_logp) > self._p.second and gap < self._p.max_gap:
                sample = tree.fork(branch.sample, step, Forced(second_id, second_logp))
                new_branch = Branch(sample, step, branch)
                branch.children.append(new_branch)
                branches.append(new_branch)
                self.counts["tree_forks"] += 1

    def _prune(self, tree: Tree, branches: list[Branch], step: int) -> None:
        """Prune branches that repeat their parents, with their own branches, at the ages `prune_after`."""
        ages = {step + 1 - age for age in self._p.prune_after}
        to_prune = [
            b for b in branches if b.parent is not None and b.birth in ages and self._repeats(b, step)
        ]
        while to_prune:
            branch = to_prune.pop()
            to_prune += branch.children
            if branch in branches:
                branches.remove(branch)
                assert branch.parent is not None
                branch.parent.children.remove(branch)
                tree.truncate(branch.sample, 0)
                self.counts["tree_pruned"] += 1

    def _repeats(self, branch: Branch, step: int) -> bool:
        """Return whether a branch repeats its parent up to token `step`, by a common suffix or ROUGE-L."""
        assert branch.parent is not None
        ids = list(branch.sample.response_ids[branch.birth : step + 1])
        parent_ids = list(branch.parent.sample.response_ids[branch.birth : step + 1])
        if (
            len(ids) != len(parent_ids)
            or self._ends.is_ended(ids)
            or self._ends.is_ended(parent_ids)
            or branch.is_ended
            or branch.parent.is_ended
        ):
            return False
        if self._decode(parent_ids[:1]).strip() in MATHS:
            return False
        return suffix_match(ids, parent_ids) > self._p.suffix or rouge_l(ids, parent_ids) > self._p.rouge


def suffix_match(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the length of the longest suffix of one sequence that occurs in the other, divided by their length.

    Args:
        a: token ids.
        b: the same number of token ids.
    """
    return max(_longest_suffix(a, b), _longest_suffix(b, a)) / len(a)


def _longest_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest suffix of `a` that occurs in `b`."""
    previous, longest = [0] * (len(b) + 1), 0
    for length, token in enumerate(reversed(a), start=1):
        current = [0] * (len(b) + 1)
        for i in range(len(b)):  # current[i]: the last `length` tokens of `a` begin at b[i]
            if b[i] == token and (length == 1 or previous[i + 1]):
                current[i] = 1
        if not any(current):
            break
        previous, longest = current, length
    return longest


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """Return ROUGE-L of two sequences of token ids: the F1 score of their longest common subsequence (Lin 2004)."""
    row = [0] * (len(a) + 1)
    for token in b:
        diagonal = 0  # row[i] before this token
        for i, token_a in enumerate(a):
            above = row[i + 1]
            row[i + 1] = diagonal + 1 if token_a == token else max(above, row[i])
            diagonal = above
    return 2 * row[-1] / (len(a) + len(b))


def latr(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any) -> Latr:
    """Create the generator of `rollout.generator: latr`. `params`: fields of LatrParams.

    Raises:
        UserError: a parameter is invalid, there is no tokenizer, or the run changes the sampling distribution.
    """
    tokenizer = untruncated_tokenizer(config, tokenizer, "latr")
    return Latr(
        config, tokenizer, generate_turn, parse_params("rollout.generator_params", LatrParams, params)
    )
