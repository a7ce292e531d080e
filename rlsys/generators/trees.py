"""Generators that make the responses of a group together, as the branches of a tree.

The first sample of a group that runs grows the tree; the others wait for it. Every branch is a sample of the group:
its tokens are in the ledger as they come, and it goes on with its seed where the tree has left it. What is pruned
becomes an empty sample again, and its tokens are counted as discarded.

After a restart a tree whose generator `goes_on` grows on from its branches, as the ledger has them. What was most
probable in the place of a saved token is not known any more, so nothing new forks there. Once a response has ended,
or one was sampled from the prompt, the tree is done. Other trees are not grown any further: their branches go on as
they are.
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
from rlsys.generators.turns import Look, Speak
from rlsys.router.router import EVALUATION


class Family(Protocol):
    """What a tree needs of the samples around it; Streams has it."""

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        """All samples of its group, in their order, once all are here; none where some never will be."""

    def growing(self, samples: Iterable[Sample]) -> AbstractContextManager[None]:
        """Their tokens are saved for as long as this lasts, whether they run by themselves or not."""

    def keep(self, samples: Iterable[Sample]) -> None:
        """They were forked or cut: save them before they get other tokens."""


class Tree:
    """The samples of one group, of which the first is the root. Owns which of them are free."""

    def __init__(self, samples: Sequence[Sample], look: Look, family: Family) -> None:
        self.root, self.size, self._look, self._family = samples[0], len(samples), look, family
        self.free = [s for s in samples[1:] if not s.tokens]
        """Those that are no branch, in the order in which they become one."""
        self.begun = _begun(samples)
        """Branches of before a restart, in the order in which they were forked, with those that they fork off."""
        self._kept = {s.sample_id: s.tokens for s in samples}
        """So many tokens of each are of before a restart. They may be sampled behind the tree's end, and stay."""
        self._tops: dict[int, TopLogprobs] = {}

    async def grow(self, branches: Iterable[Sample], most: int, tops: int, *, greedy: bool) -> None:
        """Each, unless it has ended, to so many response tokens at the most."""

        async def speak(sample: Sample) -> None:
            told = self._tops.setdefault(sample.sample_id, TopLogprobs(tops))
            await self._look(sample, most, told, greedy=greedy)
            sample.status = Status.PARKED  # at once: the turn has ended, the sample has not

        turns = [asyncio.ensure_future(speak(s)) for s in branches if s.tokens < most]
        try:
            await asyncio.gather(*turns)
        except BaseException:
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            raise

    def tops(self, sample: Sample, at: int) -> list[tuple[float, int]]:
        """(log-prob, id) of what was most probable in the place of its token `at`; empty where nobody told."""
        found = self._tops.get(sample.sample_id)
        return found.by_token.get(at, []) if found else []

    def fork(self, source: Sample, at: int, forced: Forced) -> Sample:
        """A new branch."""
        branch = self.free.pop(0)
        fork(source, at, branch, forced)
        self._family.keep([source, branch])  # a restart finds no branch longer than what it forks off
        return branch

    def cut(self, sample: Sample, at: int) -> None:
        """It ends with token `at` - 1, or where it ended before a restart; with none, it is free again."""
        if not at:
            self._kept[sample.sample_id] = 0
        at = max(at, self._kept[sample.sample_id])
        if at < sample.tokens:
            truncate_sample(sample, at)
            self._family.keep([sample])
        if not at:
            self._tops.pop(sample.sample_id, None)
            self.free.append(sample)


def _begun(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Those that fork off at the same token are in the order of those that they fork off."""
    order, found = {samples[0].index: 0}, list[tuple[Sample, Sample]]()
    forks = [(s.fork.at, s.fork.source, s) for s in samples if s.fork is not None]
    for at in sorted({at for at, _, _ in forks}):
        same = [(place, s) for other, place, s in forks if other == at]
        for place, sample in sorted(same, key=lambda one: (order[one[0]], one[1].index)):
            order[sample.index] = len(order)
            found.append((sample, samples[place]))
    return found


class TreeGenerator:
    """Base of these generators. A subclass grows trees; in an evaluation each response is one turn."""

    goes_on = False
    """`grow` takes a tree with branches of before a restart (Tree.begun), and finds from them where it was."""

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self._family: Family | None = None
        self._look: Look | None = None
        self._trees: dict[int, asyncio.Future[None]] = {}
        self.counts: dict[str, int] = {"tree_forks": 0, "tree_pruned": 0}
        """Since this process began."""

    def attach(self, family: Family, look: Look) -> None:
        """Where samples of the ledger run."""
        self._family, self._look = family, look

    async def grow(self, tree: Tree) -> None:
        """Until its branches go on by themselves."""
        raise NotImplementedError

    def _past(self, sample: Sample) -> bool:
        """Whether it shows that its group's tree is not to be grown any more."""
        branch = sample.index == 0 or sample.fork is not None
        return sample.tokens > 0 and not (branch and self.goes_on)

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        if self._family is not None and self._look is not None and sample.sample_id != EVALUATION:
            await self._grown(sample, self._family, self._look)
        await self._speak(sample)

    async def _grown(self, sample: Sample, family: Family, look: Look) -> None:
        """The tree of its group has been grown when this returns."""
        samples = await family.siblings(sample)
        if (tree := self._trees.get(sample.group_id)) is not None:
            await asyncio.shield(tree)
            return
        if not samples or any(s.status.terminal or self._past(s) for s in samples):
            return
        tree = self._trees[sample.group_id] = asyncio.get_running_loop().create_future()
        try:
            with family.growing(samples):
                await self.grow(Tree(samples, look, family))
        finally:
            del self._trees[sample.group_id]
            tree.set_result(None)


def of_all_ids(config: Config, tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """The tokenizer, where the log-probs of a tree's branches are those that a run samples by. Raises UserError."""
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
