"""Packing of samples into micro-batches of bounded size, balanced over data-parallel ranks. Pure.

A micro-batch contains whole sequences. Their common first tokens are computed once if the model and its layout allow
it (rlsys/trainer/prefixes.py); the budget limits the computed tokens.

Shapes: T tokens of one micro-batch, S sequences in it. Per-token fields are aligned to their token: `logp[t]` is the
log-prob of `tokens[t]` given its predecessors in its own sequence; a sequence's first token has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.core.errors import RunError
from rlsys.core.spans import RouteSpan
from rlsys.core.types import TokenSequence
from rlsys.segments import support, teacher_logprobs
from rlsys.segments.records import SegmentReader, TokenArrays
from rlsys.segments.route_records import LayerRoutes, read_routes
from rlsys.trainer.bins import plan_bins
from rlsys.trainer.prefixes import Prefixes, in_order

Values = Sequence[float] | NDArray[Any]
"""One for each response token."""
ReadRoutes = Callable[[Sequence[RouteSpan]], Sequence[RouteSpan | LayerRoutes]]
PrefixSharing = Literal["no", "yes", "by route"]
"""Whether a micro-batch computes common first tokens of its sequences once; by route: only if an engine routed them
equally."""


@dataclass(frozen=True)
class TrainSample:
    """One sequence; mu, versions, `trained` and `behaviour` have one entry per response token.

    `trained` None: all tokens; `behaviour` empty: unknown. `row` is the sample's row in the sample table,
    `sequence_index` the sequence's index within its sample. `turns`: the index of each token's turn within the
    sample, -1 if no model sampled it; empty: all tokens are of turn 0. `transferred`: mu is of the same response to
    another prompt. `support`: for each response token the ids of the sampling mask (rlsys/segments/support.py);
    empty: sampling kept all ids. `teacher_logprobs`: from a teacher engine (rlsys/segments/teacher_logprobs.py).
    """

    prompt_ids: Sequence[int]
    response_ids: Values
    mu: Values
    versions: Values
    row: int = -1
    trained: Values | None = None
    behaviour: Values = ()
    routes: Sequence[RouteSpan | LayerRoutes] = ()
    transferred: bool = False
    support: bytes | bytearray = b""
    teacher_logprobs: bytes = b""
    sequence_index: int = 0
    turns: Values = ()

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        trained = n if self.trained is None else len(self.trained)
        per_token = {"mu": len(self.mu), "versions": len(self.versions), "trained": trained}
        if not self.prompt_ids or not n or set(per_token.values()) != {n}:
            counts_text = ", ".join(f"{count} {name}" for name, count in per_token.items())
            raise ValueError(
                f"{len(self.prompt_ids)} prompt ids, {n} response ids, {counts_text}: expected a prompt and a "
                "response that are not empty, and one value per response token"
            )

    @classmethod
    def of(
        cls,
        sample: TokenSequence,
        row: int = -1,
        arrays: TokenArrays | TokenSequence | None = None,
        load_routes: ReadRoutes = list,
        first_turn: int = 0,
    ) -> TrainSample:
        """Return the train sample of a sequence.

        Args:
            sample: The sequence.
            row: Its row in the sample table.
            arrays: Its tokens, if the sample does not hold them.
            load_routes: Loads routes that are stored elsewhere.
            first_turn: Index of the sequence's first turn within its sample.
        """
        arrays = sample if arrays is None else arrays
        behaviour = np.full(sample.tokens, np.nan, np.float32)
        behaviour[: len(arrays.behaviour)] = arrays.behaviour
        lengths = [span.end - span.start for span in sample.spans]
        transferred = sample.trained_prompt is not None  # then the engine's routes belong to other positions
        turns = np.full(sample.tokens, -1 if sample.observed else first_turn, np.int64)
        if sample.observed:
            for number, turn in enumerate(sample.turns(), first_turn):
                turns[turn.start : turn.end] = number
        return cls(
            sample.trained_prompt or sample.prompt_ids, arrays.response_ids, arrays.mu,
            np.repeat([span.version for span in sample.spans], lengths), row,
            sample.trained() if sample.observed or sample.masked else None,
            behaviour, () if transferred else load_routes(arrays.routes), transferred, arrays.support,
            arrays.teacher_logprobs, sample.sequence, turns,
        )  # fmt: skip

    def read(self) -> TrainSample:
        return self

    @property
    def prompt(self) -> Sequence[int]:
        return self.prompt_ids

    @property
    def routed_by(self) -> tuple[int, bool]:
        return int(self.versions[0]), self.transferred

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class LazySample:
    """A sequence whose tokens only the rank that trains it reads."""

    sample: TokenSequence
    row: int
    segments: SegmentReader
    layers: Sequence[int] | None = None
    """Layers of the model whose routes the rank replays; None: all."""
    first_turn: int = 0

    def read(self) -> TrainSample:
        """Read the tokens.

        Raises:
            RunError: a segment is missing or damaged.
        """
        return TrainSample.of(
            self.sample, self.row, self.segments.arrays(self.sample), self._routes, self.first_turn
        )

    def _routes(self, spans: Sequence[RouteSpan]) -> list[RouteSpan | LayerRoutes]:
        if self.layers is not None and not self.layers:
            return []
        read = self.segments.bytes_at
        return [s if s.location is None else read_routes(read, s, self.layers) for s in spans]

    @property
    def prompt(self) -> Sequence[int]:
        return self.sample.trained_prompt or self.sample.prompt_ids

    @property
    def routed_by(self) -> tuple[int, bool]:
        return self.sample.spans[0].version, self.sample.trained_prompt is not None

    def __len__(self) -> int:
        return len(self.prompt) + self.sample.tokens


@dataclass(kw_only=True)
class MicroBatch(Batch):
    """Packed sequences of one micro-batch. `mask` is 1 on response tokens that are trained.

    `support_at`, `support_ids`: for each token that was drawn from a part of the vocabulary, its index and the ids of
    that part, including its own. None: all tokens were drawn from the whole vocabulary.

    `prefixes`: for each sequence, the number of its first tokens that are computed for the sequence before it; empty:
    each sequence computes all of its own.

    `routes`: the engine's experts at packed positions. `own_routes`: the trainer's own, recorded by the first scoring
    pass if replay requires it; by virtual pipeline stage, for the tokens of this rank's routers.
    """

    copy: bool = False  # a masked copy, which gives this rank as many micro-batches as the others
    targets: Tensor | None = (
        None  # [T] ids whose log-probs are computed instead of the tokens'; None: the tokens
    )
    prefixes: list[int] = field(default_factory=list)  # [S]
    support_at: Tensor | None = None  # [N] in 0 .. T-1
    support_ids: Tensor | None = None  # [N]
    routes: list[RouteSpan | LayerRoutes] = field(default_factory=list)
    own_routes: dict[int, Tensor] = field(default_factory=dict)
    teachers: Tensor | None = None  # [rows of the step] which of several teachers each sample has
    teacher_ids: Tensor | None = None  # [T, K] a teacher's most probable ids in place of each token
    teacher_logp: Tensor | None = None  # [T, K]

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> MicroBatch:
        """Build a batch of one sequence `[T]` to be scored, all of it prompt."""
        return cls.of_sequences([tokens])

    @classmethod
    def of_sequences(cls, sequences: Sequence[Tensor]) -> MicroBatch:
        """Build a batch of sequences `[T_i]` to be scored side by side, all of them prompt."""
        tokens = torch.cat(list(sequences))
        n, zeros = len(tokens), torch.zeros(len(tokens))
        return cls(
            tokens=tokens,
            cu_seqlens=torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32),
            rows=torch.full((len(sequences),), -1),
            sequence_index=[0] * len(sequences),
            mu=zeros,
            mask=zeros,
            versions=torch.full((n,), -1),
        )

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and response."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @property
    def computed_lengths(self) -> list[int]:
        """Computed tokens of each sequence."""
        lengths = self.sequence_lengths
        return [n - k for n, k in zip(lengths, self.prefixes, strict=True)] if self.prefixes else lengths

    @property
    def real_tokens(self) -> int:
        """Number of tokens including prompts; 0 for a copy."""
        return 0 if self.copy else len(self.tokens)

    @property
    def response_tokens(self) -> int:
        """The micro-batch's share of the denominator, fixed before anything else is masked."""
        return int(self.mask.sum())


def pack(
    samples: Sequence[TrainSample | LazySample],
    token_budget: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    multiple: int = 1,
    crossover: float = math.inf,
    shared: PrefixSharing = "no",
) -> list[MicroBatch]:
    """Pack samples into the micro-batches of one rank.

    Every rank gets the same number of micro-batches, because expert all-to-alls run in lockstep. The longest
    sequence is placed first, always into the cheapest bin with enough space; a sequence of n tokens costs n + n^2 /
    `crossover` (rlsys.convert.flops). The number of bins is the smallest that suffices and gives each of `dp_size`
    ranks a multiple of `multiple`, as interleaved pipelines require. Bins of the same index have about the same cost
    on all ranks. A sample longer than `token_budget` gets a separate bin. A bin without samples becomes a masked
    copy of the shortest one. The plan depends only on lengths, prompts and sizes, which are equal on all ranks; a
    rank reads only its own samples.
    """
    if not samples:
        raise ValueError("pack needs at least one sample")
    lengths = [len(s) for s in samples]
    prefixes = Prefixes.none(lengths) if shared == "no" else Prefixes.of(samples, shared == "by route")
    bins = plan_bins(prefixes, token_budget, dp_rank, dp_size, multiple, crossover)
    shortest = samples[max(range(len(samples)), key=lambda i: (-lengths[i], i))]
    batches = [build([samples[i].read() for i in b] or [shortest.read()], shared) for b in bins]
    for members, batch in zip(bins, batches, strict=True):
        if not members:
            batch.mask, batch.copy = torch.zeros_like(batch.mask), True
    return batches


@dataclass(frozen=True)
class Packer:
    """Callable that packs samples for one rank of a layout, see `pack`. Every rank passes the same samples."""

    token_budget: int
    dp_rank: int
    dp_size: int
    multiple: int
    crossover: float
    shared: PrefixSharing = "no"

    def __call__(self, samples: Sequence[TrainSample | LazySample]) -> list[MicroBatch]:
        """Return this rank's micro-batches."""
        return pack(
            samples,
            self.token_budget,
            self.dp_rank,
            self.dp_size,
            self.multiple,
            self.crossover,
            self.shared,
        )


def build(samples: Sequence[TrainSample], shared: PrefixSharing = "no") -> MicroBatch:
    """Build one micro-batch of all these samples."""
    prefixes: list[int] = []
    if shared != "no":
        samples, prefixes = _order_by_prefix(samples, shared == "by route")
    lengths = [len(s) for s in samples]
    starts = [0, *accumulate(lengths)]

    def per_token(on_prompt: float, values: Iterable[Values | float], dtype: type[np.generic]) -> Tensor:
        out = np.full(starts[-1], on_prompt, dtype)
        for s, start, value in zip(samples, starts, values, strict=False):
            out[start + len(s.prompt_ids) : start + len(s)] = value
        return torch.from_numpy(out)

    tokens = per_token(0, [s.response_ids for s in samples], np.int64)
    for s, start in zip(samples, starts, strict=False):
        tokens[start : start + len(s.prompt_ids)] = torch.tensor(s.prompt_ids)
    support_at, support_ids = (
        _support_columns(samples, starts) if any(s.support for s in samples) else (None, None)
    )
    teacher_ids, teacher_logp = (
        _teacher_columns(samples, starts) if all(s.teacher_logprobs for s in samples) else (None, None)
    )
    return MicroBatch(
        tokens=tokens,
        support_at=support_at,
        support_ids=support_ids,
        teacher_ids=teacher_ids,
        teacher_logp=teacher_logp,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        prefixes=prefixes,
        rows=torch.tensor([s.row for s in samples]),
        sequence_index=[s.sequence_index for s in samples],
        mu=per_token(0.0, [s.mu for s in samples], np.float32),
        mask=per_token(0.0, [1.0 if s.trained is None else s.trained for s in samples], np.float32),
        versions=per_token(-1, [s.versions for s in samples], np.int64),
        turns=per_token(-1, [s.turns if len(s.turns) else 0 for s in samples], np.int64),
        behaviour=per_token(math.nan, [s.behaviour for s in samples], np.float32)
        if all(len(s.behaviour) for s in samples)
        else None,
        transferred=per_token(0, [s.transferred for s in samples], np.bool_)
        if any(s.transferred for s in samples)
        else None,
        routes=[
            replace(span, start=start + span.start, end=start + span.end)
            for s, start in zip(samples, starts, strict=False)
            for span in s.routes
        ],
    )


def _order_by_prefix(samples: Sequence[TrainSample], by_route: bool) -> tuple[list[TrainSample], list[int]]:
    """Order samples so that each shares most with the one before it. Return them and the shared lengths.

    Response tokens with additional data (experts, sampling masks, teacher log-probs) are not shared, because equal
    tokens can have different data.
    """
    tokens = [np.concatenate([s.prompt_ids, np.asarray(s.response_ids)]).astype(np.int64) for s in samples]
    keys = [(s.routed_by, bool(s.routes)) if by_route else () for s in samples]
    limits = [len(s.prompt_ids) if by_route or s.support or s.teacher_logprobs else None for s in samples]
    order, shared = in_order(tokens, keys, limits)
    return [samples[i] for i in order], shared if any(shared) else []


def _support_columns(samples: Sequence[TrainSample], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    parts = [
        (start + len(s.prompt_ids) + rows, ids)
        for s, start in zip(samples, starts, strict=False)
        if s.support
        for rows, ids in [support.decode(s.support, s.response_ids)]
    ]
    at, ids = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    return at, ids


def _teacher_columns(samples: Sequence[TrainSample], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a teacher's ids and log-probs `[T, K]`; 0 at prompts.

    Raises:
        RunError: samples have different K.
    """
    columns = [teacher_logprobs.decode(s.teacher_logprobs, len(s.response_ids)) for s in samples]
    widths = sorted({ids.shape[1] for ids, _ in columns})
    if len(widths) > 1:
        raise RunError(
            f"teacher log-probs have {widths[0]} ids per token in some samples and {widths[-1]} in others; expected "
            "one number in a step (algo.teacher.top_k)"
        )
    all_ids = torch.zeros((starts[-1], widths[0]), dtype=torch.int64)
    all_logp = torch.zeros((starts[-1], widths[0]))
    for s, start, (ids, logp) in zip(samples, starts, columns, strict=False):
        response = slice(start + len(s.prompt_ids), start + len(s))
        all_ids[response], all_logp[response] = (
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logp.copy()),
        )
    return all_ids, all_logp
