"""Tensors for plug-ins: a table of all samples of a step, and packed tokens of this rank's sequences.

Shapes: N samples of the step, R rewards per sample, K turns of the sample with most, S sequences and T tokens of one
packed batch. The log-prob at a position is that of the position's token, given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.algo.segments import merge_close, sum_by
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup, Status


def check_floating(name: str, values: Tensor) -> None:
    """Check that a tensor has a floating-point type; integers would round results to whole numbers.

    Raises:
        ValueError: it has another type.
    """
    if not values.is_floating_point():
        raise ValueError(
            f"{name} has type {values.dtype}; expected a floating-point type: use {name}.float()"
        )


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Table of the samples of a step, with one row per sample. Every rank has the same table.

    A sample of several sequences is one row, so group sizes, baselines and lengths do not depend on the number of
    sequences of a response. Optional columns are set if a plug-in needs them.
    """

    rewards: Tensor  # [N], or [N, R] named rewards; equal within a group if they differ only by rounding
    group_ids: Tensor  # [N] integers, any order
    lengths: Tensor  # [N] trained response tokens of all sequences, before any selection
    step: int = 0  # number of train steps before this one, for schedules
    sample_ids: Tensor | None = None  # [N]
    prompt_index: Tensor | None = None  # [N]
    truncated: Tensor | None = None  # [N] bool
    answers: Tensor | None = None  # [N] a stable hash of the canonical answer; -1: no answer
    log_likelihood: Tensor | None = None  # [N] mean mu over the response
    tool_penalty: Tensor | None = None  # [N] in [0, 2]
    turn_rewards: Tensor | None = None  # [N, K] rewards of turns, sequence by sequence; 0 after the last turn
    turn_matches: Tensor | None = None  # [N, K] bool: the turn matches the given trajectory
    turn_counts: Tensor | None = None  # [N] number of turns, at most K
    transferred: Tensor | None = None  # [N] bool: drawn from a rewritten prompt
    index_in_group: Tensor | None = None  # [N]
    stem: Tensor | None = None  # [N] index_in_group of the sample that this one branches off; -1: none
    fork_at: Tensor | None = None  # [N] number of response tokens shared with that sample
    eligible: Tensor | None = (
        None  # [N] bool: not dropped before the advantages; None until the selectors have acted
    )
    selected: Tensor | None = None  # [N] bool: not dropped by any selector; None until all have acted
    log_weight: Tensor | None = None  # [N] sum over tokens of (old - mu)
    score_norm: Tensor | None = None  # [N] sum over tokens of |grad of log pi by the logits|^2
    kl: Tensor | None = None  # [N, 3] sums over tokens of k1, k2, k3 of old against ref

    def __post_init__(self) -> None:
        if not isinstance(self.rewards, Tensor) or self.rewards.dim() not in (1, 2):
            raise ValueError(f"rewards = {self.rewards!r:.80}: expected a tensor of shape [N] or [N, R]")
        check_floating("rewards", self.rewards)
        if self.group_ids.dim() != 1:
            raise ValueError(f"group_ids has shape {tuple(self.group_ids.shape)}; expected [N]")
        n = len(self.rewards)
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, Tensor) and value.shape[:1] != (n,):
                raise ValueError(
                    f"{column.name} has shape {tuple(value.shape)}; expected {n} rows, as rewards have"
                )
        if n:
            columns = [self._merged(c, c.abs()) for c in self.rewards.reshape(n, -1).unbind(1)]
            object.__setattr__(self, "rewards", torch.stack(columns, 1).view_as(self.rewards))

    def _merged(self, rewards: Tensor, scale: Tensor) -> Tensor:
        """Return rewards `[N]` in which rewards of a group that are equal up to rounding are equal."""
        return merge_close(rewards, self.group_ids, scale, REWARD_TOLERANCE)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def reward(self) -> Tensor:
        """Reward of each sample, `[N]`: the sum of its named rewards."""
        if self.rewards.dim() == 1:
            return self.rewards
        return self._merged(self.rewards.sum(1), self.rewards.abs().sum(1))

    def column(self, name: str) -> Tensor:
        """Return a column that a plug-in needs.

        Raises:
            ValueError: the column is not set.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"column {name!r} of the sample table is not set; expected a tensor, because a plug-in needs it"
            )
        assert isinstance(value, Tensor)
        return value

    def take(self, keep: Tensor) -> Samples:
        """Return the table of the rows where `keep` `[N]` bool is true."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        kept_columns: dict[str, Any] = {k: v[keep] for k, v in columns.items() if isinstance(v, Tensor)}
        return replace(self, **kept_columns)

    @classmethod
    def of(cls, groups: Sequence[SampleGroup], step: int = 0) -> Samples:
        """Return the table of complete groups. Named rewards become columns `[N, R]` in alphabetical order.

        Args:
            groups: groups whose samples all have a reward.
            step: number of train steps before this one.

        Raises:
            ValueError: a sample has no reward.
            UserError: samples have rewards with different names.
        """
        samples = [s for group in groups for s in group.samples]
        if missing := [s.sample_id for s in samples if s.reward is None]:
            raise ValueError(
                f"samples {missing[:5]} have no reward; expected one for each sample of a complete group"
            )
        lengths = [sum(q.sampled_tokens for q in s.trained_sequences) for s in samples]
        mu_sums = [sum(q.mu_sum for q in s.trained_sequences) for s in samples]
        rewards = _rewards(samples)
        return cls(
            rewards=rewards if rewards.shape[1] > 1 else rewards[:, 0],
            group_ids=torch.tensor([s.group_id for s in samples]),
            lengths=torch.tensor(lengths),
            step=step,
            sample_ids=torch.tensor([s.sample_id for s in samples]),
            prompt_index=torch.tensor([g.prompt_index for g in groups for _ in g.samples]),
            truncated=torch.tensor([s.status is Status.TRUNCATED for s in samples]),
            log_likelihood=torch.tensor(
                [total / max(n, 1) for total, n in zip(mu_sums, lengths, strict=True)]
            ),
        )


def fork_columns(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return the columns of the signal `forks`, by name."""
    return {
        "index_in_group": torch.tensor([s.index for s in samples]),
        "stem": torch.tensor([-1 if s.fork is None else s.fork.source for s in samples]),
        "fork_at": torch.tensor([0 if s.fork is None else s.fork.at for s in samples]),
    }


def _rewards(samples: Sequence[Sample]) -> Tensor:
    """Return the rewards `[N, R]`, with a column for each name in alphabetical order."""
    named_rewards: list[dict[str, Any]] = [s.named_rewards or {"": s.reward} for s in samples]
    names = sorted(named_rewards[0])
    for sample, rewards in zip(samples, named_rewards, strict=True):
        if sorted(rewards) != names:
            raise UserError(
                f"data.reward: sample {sample.sample_id} has the rewards {sorted(rewards)}, sample "
                f"{samples[0].sample_id} {names}; expected the same names for all samples of a run"
            )
    return torch.tensor([[rewards[name] for name in names] for rewards in named_rewards], dtype=torch.float32)


@dataclass(kw_only=True)
class Batch:
    """Packed sequences of one rank. A sample may have several sequences, possibly on different ranks.

    Log-prob passes set the optional fields from `old` to `sum_pi_squared`, `[T]` each. The objective sets the others.
    """

    tokens: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1]
    rows: Tensor  # [S] row of each sequence in the sample table
    mask: Tensor  # [T] 1 on trained response tokens, else 0
    mu: Tensor  # [T] log-probs of the engine
    versions: Tensor  # [T] weight version that sampled the token; -1 on the prompt
    sequence_index: list[int] = field(
        default_factory=list
    )  # [S] index of each sequence in its sample; empty: sequences of a sample are packed in order
    turns: Tensor | None = (
        None  # [T] index of the token's turn in its sample; -1: the model did not sample it
    )
    transferred: Tensor | None = (
        None  # [T] bool: the response was generated from another prompt, so mu is, too
    )
    version: int = 0  # weight version at the start of this step
    old: Tensor | None = None
    old_is_current: bool = False  # `old` is the detached log-prob of the loss call, and the field is not set
    current: Tensor | None = None
    behaviour: Tensor | None = None  # NaN where it was not stored
    ewma: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    advantages: Tensor | None = None  # [T]
    returns: Tensor | None = None  # [T] targets of a critic
    weight: Tensor | None = None  # [T] weight of the token's loss, from selectors and reducer
    shift: Tensor | None = None  # [T] term added to the anchor
    groups: Tensor | None = None  # [N] group index of each row of the sample table
    sample_lengths: Tensor | None = None  # [N] trained tokens of each row of the sample table
    sample_keys: Tensor | None = None  # [N] keys of random draws (rlsys.algo.draws)
    rewards: Tensor | None = None  # [T] reward of the token's sample, before shaping
    denominator: float = 1.0  # denominator of the batch's optimizer update

    def __post_init__(self) -> None:
        for name in ("mask", "mu", "versions"):
            if getattr(self, name).shape != self.tokens.shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}; expected that of tokens, "
                    f"{tuple(self.tokens.shape)}"
                )
        check_floating("mu", self.mu)
        if len(self.rows) != self.sequences:
            raise ValueError(
                f"rows has {len(self.rows)} entries; expected {self.sequences}, one per sequence"
            )

    def to(self, device: torch.device) -> Self:
        """Return a copy of the batch on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved_fields: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved_fields)

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def ids(self) -> Tensor:
        """Index of each token's sequence, `[T]`."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def keep(self) -> Tensor:
        """Mask of the trained tokens, `[T]` bool."""
        return self.mask > 0

    @property
    def counted_tokens(self) -> Tensor:
        """Mask of the tokens that count in statistics of an update, `[T]` bool: trained, with a weight other than 0.

        If a selector drops a token or its sample, the weight is 0. Before Objective.finish sets the weights, all
        trained tokens count.
        """
        return self.keep if self.weight is None else self.keep & (self.weight != 0)

    @property
    def active(self) -> Tensor:
        """Mask of the counted tokens with an advantage other than 0, `[T]` bool."""
        return self.counted_tokens & (self.signal("advantages") != 0)

    @cached_property
    def lengths(self) -> Tensor:
        """Number of trained tokens of each sequence, `[S]`, at least 1 so that it can be a divisor."""
        return self.lengths_or_zero.clamp(min=1)

    @cached_property
    def lengths_or_zero(self) -> Tensor:
        """Number of trained tokens of each sequence, `[S]`."""
        return sum_by(self.keep.to(self.mu.dtype), self.ids, self.sequences)

    def signal(self, name: str) -> Tensor:
        """Return a field that a plug-in needs, `[T]`.

        Raises:
            ValueError: the field is not set.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch has no {name!r}, which a plug-in needs")
        assert isinstance(value, Tensor)
        return value

    def masked(self, values: Tensor) -> Tensor:
        """Return `values` `[T]` with 0 on tokens that are not trained, even where a value is not finite."""
        return torch.where(self.keep, values, torch.zeros_like(values))

    def per_sequence(self, values: Tensor) -> Tensor:
        """Return the sum of `values` `[T]` over each sequence's trained tokens, `[S]`."""
        return sum_by(self.masked(values), self.ids, self.sequences)

    def in_sample(self, values: Tensor) -> Tensor:
        """Sum `values` `[S]` over the sequences of each sample in this batch; return each sequence's sum, `[S]`."""
        if len(self.rows) == 1:
            return values
        _, index = torch.unique(self.rows.to(values.device), return_inverse=True)
        return sum_by(values, index, self.sequences)[index]

    def expand(self, table: Tensor) -> Tensor:
        """Return each token's entry in `table`, a column `[N]` of the sample table, as `[T]`."""
        return table.to(self.mu)[self.rows.to(self.mu.device)][self.ids]
