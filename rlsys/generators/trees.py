"""TreeGenerator: base class of generators that generate the responses of a group as branches of a tree.

The first sample of a group that runs grows the tree, and the others wait for it. Every branch is a sample of the
group. Its tokens are saved as they arrive. After the tree is complete, the sample continues with its own seed. A
pruned branch becomes an empty sample again, and its tokens are counted as discarded.

After a restart, a `resumable` generator continues to grow the tree from the saved branches. The top log-probs of
saved tokens are lost, so no new branch forks at these tokens. If a response has ended, or was sampled from the
prompt, the tree was complete before the restart. Other generators do not resume trees: each branch continues on its
own.
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
    """Access to the samples of a group, implemented by Streams (rlsys/worker/streams.py)."""

    async def siblings(self, sample: Sample) -> Sequence[Sample]:
        """Wait until all samples of the group are present. Return them in order; empty: the group grows no tree."""

    def growing(self, samples: Iterable[Sample]) -> AbstractContextManager[None]:
        """Save the tokens of these branches while the context is active."""

    def keep(self, samples: Iterable[Sample]) -> None:
        """Save samples that were forked or truncated. Must be called before they get other tokens."""


class Tree:
    """The samples of one group. Owns the list of free samples.

    Attributes:
        root: the first sample.
        size: number of samples.
        free: samples that are not branches, in the order in which they are used.
        saved_branches: (branch, source) from before a restart, in the order of their forks.
    """

    def __init__(self, samples: Sequence[Sample], generate: GenerateWithTopLogprobs, family: Family) -> None:
        self.root = samples[0]
        self.size = len(samples)
        self.free = [s for s in samples[1:] if not s.tokens]
        self.saved_branches = _saved_branches(samples)
        self._generate = generate
        self._family = family
        self._saved_tokens = {s.sample_id: s.tokens for s in samples}
        """Sample id -> number of tokens from before a restart, which `truncate` keeps."""
        self._tops: dict[int, TopLogprobs] = {}

    async def grow(self, branches: Iterable[Sample], max_tokens: int, tops: int, *, greedy: bool) -> None:
        """Generate tokens of branches.

        Args:
            branches: branches that have not ended.
            max_tokens: number of response tokens at which a branch stops growing.
            tops: number of most probable ids to record for each token.
            greedy: whether to take the most probable ids instead of sampling.
        """

        async def generate_turn(sample: Sample) -> None:
            top_logprobs = self._tops.setdefault(sample.sample_id, TopLogprobs(tops))
            await self._generate(sample, max_tokens, top_logprobs, greedy=greedy)
            sample.status = Status.PARKED  # the turn has ended, the sample has not

        turns = [asyncio.ensure_future(generate_turn(s)) for s in branches if s.tokens < max_tokens]
        try:
            await asyncio.gather(*turns)
        except BaseException:
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            raise

    def tops(self, sample: Sample, position: int) -> list[tuple[float, int]]:
        """Return (log-prob, id) of the most probable ids at a response token; empty if unknown."""
        top_logprobs = self._tops.get(sample.sample_id)
        return top_logprobs.by_token.get(position, []) if top_logprobs else []

    def fork(self, source: Sample, position: int, forced: Forced) -> Sample:
        """Fork a branch. There must be a free sample.

        Args:
            source: the branch to fork.
            position: response token at which the branches differ.
            forced: id of the new branch at `position`.

        Returns:
            The new branch.
        """
        branch = self.free.pop(0)
        fork(source, position, branch, forced)
        self._family.keep([source, branch])  # both, so that no saved branch is longer than its saved source
        return branch

    def truncate(self, sample: Sample, length: int) -> None:
        """Truncate a branch.

        Args:
            sample: the branch.
            length: number of response tokens to keep. If it is 0, the sample becomes free; otherwise tokens from
                before a restart are kept, too.
        """
        if not length:
            self._saved_tokens[sample.sample_id] = 0
        length = max(length, self._saved_tokens[sample.sample_id])
        if length < sample.tokens:
            truncate_sample(sample, length)
            self._family.keep([sample])
        if not length:
            self._tops.pop(sample.sample_id, None)
            self.free.append(sample)


def _saved_branches(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Return (branch, source) in the order of the forks; forks at the same token in the order of their sources."""
    order = {samples[0].index: 0}  # index of a branch in its group -> its rank in the result
    pairs: list[tuple[Sample, Sample]] = []
    forks = [(s.fork.at, s.fork.source, s) for s in samples if s.fork is not None]
    for position in sorted({position for position, _, _ in forks}):
        siblings = [
            (source_index, s) for fork_position, source_index, s in forks if fork_position == position
        ]
        for source_index, sample in sorted(siblings, key=lambda item: (order[item[0]], item[1].index)):
            order[sample.index] = len(order)
            pairs.append((sample, samples[source_index]))
    return pairs


class TreeGenerator:
    """Base class of generators that grow trees. In an evaluation, each response is a single turn."""

    resumable = False
    """Whether `grow` continues a tree from its saved branches (Tree.saved_branches)."""

    def __init__(self, generate_turn: GenerateTurn) -> None:
        self._generate_turn = generate_turn
        self._family: Family | None = None
        self._generate: GenerateWithTopLogprobs | None = None
        self._trees: dict[int, asyncio.Future[None]] = {}
        self.counts: dict[str, int] = {"tree_forks": 0, "tree_pruned": 0}
        """Numbers of forks and of pruned branches since this process started."""

    def attach(self, family: Family, generate: GenerateWithTopLogprobs) -> None:
        """Enable trees. Without this call, every response is a single turn.

        Args:
            family: access to the samples of a group in the ledger.
            generate: generates turns with top log-probs.
        """
        self._family, self._generate = family, generate

    async def grow(self, tree: Tree) -> None:
        """Grow the tree until all branches can continue by sampling."""
        raise NotImplementedError

    def _excludes_tree(self, sample: Sample) -> bool:
        """Return whether the sample has tokens because its group's tree is complete or cannot be resumed."""
        is_branch = sample.index == 0 or sample.fork is not None
        return sample.tokens > 0 and not (is_branch and self.resumable)

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        if self._family is not None and self._generate is not None and sample.sample_id != EVALUATION:
            await self._wait_grown(sample, self._family, self._generate)
        await self._generate_turn(sample)

    async def _wait_grown(self, sample: Sample, family: Family, generate: GenerateWithTopLogprobs) -> None:
        """Wait until the tree of the sample's group is complete. The first sample of a group grows it."""
        samples = await family.siblings(sample)
        if (tree := self._trees.get(sample.group_id)) is not None:
            await asyncio.shield(tree)
            return
        if not samples or any(s.status.terminal or self._excludes_tree(s) for s in samples):
            return
        tree = self._trees[sample.group_id] = asyncio.get_running_loop().create_future()
        try:
            with family.growing(samples):
                await self.grow(Tree(samples, generate, family))
        finally:
            del self._trees[sample.group_id]
            tree.set_result(None)


def untruncated_tokenizer(config: Config, tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """Return the tokenizer, after checking that the run samples from the model's unmodified distribution.

    Args:
        config: config of the run.
        tokenizer: the model's tokenizer; None: the run has none.
        name: name of the generator, for errors.

    Raises:
        UserError: the run changes the distribution, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError(f"rollout.generator = {name!r} requires a tokenizer")
    r = config.rollout
    if r.temperature != 1 or r.top_k is not None:
        raise UserError(
            f"rollout.generator = {name!r} with rollout.temperature = {r.temperature:g} and "
            f"rollout.top_k = {r.top_k}; expected 1 and null, because branches have log-probs of the unmodified "
            "distribution"
        )
    return tokenizer
