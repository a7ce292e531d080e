"""Domain types. Standard library only: every process imports this file.

A `TokenSequence` is a prompt and its continuation. The continuation may consist of several segments from
several weight versions and engines; `append` is the only way to extend it, and keeps all per-token arrays at
the same length (invariant 2).

A `Sample` is one response to one prompt, with one reward: a sequence, to which an agent may add others
(`begin`). `sequences` returns all. Counts of samples count responses. A `SampleGroup` is all samples of one
prompt (GRPO's group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from rlsys.core.arrays import LogProbs, TokenIds, log_probs, token_ids
from rlsys.core.spans import Fork, Piece, RouteSpan, TokenSpan, TurnReward, VersionSpan
from rlsys.core.texts import shorten, valid_text


class Status(StrEnum):
    """State of a sample. Terminal: FINISHED, TRUNCATED, CENSORED."""

    PARKED = "parked"  # not in an engine: new (no tokens yet) or interrupted (its tokens are kept)
    IN_FLIGHT = "in_flight"  # running in an engine
    FINISHED = "finished"  # ended by a stop token
    TRUNCATED = "truncated"  # ended by max_response_tokens
    CENSORED = "censored"  # no reward can be given (reward error, refused prompt); never a reward of 0

    @property
    def terminal(self) -> bool:
        return self in (Status.FINISHED, Status.TRUNCATED, Status.CENSORED)


LARGEST_REWARD = 1e18
"""The trainer computes advantages in float32, which can represent its square."""
LONGEST_REASON = 2000
"""Characters of the reason why a sample has no reward: an exception's message may be megabytes long."""


def is_reward(value: object) -> bool:
    """Return whether the value can be trained on: finite and at most LARGEST_REWARD."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD  # False for NaN


class CensorCause(StrEnum):
    """Cause of a sample's missing reward."""

    PROMPT = "prompt"  # it leaves no room for a response, or has an id outside the vocabulary
    ROW = "row"  # its row cannot be read as a prompt
    TOOL = "tool"  # a tool, an agent or an environment failed
    ENGINE = "engine"  # engines crashed on it, or refused it
    REWARD = "reward"  # the reward function raised, hung, or gave no number
    TEACHER = "teacher"  # the teacher refused it, or was unreachable
    DEADLINE = "deadline"  # rollout.group_deadline
    EXCEPTION = "exception"  # an unexpected exception


class GroupState(StrEnum):
    """State of a group in the ledger. Every group ever issued is in exactly one state (invariant 3)."""

    ACTIVE = "active"  # at least one sample is parked or in flight
    READY = "ready"  # all samples terminal, waiting for `take`
    TRAINED = "trained"  # taken by a train step
    FILTERED = "filtered"  # finished, and dropped by a planner
    EXPIRED = "expired"  # older than max_staleness, under the policies drop and wait
    CENSORED = "censored"  # at least one sample has no reward


LARGEST_SEED = 2**31 - 1


@dataclass(slots=True)
class Segment:
    """Tokens that one engine call added to a sample.

    `routes`, `checks`, `checked` and `call_spans` come with the last segment of a call and cover the whole
    call.

    Attributes:
        ids: new token ids.
        mu: the engine's log-prob of each new token.
        spans: weight versions, counted from the segment's first token.
        finish: None while streaming, else "stop", "length" or "abort".
        routes: experts of the call's tokens.
        call_spans: weight versions of the call, if the weights changed during it: while streaming, each
            segment had the version of its last token.
    """

    ids: Sequence[int]
    mu: Sequence[float]
    spans: list[VersionSpan]
    finish: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    routes: RouteSpan | None = None
    call_spans: list[VersionSpan] | None = None
    support: bytes | None = (
        None  # rows of the ids that sampling kept, one a token (rlsys/segments/support.py)
    )
    tops: list[list[tuple[float, int]]] | None = None  # most probable ids of each token, with their log-probs
    id_range: tuple[int, int] | None = None  # smallest and largest id in `support` and `tops`
    rounded: int = 0  # tokens whose log-prob was above 0 because of rounding
    checks: int = (
        0  # speculative decoding: verification passes of the call; `checked`: the tokens that they accepted
    )
    checked: int = 0


@dataclass(slots=True)
class TokenSequence:
    """A prompt and its continuation. `mu[i]` is the engine's log-prob of `response_ids[i]` at sampling.

    Its tokens are in memory, or `pieces` locates them on disk: then `response_ids`, `mu`, `routes`,
    `support`, `teacher_logprobs` and `behaviour` are empty. `spans` are always present, and tile the
    response.

    `routes` is sorted and does not overlap. Positions without a span have no routes: the engine was not asked
    for them, or it died before it returned them; such tokens are trained without routing replay.
    """

    sample_id: int
    group_id: int
    index: int  # place of its sample in the group, 0 .. group_size-1
    prompt_ids: list[int]
    seed: int  # of the engine's sampler; the same after an interruption
    response_ids: TokenIds = field(default_factory=token_ids)
    mu: LogProbs = field(default_factory=log_probs)
    spans: list[VersionSpan] = field(default_factory=list)
    status: Status = Status.PARKED
    resumes: int = 0  # continuations after an interruption with tokens
    # Since its last new token, restored after a restart: engines that died while running it, and server errors.
    deaths: int = 0
    faults: int = 0
    cached_tokens: int = 0  # prompt tokens served from an engine's prefix cache, over all segments
    prefilled_tokens: int = 0  # prompt tokens sent, over all segments
    engine: str | None = None  # url of the engine that holds its prefix
    routes: list[RouteSpan] = field(default_factory=list)
    observed: list[TokenSpan] = field(default_factory=list)  # tokens of tools or environments, not sampled
    # Sampled, but too old to be trained on: set at take.
    masked: list[TokenSpan] = field(default_factory=list)
    trained_prompt: list[int] | None = None
    """The prompt that its response is trained on, if it was sampled from another one (LENS)."""
    support: bytearray = field(default_factory=bytearray)
    """Ids that the sampling mask kept, one row per response token (rlsys/segments/support.py); empty: all."""
    teacher_logprobs: bytes = b""
    """Top-k log-probs of a teacher engine at each response token (rlsys/segments/teacher_logprobs.py). Large: once
    saved, it is in memory only after the sample is loaded."""
    taught: bool = False  # a teacher has scored the whole response
    behaviour: list[float] = field(default_factory=list)
    """The trainer's log-probs of the first response tokens under the weights that sampled them; NaN: not computed."""
    mu_sum: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    sequence: int = 0  # its number in the sample
    parent: int | None = None  # the sequence whose history it continues, rewritten; None: a new one
    aside: bool = False  # whether it is a request outside the main conversation: recorded, never trained
    last_turn: int = 0  # number of its last turn among those of all sequences

    def __post_init__(self) -> None:
        if self.mu:
            self.mu_sum = sum(self.mu)

    @property
    def tokens(self) -> int:
        """Number of response tokens of this sequence, in memory or on disk."""
        return self.spans[-1].end if self.spans else 0

    def append(self, segment: Segment) -> None:
        """Add a segment's tokens and routes.

        Raises:
            ValueError: its arrays are inconsistent; the sample is then unchanged.
        """
        n = len(segment.ids)
        if len(segment.mu) != n:
            raise ValueError(f"sample {self.sample_id}: {n} ids but {len(segment.mu)} log-probs")
        end = 0
        for span in segment.spans:
            if span.start != end or span.end < span.start:
                raise ValueError(
                    f"sample {self.sample_id}: version spans {segment.spans} do not tile [0, {n})"
                )
            end = span.end
        if end != n:
            raise ValueError(f"sample {self.sample_id}: version spans cover {end} of {n} tokens")
        rows = None if segment.support is None else segment.support.count(0)
        if rows is not None and rows != n:
            raise ValueError(f"sample {self.sample_id}: {n} ids but {rows} rows of the sampling mask")
        base = len(self.response_ids)
        if n and base and bool(self.support) != (rows is not None):
            raise ValueError(f"sample {self.sample_id}: only some of its tokens have a sampling mask")
        if segment.call_spans is not None and segment.call_spans[-1].end > base + n:
            raise ValueError(
                f"sample {self.sample_id}: {segment.call_spans} cover more than {base + n} tokens"
            )
        if segment.routes is not None:
            self._check_routes(segment.routes, len(self.prompt_ids) + base + n - 1)
            self.routes.append(segment.routes)
        self.response_ids.extend(segment.ids)
        self.mu.extend(segment.mu)
        self.support.extend(segment.support or b"")
        self.mu_sum = sum(segment.mu, self.mu_sum)
        if segment.call_spans is None:
            self._add_spans(base, segment.spans)
        else:
            self._correct_spans(base + n - segment.call_spans[-1].end, segment.call_spans)

    def _add_spans(self, base: int, spans: list[VersionSpan]) -> None:
        for span in spans:
            if span.end == span.start:
                continue
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == span.version:
                last.end = base + span.end
            else:
                self.spans.append(VersionSpan(span.version, base + span.start, base + span.end))

    def _correct_spans(self, base: int, spans: list[VersionSpan]) -> None:
        """Replace the weight versions of all tokens from `base` on by the engine's final ones."""
        self.spans = [s for s in self.spans if s.start < base]
        if self.spans:
            self.spans[-1].end = min(self.spans[-1].end, base)
        self._add_spans(base, spans)

    def observe(self, ids: Sequence[int]) -> None:
        """Add tokens of a tool or environment, which no model sampled.

        They have mu 0 and the weight version of the token before them, and are never trained.

        Raises:
            ValueError: the model has not sampled a token yet.
            TypeError, OverflowError: not token ids.
        """
        if not self.spans:
            raise ValueError(f"sample {self.sample_id}: an observation before the first token")
        start, end = len(self.response_ids), len(self.response_ids) + len(ids)
        self.response_ids.extend(token_ids(ids))  # all of them or none
        self.mu.extend([0.0] * len(ids))
        if self.support:
            self.support.extend(bytes(len(ids)))  # a mask of the token alone gives log-prob 0, as mu
        self.spans[-1].end = end
        if end > start:
            self.observed.append(TokenSpan(start, end))

    @property
    def observed_last(self) -> bool:
        """Return whether the response ends with an observation, so that the model's next tokens start a new turn."""
        return bool(self.observed) and self.observed[-1].end == self.tokens

    def turns(self) -> list[TokenSpan]:
        """Return the spans of this sequence's response that a model sampled, between observations."""
        starts = [0, *(span.end for span in self.observed)]
        ends = [*(span.start for span in self.observed), self.tokens]
        return [TokenSpan(a, b) for a, b in zip(starts, ends, strict=True) if b > a]

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that a model sampled."""
        return self.tokens - sum(span.end - span.start for span in self.observed)

    @property
    def received_tokens(self) -> int:
        """Number of tokens that engines generated for this sequence, including those that were dropped again."""
        return self.sampled_tokens

    def trained(self) -> list[bool]:
        """Return whether each response token is trained, `[tokens]`."""
        mask = [True] * self.tokens
        for span in (*self.observed, *self.masked):
            mask[span.start : span.end] = [False] * (span.end - span.start)
        return mask

    def _check_routes(self, routes: RouteSpan, last: int) -> None:
        """Check that routes follow the previous ones and end at position `last`."""
        first = self.routes[-1].end if self.routes else 0
        if not first <= routes.start < routes.end == last:
            raise ValueError(
                f"sample {self.sample_id}: routes of positions [{routes.start}, {routes.end}), expected up to "
                f"{last} and from {first} on"
            )
        if routes.location is not None:
            return
        if not routes.experts or len(routes.experts) % (routes.end - routes.start):
            actual = f"{len(routes.experts)} bytes of routes for {routes.end - routes.start} positions"
            raise ValueError(f"sample {self.sample_id}: {actual}")

    def versions(self) -> list[int]:
        """Return the weight version of each response token, `[tokens]`."""
        versions: list[int] = []
        for span in self.spans:
            versions.extend([span.version] * (span.end - span.start))
        return versions


@dataclass(slots=True)
class Sample(TokenSequence):
    """One response to one prompt: its first sequence, references to the others, and the fields of the whole response.

    Its status is that of its first sequence.
    """

    reward: float | None = None  # what advantages see
    named_rewards: dict[str, float] | None = None  # its components, if the reward function names them
    plain_reward: float | None = None  # the reward function's value, if a group reward replaced it
    turn_rewards: list[TurnReward] | None = None
    """Reward of each turn, sequence by sequence, if an environment or the reward function gives them."""
    answer: str | None = None  # the canonical final answer
    censor_reason: str | None = None
    censor_cause: CensorCause | None = (
        None  # not restored after a restart: a censored sample does not run again
    )
    tool_penalty: float = 0.0  # penalty of a response with tools, set at take
    own_prompt: bool = False
    """Whether the sample has another prompt than its group, as agents' samples may."""
    extra_sequences: list[TokenSequence] = field(default_factory=list)
    """The sequences after the first, by number."""
    fork: Fork | None = (
        None  # its origin, if it is a fork of another sample of its group (rlsys/core/forks.py)
    )
    inherited_tokens: int = (
        0  # tokens at its start that count as sampled, but were generated for another sample
    )
    discarded: int = 0  # tokens that were generated for it and dropped again

    @property
    def received_tokens(self) -> int:
        """Number of tokens that engines generated for the first sequence, including those that were dropped again."""
        return self.sampled_tokens - self.inherited_tokens + self.discarded

    @property
    def sequences(self) -> list[TokenSequence]:
        """Return all sequences of the sample, the first one first."""
        return [self, *self.extra_sequences]

    @property
    def trained_sequences(self) -> list[TokenSequence]:
        """Sequences with tokens to train."""
        return [q for q in self.sequences if q.spans and not q.aside] if self.extra_sequences else [self]

    @property
    def all_tokens(self) -> int:
        """Number of response tokens of all sequences."""
        return self.tokens + sum(q.tokens for q in self.extra_sequences)

    @property
    def judged_ids(self) -> Sequence[int]:
        """Token ids for the reward: of all sequences in the order of their last turns."""
        if not self.extra_sequences:
            return self.response_ids
        return [i for q in self._judged for i in q.response_ids]

    @property
    def judged_mask(self) -> list[int]:
        """Mask of `judged_ids`: 1 where the model sampled the token."""
        mask: list[int] = []
        for sequence in self._judged:
            sequence_mask = [1] * sequence.tokens
            for span in sequence.observed:
                sequence_mask[span.start : span.end] = [0] * (span.end - span.start)
            mask += sequence_mask
        return mask

    @property
    def _judged(self) -> list[TokenSequence]:
        if not self.extra_sequences:
            return [self]
        return sorted((q for q in self.sequences if not q.aside), key=lambda q: (q.last_turn, q.sequence))

    def begin(
        self, prompt_ids: Sequence[int], parent: int | None = None, *, aside: bool = False
    ) -> TokenSequence:
        """Add a sequence and return it.

        Args:
            prompt_ids: the prompt of the new sequence.
            parent: number of the sequence whose history it continues, if any.
            aside: whether it is a request outside the main conversation, which is never trained.
        """
        number, ids = 1 + len(self.extra_sequences), token_ids(prompt_ids).tolist()
        sequence = TokenSequence(
            self.sample_id, self.group_id, self.index, ids, 1 + (self.seed + number) % LARGEST_SEED,
            sequence=number, parent=parent, aside=aside,
        )  # fmt: skip
        self.extra_sequences.append(sequence)
        return sequence

    def censor(self, cause: CensorCause, reason: str) -> None:
        """Mark the sample as having no reward. `reason` may be any text: it is sanitised and shortened."""
        self.status, self.censor_cause = Status.CENSORED, cause
        self.censor_reason = shorten(valid_text(str(reason)), LONGEST_REASON)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of the trained sequences."""
        return min((s.version for q in self.trained_sequences for s in q.spans), default=None)


AnySequence = TypeVar("AnySequence", bound=TokenSequence)


def _write_once(name: str) -> property:
    """Return a property that replaces a slot of TokenSequence and rejects a second assignment.

    User code could otherwise change the identity of a sample.
    """
    slot = TokenSequence.__dict__[name]

    def set_once(sequence: TokenSequence, value: object) -> None:
        if hasattr(sequence, name):
            raise AttributeError(f"sample.{name} identifies the sample in the ledger and cannot be changed")
        slot.__set__(sequence, value)

    return property(slot.__get__, set_once)


for _name in ("sample_id", "group_id", "index", "seed", "sequence"):
    setattr(TokenSequence, _name, _write_once(_name))


class Response(str):
    """Text of a response for a reward function: with special tokens, without the stop id.

    Attributes:
        finished: whether the model ended the response itself, with a stop id or a stop text; else it was cut
            off.
        ids: all response tokens, including the stop id.
        mask: for each token 1 if the model sampled it, 0 if a tool, an environment or a user gave it.
        prompt_ids: the tokens before the response.
    """

    finished: bool
    ids: Sequence[int]
    mask: Sequence[int]
    prompt_ids: Sequence[int]

    def __new__(
        cls,
        text: str,
        *,
        finished: bool,
        ids: Sequence[int] = (),
        mask: Sequence[int] | None = None,
        prompt_ids: Sequence[int] = (),
    ) -> Response:
        """Create a response. `mask` None: the model sampled all tokens."""
        response = super().__new__(cls, text)
        response.finished, response.ids, response.prompt_ids = finished, ids, prompt_ids
        response.mask = [1] * len(ids) if mask is None else mask
        return response

    def with_text(self, text: str) -> Response:
        """Return the same response with another text."""
        return Response(text, **self.__getnewargs_ex__()[1])

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        attributes = {
            "finished": self.finished,
            "ids": self.ids,
            "mask": self.mask,
            "prompt_ids": self.prompt_ids,
        }
        return (str(self),), attributes


@dataclass(slots=True)
class Prompt:
    """One problem.

    Attributes:
        index: number of the prompt in its source.
        text: the prompt as text.
        ids: its token ids.
        entry: data that the reward function needs to judge a response.
        question: the user's message, which `algo.prompt` may reword; empty for sources of chats.
        location: FILE:LINE of its record, for messages; empty for sources without records.
    """

    index: int
    text: str
    ids: list[int]
    entry: dict[str, Any]
    question: str = ""
    location: str = ""
    refusal: str = ""
    """Reason why the source could not read the row, with the row's location; `ids` is then empty, and the samples
    are censored with `refusal_cause`."""
    refusal_cause: CensorCause = CensorCause.ROW


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt. `prompt_index` identifies the prompt in its source, so the source needs no state."""

    group_id: int
    prompt_index: int
    samples: list[Sample]
    state: GroupState = GroupState.ACTIVE
    train_step: int | None = None  # the step that took it

    @property
    def done(self) -> bool:
        return all(s.status.terminal for s in self.samples)

    @property
    def oldest_version(self) -> int | None:
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


@dataclass(slots=True)
class LogProbRequest:
    """Request for the trainer's log-probs of response tokens from `start` on, which its current weights sampled."""

    sample: TokenSequence
    start: int


@dataclass(slots=True)
class LogProbResult:
    """The trainer's log-probs of response tokens `start`, `start` + 1, ... of a sample's sequence."""

    sample_id: int
    start: int
    logp: list[float]
    sequence: int = 0


@dataclass(slots=True)
class TrainBatch:
    """Result of `take`: the groups of one train step, and metrics of the rollout."""

    train_step: int
    weight_version: int
    groups: list[SampleGroup]
    metrics: dict[str, int | float]
    sources: list[str] = field(default_factory=list)
    """`data_source` of each group's prompt; empty unless algo.teacher needs it."""
