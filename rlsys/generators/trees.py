"""TreeGenerator: generators that generate the responses of a group together, as branches of a tree.

The first sample of a group that runs grows the tree; the others wait for it. Every branch is a sample of the
group: its tokens are saved as they arrive, and it continues with its seed after the tree. A pruned branch
becomes an empty sample again, and its tokens are counted as discarded.

After a restart a `resumable` generator continues to grow the tree from its saved branches. The top log-probs of
saved tokens are lost, so no new branch forks there. Once a response has ended, or one was sampled from the
prompt, the tree is complete. Other generators do not resume trees: their branches continue as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.forks import Forced, fork, truncate_sample
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.turns import GenerateTurn, GenerateWithTopLogprobs
from rlsys.router.router import EVALUATION


class Family(Protocol):
    """Interface of the samples around a tree, implemented by Streams."""

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        """Return all samples of its group in order, once all are present; none if some never will be."""

    def growing(self, samples: Iterable[Sample]) -> AbstractContextManager[None]:
        """Save the tokens of these samples while the context is active, whether they run on their own or not."""

    def keep(self, samples: Iterable[Sample]) -> None:
        """Save samples that were forked or truncated, before they get other tokens."""


class Tree:
    """The samples of one group, of which the first is the root. Owns the list of free ones."""

    def __init__(self, samples: Sequence[Sample], generate: GenerateWithTopLogprobs, family: Family) -> None:
        self.root, self.size, self._generate, self._family = samples[0], len(samples), generate, family
        self.free = [s for s in samples[1:] if not s.tokens]
        """Samples that are not a branch, in the order in which they become one."""
        self.saved_branches = _saved_branches(samples)
        """(branch, source) from before a restart, in the order of their forks."""
        self._saved_tokens = {s.sample_id: s.tokens for s in samples}
        """Sample id -> tokens from before a restart, which are kept even if sampled after the tree's end."""
        self._tops: dict[int, TopLogprobs] = {}

    async def grow(self, branches: Iterable[Sample], max_tokens: int, tops: int, *, greedy: bool) -> None:
        """Grow each branch that has not ended, up to this many response tokens."""

        async def generate_turn(sample: Sample) -> None:
            top_logprobs = self._tops.setdefault(sample.sample_id, TopLogprobs(tops))
            await self._generate(sample, max_tokens, top_logprobs, greedy=greedy)
            sample.status = Status.PARKED  # at once: the turn has ended, the sample has not

        turns = [asyncio.ensure_future(generate_turn(s)) for s in branches if s.tokens < max_tokens]
        try:
            await asyncio.gather(*turns)
        except BaseException:
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            raise

    def tops(self, sample: Sample, at: int) -> list[tuple[float, int]]:
        """Return (log-prob, id) of the most probable ids at token `at`; empty if unknown."""
        top_logprobs = self._tops.get(sample.sample_id)
        return top_logprobs.by_token.get(at, []) if top_logprobs else []

    def fork(self, source: Sample, at: int, forced: Forced) -> Sample:
        """Create a branch."""
        branch = self.free.pop(0)
        fork(source, at, branch, forced)
        self._family.keep([source, branch])  # a restart finds no branch longer than what it forks off
        return branch

    def truncate(self, sample: Sample, at: int) -> None:
        """Truncate a branch before token `at`, but not before its saved tokens; an empty one is free again."""
        if not at:
            self._saved_tokens[sample.sample_id] = 0
        at = max(at, self._saved_tokens[sample.sample_id])
        if at < sample.tokens:
            truncate_sample(sample, at)
            self._family.keep([sample])
        if not at:
            self._tops.pop(sample.sample_id, None)
            self.free.append(sample)


def _saved_branches(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return the branches with their sources. Forks at the same token are in the order of their sources."""
    order, pairs = {samples[0].index: 0}, list[tuple[Sample, Sample]]()
    forks = [(s.fork.at, s.fork.source, s) for s in samples if s.fork is not None]
    for at in sorted({at for at, _, _ in forks}):
        siblings = [(source_index, s) for fork_at, source_index, s in forks if fork_at == at]
        for source_index, sample in sorted(siblings, key=lambda item: (order[item[0]], item[1].index)):
            order[sample.index] = len(order)
            pairs.append((sample, samples[source_index]))
    return pairs


class TreeGenerator:
    """Base class. A subclass grows trees; in an evaluation each response is one turn."""

    resumable = False
    """`grow` supports a tree with saved branches (Tree.saved_branches), and determines its state from them."""

    def __init__(self, generate_turn: GenerateTurn) -> None:
        self._generate_turn = generate_turn
        self._family: Family | None = None
        self._generate: GenerateWithTopLogprobs | None = None
        self._trees: dict[int, asyncio.Future[None]] = {}
        self.counts: dict[str, int] = {"tree_forks": 0, "tree_pruned": 0}
        """Since this process started."""

    def attach(self, family: Family, generate: GenerateWithTopLogprobs) -> None:
        """Set the objects that run samples of the ledger."""
        self._family, self._generate = family, generate

    async def grow(self, tree: Tree) -> None:
        """Grow the tree until its branches continue on their own."""
        raise NotImplementedError

    def _is_too_late(self, sample: Sample) -> bool:
        """Return whether the sample shows that its group's tree is complete or cannot be resumed."""
        branch = sample.index == 0 or sample.fork is not None
        return sample.tokens > 0 and not (branch and self.resumable)

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        if self._family is not None and self._generate is not None and sample.sample_id != EVALUATION:
            await self._wait_grown(sample, self._family, self._generate)
        await self._generate_turn(sample)

    async def _wait_grown(self, sample: Sample, family: Family, generate: GenerateWithTopLogprobs) -> None:
        """Wait until the tree of its group has been grown, and grow it if this is the first sample."""
        samples = await family.siblings(sample)
        if (tree := self._trees.get(sample.group_id)) is not None:
            await asyncio.shield(tree)
            return
        if not samples or any(s.status.terminal or self._is_too_late(s) for s in samples):
            return
        tree = self._trees[sample.group_id] = asyncio.get_running_loop().create_future()
        try:
            with family.growing(samples):
                await self.grow(Tree(samples, generate, family))
        finally:
            del self._trees[sample.group_id]
            tree.set_result(None)


def untruncated_tokenizer(config: Config, tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """Return the tokenizer, if the log-probs of branches are those that the run samples with.

    Raises:
        UserError: the run truncates the distribution, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError(f"rollout.generator = {name!r}: it needs a tokenizer")
    r = config.rollout
    if r.temperature != 1 or r.top_k is not None:
        raise UserError(
            f"rollout.generator = {name!r} with rollout.temperature = {r.temperature:g} and "
            f"rollout.top_k = {r.top_k}: the log-probs of its branches are those at temperature 1 over all ids; "
            "expected 1 and null"
        )
    return tokenizer
