"""Packing of samples into micro-batches of bounded size, balanced over data-parallel ranks. Pure.

A micro-batch contains whole sequences. It computes their common first tokens once if the model and the layout allow
it (rlsys/trainer/prefixes.py). The token budget limits the number of computed tokens.

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
from rlsys.trainer.prefixes import Prefixes, order_sequences

Values = Sequence[float] | NDArray[Any]
"""One value for each response token."""
ReadRoutes = Callable[[Sequence[RouteSpan]], Sequence[RouteSpan | LayerRoutes]]
"""(routes, of which some are only locations) -> the routes with their experts."""
PrefixSharing = Literal["no", "yes", "by route"]
"""Whether a micro-batch computes the common first tokens of its sequences once. by route: yes, if the engine selected
the same experts for them."""


@dataclass(frozen=True)
class TrainSample:
    """One sequence to train.

    Attributes:
        prompt_ids: Token ids of the prompt.
        response_ids: Token ids of the response.
        mu: Log-prob of each response token, from the engine.
        versions: Weight version that sampled each response token.
        row: The sample's row in the sample table.
        trained: Whether each response token is trained; None: all are.
        behaviour: Log-prob of each response token under the trainer's weights of its version; NaN or empty: unknown.
        routes: Experts that the engine selected.
        transferred: Whether mu belongs to the same response to another prompt.
        support: Ids of the sampling mask at each response token (rlsys/segments/support.py); empty: no token has a
            mask.
        teacher_logprobs: Log-probs from a teacher engine (rlsys/segments/teacher_logprobs.py).
        sequence_index: Index of the sequence within its sample.
        turns: Index of each response token's turn within the sample, -1 if no model sampled the token; empty: all
            tokens belong to turn 0.
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
            row: The row of its sample in the sample table.
            arrays: The tokens of the sequence; None: `sample` contains them.
            load_routes: Reads the experts of routes from segment files.
            first_turn: Index of the sequence's first turn within its sample.
        """
        arrays = sample if arrays is None else arrays
        behaviour = np.full(sample.tokens, np.nan, np.float32)
        behaviour[: len(arrays.behaviour)] = arrays.behaviour
        span_lengths = [span.end - span.start for span in sample.spans]
        transferred = sample.trained_prompt is not None
        turns = np.full(sample.tokens, -1 if sample.observed else first_turn, np.int64)
        if sample.observed:
            for number, turn in enumerate(sample.turns(), first_turn):
                turns[turn.start : turn.end] = number
        return cls(
            prompt_ids=sample.trained_prompt or sample.prompt_ids,
            response_ids=arrays.response_ids,
            mu=arrays.mu,
            versions=np.repeat([span.version for span in sample.spans], span_lengths),
            row=row,
            trained=sample.trained() if sample.observed or sample.masked else None,
            behaviour=behaviour,
            # The engine's routes belong to the positions of the other prompt.
            routes=() if transferred else load_routes(arrays.routes),
            transferred=transferred,
            support=arrays.support,
            teacher_logprobs=arrays.teacher_logprobs,
            sequence_index=sample.sequence,
            turns=turns,
        )

    def read(self) -> TrainSample:
        """Return the sample itself, which contains its tokens."""
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
    """A sequence whose tokens are still in segment files; only the rank that trains it reads them."""

    sample: TokenSequence
    row: int
    segments: SegmentReader
    layers: Sequence[int] | None = None
    """Layers of the model whose routes the rank replays; None: all."""
    first_turn: int = 0
    """Index of the sequence's first turn within its sample."""

    def read(self) -> TrainSample:
        """Read the tokens and the routes of this rank's layers.

        Raises:
            RunError: A segment is missing or damaged.
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

    Attributes:
        copy: Whether this is a masked copy of other sequences, which gives the rank as many micro-batches as the
            others.
        targets: `[T]`, ids whose log-probs are computed in place of the tokens'; None: those of the tokens.
        prefixes: `[S]`, number of first tokens that each sequence shares with the sequence before it, which computes
            them; empty: no tokens are shared.
        support_at: `[N]`, index of the token, 0 to T - 1, for each id in `support_ids`; None: no token has a sampling
            mask.
        support_ids: `[N]`, ids of the tokens' sampling masks, which include the tokens' own ids.
        routes: Experts that the engine selected, at packed positions.
        own_routes: Experts that the trainer's routers selected in the first scoring pass, for the tokens of this
            rank's routers, by virtual pipeline stage. Filled only if replay requires it.
        teachers: `[rows of the sample table]`, number of each sample's teacher; None: there is one teacher.
        teacher_ids: `[T, K]`, the teacher's most probable ids at each token.
        teacher_logp: `[T, K]`, their log-probs.
    """

    copy: bool = False
    targets: Tensor | None = None
    prefixes: list[int] = field(default_factory=list)
    support_at: Tensor | None = None
    support_ids: Tensor | None = None
    routes: list[RouteSpan | LayerRoutes] = field(default_factory=list)
    own_routes: dict[int, Tensor] = field(default_factory=dict)
    teachers: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_logp: Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> MicroBatch:
        """Build a micro-batch of one sequence `[T]` for scoring; no token is trained."""
        return cls.of_sequences([tokens])

    @classmethod
    def of_sequences(cls, sequences: Sequence[Tensor]) -> MicroBatch:
        """Build a micro-batch of sequences, `[T_i]` each, for scoring; no token is trained."""
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
        """Number of tokens of each sequence, prompt and response."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @property
    def computed_lengths(self) -> list[int]:
        """Number of computed tokens of each sequence: those that it does not share with its predecessor."""
        lengths = self.sequence_lengths
        return [n - k for n, k in zip(lengths, self.prefixes, strict=True)] if self.prefixes else lengths

    @property
    def real_tokens(self) -> int:
        """Number of tokens including prompts; 0 for a copy."""
        return 0 if self.copy else len(self.tokens)

    @property
    def response_tokens(self) -> int:
        """Number of trained tokens according to `mask`; 0 for a copy."""
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

    Every rank gets the same number of micro-batches, because expert all-to-alls run in lockstep; it is the smallest
    possible number. Micro-batches with the same index have about the same cost on all ranks. The assignment depends
    only on lengths and prompts, which all ranks know: a rank reads only its own samples.

    Args:
        samples: All samples of the update, in the same order on every rank.
        token_budget: Maximum number of computed tokens of a micro-batch. A longer sample gets a separate one.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        multiple: The number of micro-batches per rank is a multiple of it, as interleaved pipelines require.
        crossover: A sequence of n tokens costs n + n^2 / crossover (rlsys.convert.flops).
        shared: Whether common first tokens are computed once.

    Returns:
        The micro-batches. One without samples is a masked copy of the shortest sample.

    Raises:
        ValueError: `samples` is empty.
    """
    if not samples:
        raise ValueError("samples is empty; expected at least one sample")
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
    """`pack` with the arguments of one rank of a layout."""

    token_budget: int
    dp_rank: int
    dp_size: int
    multiple: int
    crossover: float
    shared: PrefixSharing = "no"

    def __call__(self, samples: Sequence[TrainSample | LazySample]) -> list[MicroBatch]:
        """Return this rank's micro-batches. Every rank must pass the same samples."""
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
    """Build one micro-batch that contains all `samples`."""
    prefixes: list[int] = []
    if shared != "no":
        samples, prefixes = _order_by_prefix(samples, shared == "by route")
    lengths = [len(s) for s in samples]
    starts = [0, *accumulate(lengths)]

    def per_token(prompt_value: float, values: Iterable[Values | float], dtype: type[np.generic]) -> Tensor:
        """Return `[T]`: `prompt_value` at prompts, and each sample's values at its response."""
        packed = np.full(starts[-1], prompt_value, dtype)
        for s, start, value in zip(samples, starts, values, strict=False):
            packed[start + len(s.prompt_ids) : start + len(s)] = value
        return torch.from_numpy(packed)

    tokens = per_token(0, [s.response_ids for s in samples], np.int64)
    for s, start in zip(samples, starts, strict=False):
        tokens[start : start + len(s.prompt_ids)] = torch.tensor(s.prompt_ids)
    support_at, support_ids = _support_columns(samples, starts)
    teacher_ids, teacher_logp = _teacher_columns(samples, starts)
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
        routes=_packed_routes(samples, starts),
    )


def _packed_routes(samples: Sequence[TrainSample], starts: Sequence[int]) -> list[RouteSpan | LayerRoutes]:
    """Return the routes at packed positions; sample i starts at token `starts[i]`."""
    return [
        replace(span, start=start + span.start, end=start + span.end)
        for s, start in zip(samples, starts, strict=False)
        for span in s.routes
    ]


def _order_by_prefix(samples: Sequence[TrainSample], by_route: bool) -> tuple[list[TrainSample], list[int]]:
    """Order samples so that each has the most first tokens in common with the one before it.

    Response tokens with additional data (experts, sampling masks, teacher log-probs) are not shared, because equal
    tokens can have different data.

    Returns:
        The ordered samples, and the number of tokens that each shares with the one before it; empty if no tokens are
        shared.
    """
    tokens = [np.concatenate([s.prompt_ids, np.asarray(s.response_ids)]).astype(np.int64) for s in samples]
    keys = [(s.routed_by, bool(s.routes)) if by_route else () for s in samples]
    limits = [len(s.prompt_ids) if by_route or s.support or s.teacher_logprobs else None for s in samples]
    order, shared = order_sequences(tokens, keys, limits)
    return [samples[i] for i in order], shared if any(shared) else []


def _support_columns(
    samples: Sequence[TrainSample], starts: Sequence[int]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return `support_at` and `support_ids` of the micro-batch; None if no token has a sampling mask.

    Sample i starts at token `starts[i]`.
    """
    if not any(s.support for s in samples):
        return None, None
    parts = [
        (start + len(s.prompt_ids) + rows, ids)
        for s, start in zip(samples, starts, strict=False)
        if s.support
        for rows, ids in [support.decode(s.support, s.response_ids)]
    ]
    tokens, ids = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    return tokens, ids


def _teacher_columns(
    samples: Sequence[TrainSample], starts: Sequence[int]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the teacher's ids and log-probs, `[T, K]` each, with 0 at prompts; None if a sample has none.

    Raises:
        RunError: The samples have different K.
    """
    if not all(s.teacher_logprobs for s in samples):
        return None, None
    columns = [teacher_logprobs.decode(s.teacher_logprobs, len(s.response_ids)) for s in samples]
    widths = sorted({ids.shape[1] for ids, _ in columns})
    if len(widths) > 1:
        raise RunError(
            f"teacher log-probs have {widths[0]} ids per token in some samples and {widths[-1]} in others; expected "
            "the same number in all samples of a step (algo.teacher.top_k)"
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
