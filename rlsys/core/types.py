"""Domain types. Standard library only, because each process imports this file.

TokenSequence: a prompt and its continuation, which may consist of segments from several weight versions and engines.
    `append` and `observe` extend it, and keep all per-token arrays at the same length (invariant 2).
Sample: one response to one prompt, with one reward. It is a sequence, to which an agent may add others (`begin`).
SampleGroup: all samples of one prompt (GRPO's group).
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

    PARKED = "parked"  # in no engine: new, or interrupted
    IN_FLIGHT = "in_flight"  # running in an engine
    FINISHED = "finished"  # ended by a stop token
    TRUNCATED = "truncated"  # ended by max_response_tokens
    CENSORED = "censored"  # without a reward, which is not a reward of 0

    @property
    def terminal(self) -> bool:
        return self in (Status.FINISHED, Status.TRUNCATED, Status.CENSORED)


LARGEST_REWARD = 1e18
"""Maximum absolute value of a reward; float32, in which the trainer computes advantages, can represent its square."""
LONGEST_REASON = 2000
"""Maximum number of characters of a censor reason. The message of an exception may have megabytes."""


def is_reward(value: object) -> bool:
    """Return whether a value is a number with an absolute value of at most LARGEST_REWARD."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD  # False for NaN


class CensorCause(StrEnum):
    """Cause of a sample's missing reward."""

    PROMPT = "prompt"  # the prompt is too long for a response, or has an id outside the vocabulary
    ROW = "row"  # the row cannot be read as a prompt
    TOOL = "tool"  # a tool, an agent or an environment failed
    ENGINE = "engine"  # engines crashed while running the sample, or refused it
    REWARD = "reward"  # the reward function raised, exceeded its time limit, or returned no number
    TEACHER = "teacher"  # the teacher refused the sample, or was unreachable
    DEADLINE = "deadline"  # the group exceeded rollout.group_deadline
    EXCEPTION = "exception"  # an unexpected exception


class GroupState(StrEnum):
    """State of a group in the ledger. Each issued group is in exactly one state (invariant 3)."""

    ACTIVE = "active"  # at least one sample is parked or in flight
    READY = "ready"  # all samples are terminal, and `take` can take the group
    TRAINED = "trained"  # a train step has taken the group
    FILTERED = "filtered"  # a planner has dropped the finished group
    EXPIRED = "expired"  # older than max_staleness, under the policies drop and wait
    CENSORED = "censored"  # at least one sample has no reward


LARGEST_SEED = 2**31 - 1


@dataclass(slots=True)
class Segment:
    """Tokens that an engine added to a sequence: a whole call, or a part of a streamed call.

    The last segment of a call has `routes`, `checks`, `checked` and `call_spans`, for the whole call.

    Attributes:
        ids: new token ids.
        mu: the engine's log-prob of each new token.
        spans: weight versions of the new tokens, with positions relative to the segment's first token.
        finish: "stop", "length" or "abort"; None: the call continues.
        cached_tokens: number of prompt tokens that the engine read from its prefix cache.
        prompt_tokens: number of prompt tokens of the call.
        routes: experts of the call's positions; None: not requested, or lost.
        call_spans: weight versions of the call, with positions relative to its first new token; None: the weights did
            not change during the call. If they changed, a streamed segment had the version of its last token.
        support: ids that the sampling mask kept, one row per token (rlsys/segments/support.py); None: no mask.
        tops: (log-prob, id) pairs of the most probable ids at each token; None: not requested.
        id_range: smallest and largest id in `support` and `tops`.
        rounded: number of tokens whose log-prob was above 0 because of rounding.
        checks: number of verification passes of speculative decoding.
        checked: number of tokens that these passes accepted.
    """

    ids: Sequence[int]
    mu: Sequence[float]
    spans: list[VersionSpan]
    finish: str | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    routes: RouteSpan | None = None
    call_spans: list[VersionSpan] | None = None
    support: bytes | None = None
    tops: list[list[tuple[float, int]]] | None = None
    id_range: tuple[int, int] | None = None
    rounded: int = 0
    checks: int = 0
    checked: int = 0


@dataclass(slots=True)
class TokenSequence:
    """A prompt and its continuation.

    The tokens are in memory, or `pieces` locates them on disk. In the latter case `response_ids`, `mu`, `routes`,
    `support`, `teacher_logprobs` and `behaviour` are empty; `spans` always covers the whole response.

    Attributes:
        sample_id: id of the sample.
        group_id: id of the sample's group.
        index: number of the sample in the group, from 0.
        prompt_ids: token ids of the prompt.
        seed: seed of the engine's sampler, also after interruptions.
        response_ids: token ids of the response.
        mu: the engine's log-prob of each response token when it was sampled.
        spans: weight versions of the response tokens, sorted and without gaps.
        status: state of the sequence.
        resumes: number of continuations after an interruption.
        deaths: number of engines that died while running the sequence, since its last new token.
        faults: number of engines' server errors, since the sequence's last new token.
        cached_tokens: number of prompt tokens that engines read from their prefix caches, over all calls.
        prefilled_tokens: number of prompt tokens sent to engines, over all calls.
        engine: URL of the engine that has the sequence in its prefix cache; None: none.
        routes: experts by position, sorted and without overlaps. A position has none if they were not requested or
            lost; its token is trained without routing replay.
        observed: response tokens of tools or environments, which no model sampled.
        masked: sampled response tokens that are too old to be trained; set by `take`.
        trained_prompt: prompt under which the response is trained; None: `prompt_ids`.
        support: ids that the sampling mask kept, one row per response token (rlsys/segments/support.py); empty: all.
        teacher_logprobs: top-k log-probs of a teacher engine at each response token
            (rlsys/segments/teacher_logprobs.py); after they are saved, empty until the sample is loaded.
        taught: whether a teacher has scored the whole response.
        behaviour: the trainer's log-probs of the first response tokens under the weights that sampled them; NaN: not
            computed.
        mu_sum: sum of `mu`.
        pieces: locations of the tokens on disk.
        sequence: number of the sequence in the sample, from 0.
        parent: number of the sequence whose rewritten history this one continues; None: none.
        aside: whether the sequence is a request outside the main conversation, which is saved but not trained.
        last_turn: number of the sequence's last turn among the turns of all sequences of the sample.
    """

    sample_id: int
    group_id: int
    index: int
    prompt_ids: list[int]
    seed: int
    response_ids: TokenIds = field(default_factory=token_ids)
    mu: LogProbs = field(default_factory=log_probs)
    spans: list[VersionSpan] = field(default_factory=list)
    status: Status = Status.PARKED
    resumes: int = 0
    deaths: int = 0
    faults: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    engine: str | None = None
    routes: list[RouteSpan] = field(default_factory=list)
    observed: list[TokenSpan] = field(default_factory=list)
    masked: list[TokenSpan] = field(default_factory=list)
    trained_prompt: list[int] | None = None
    support: bytearray = field(default_factory=bytearray)
    teacher_logprobs: bytes = b""
    taught: bool = False
    behaviour: list[float] = field(default_factory=list)
    mu_sum: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    sequence: int = 0
    parent: int | None = None
    aside: bool = False
    last_turn: int = 0

    def __post_init__(self) -> None:
        if self.mu:
            self.mu_sum = sum(self.mu)

    @property
    def tokens(self) -> int:
        """Number of response tokens, in memory or on disk."""
        return self.spans[-1].end if self.spans else 0

    def append(self, segment: Segment) -> None:
        """Add the tokens and routes of a segment.

        Raises:
            ValueError: the arrays of the segment are inconsistent; the sequence is then unchanged.
        """
        self._check_segment(segment)
        base, n = len(self.response_ids), len(segment.ids)
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

    def _check_segment(self, segment: Segment) -> None:
        """Check that the arrays of a segment agree with each other and with those of the sequence.

        Raises:
            ValueError: two arrays disagree.
        """
        n = len(segment.ids)
        if len(segment.mu) != n:
            raise ValueError(
                f"sample {self.sample_id}: {n} ids but {len(segment.mu)} log-probs; expected one per id"
            )
        end = 0
        for span in segment.spans:
            if span.start != end or span.end < span.start:
                raise ValueError(
                    f"sample {self.sample_id}: version spans {segment.spans}; expected spans from token 0 to {n} "
                    "without gaps"
                )
            end = span.end
        if end != n:
            raise ValueError(
                f"sample {self.sample_id}: version spans cover {end} of {n} tokens; expected spans of all tokens"
            )
        rows = None if segment.support is None else segment.support.count(0)
        if rows is not None and rows != n:
            raise ValueError(
                f"sample {self.sample_id}: {n} ids but {rows} rows of the sampling mask; expected one per id"
            )
        total = len(self.response_ids) + n
        if 0 < n < total and bool(self.support) != (rows is not None):
            raise ValueError(
                f"sample {self.sample_id}: only some of its tokens have a sampling mask; expected all or none"
            )
        if segment.call_spans is not None and segment.call_spans[-1].end > total:
            raise ValueError(
                f"sample {self.sample_id}: version spans of the call {segment.call_spans}; expected at most {total} "
                "tokens"
            )

    def _add_spans(self, base: int, spans: list[VersionSpan]) -> None:
        """Append spans to `self.spans`, and merge adjacent spans of the same weight version.

        Args:
            base: response token to which the positions of `spans` are relative.
        """
        for span in spans:
            if span.end == span.start:
                continue
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == span.version:
                last.end = base + span.end
            else:
                self.spans.append(VersionSpan(span.version, base + span.start, base + span.end))

    def _correct_spans(self, base: int, spans: list[VersionSpan]) -> None:
        """Replace the weight versions of the response tokens from `base` on.

        Args:
            spans: weight versions, with positions relative to `base`.
        """
        self.spans = [s for s in self.spans if s.start < base]
        if self.spans:
            self.spans[-1].end = min(self.spans[-1].end, base)
        self._add_spans(base, spans)

    def observe(self, ids: Sequence[int]) -> None:
        """Add tokens of a tool or environment, which no model sampled and which are not trained.

        They get the log-prob 0 and the weight version of the token before them.

        Raises:
            ValueError: the response is empty.
            TypeError, OverflowError: `ids` are not token ids; the sequence is then unchanged.
        """
        if not self.spans:
            raise ValueError(f"sample {self.sample_id}: an observation before the first token")
        start, end = len(self.response_ids), len(self.response_ids) + len(ids)
        self.response_ids.extend(token_ids(ids))  # the conversion fails before an id is added
        self.mu.extend([0.0] * len(ids))
        if self.support:
            self.support.extend(bytes(len(ids)))  # an empty row keeps only the token, which gives log-prob 0
        self.spans[-1].end = end
        if end > start:
            self.observed.append(TokenSpan(start, end))

    @property
    def observed_last(self) -> bool:
        """Whether the response ends with an observation, so that the model's next token starts a new turn."""
        return bool(self.observed) and self.observed[-1].end == self.tokens

    def turns(self) -> list[TokenSpan]:
        """Return the spans of response tokens that a model sampled, which observations separate."""
        starts = [0, *(span.end for span in self.observed)]
        ends = [*(span.start for span in self.observed), self.tokens]
        return [TokenSpan(a, b) for a, b in zip(starts, ends, strict=True) if b > a]

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that a model sampled."""
        return self.tokens - sum(span.end - span.start for span in self.observed)

    @property
    def received_tokens(self) -> int:
        """Number of tokens that engines generated for this sequence, including those that were discarded."""
        return self.sampled_tokens

    def trained(self) -> list[bool]:
        """Return for each response token whether it is trained, `[tokens]`."""
        mask = [True] * self.tokens
        for span in (*self.observed, *self.masked):
            mask[span.start : span.end] = [False] * (span.end - span.start)
        return mask

    def _check_routes(self, routes: RouteSpan, last: int) -> None:
        """Check that a span of routes follows the previous ones and ends before position `last`.

        Raises:
            ValueError: the span has other positions, or its size is not a multiple of their number.
        """
        first = self.routes[-1].end if self.routes else 0
        if not first <= routes.start < routes.end == last:
            raise ValueError(
                f"sample {self.sample_id}: routes of positions [{routes.start}, {routes.end}); expected a start from "
                f"{first} on and the end {last}"
            )
        if routes.location is not None:
            return
        size, positions = len(routes.experts), routes.end - routes.start
        if not size or size % positions:
            raise ValueError(
                f"sample {self.sample_id}: {size} bytes of routes for {positions} positions; expected a positive "
                f"multiple of {positions}"
            )

    def versions(self) -> list[int]:
        """Return the weight version of each response token, `[tokens]`."""
        versions: list[int] = []
        for span in self.spans:
            versions.extend([span.version] * (span.end - span.start))
        return versions


@dataclass(slots=True)
class Sample(TokenSequence):
    """One response to one prompt. It is the first sequence of the response, and has the fields of the whole response.

    Attributes:
        reward: the reward from which advantages are computed; None: none yet, or the sample is censored.
        named_rewards: components of the reward, if the reward function names them.
        plain_reward: the reward function's value, if a group reward has replaced it.
        turn_rewards: reward of each turn, sequence by sequence, if an environment or the reward function gives them.
        answer: canonical final answer.
        censor_reason: reason why the sample has no reward, for users.
        censor_cause: cause why the sample has no reward; it is not saved.
        tool_penalty: penalty for tool calls; set by `take`.
        own_prompt: whether the sample has another prompt than its group, as samples of agents may.
        extra_sequences: the sequences after the first, by number.
        fork: origin, if the sample is a fork of another sample of its group (rlsys/core/forks.py).
        inherited_tokens: number of sampled tokens at the start that were generated for another sample, or forced.
        discarded: number of tokens that engines generated for the sample and that were removed again.
    """

    reward: float | None = None
    named_rewards: dict[str, float] | None = None
    plain_reward: float | None = None
    turn_rewards: list[TurnReward] | None = None
    answer: str | None = None
    censor_reason: str | None = None
    censor_cause: CensorCause | None = None
    tool_penalty: float = 0.0
    own_prompt: bool = False
    extra_sequences: list[TokenSequence] = field(default_factory=list)
    fork: Fork | None = None
    inherited_tokens: int = 0
    discarded: int = 0

    @property
    def received_tokens(self) -> int:
        """Number of tokens that engines generated for the first sequence, including those that were discarded."""
        return self.sampled_tokens - self.inherited_tokens + self.discarded

    @property
    def sequences(self) -> list[TokenSequence]:
        """List of all sequences of the sample, by number."""
        return [self, *self.extra_sequences]

    @property
    def trained_sequences(self) -> list[TokenSequence]:
        """The sequences to train: the only one, or, of several, those that have tokens and are not `aside`."""
        return [q for q in self.sequences if q.spans and not q.aside] if self.extra_sequences else [self]

    @property
    def all_tokens(self) -> int:
        """Number of response tokens of all sequences."""
        return self.tokens + sum(q.tokens for q in self.extra_sequences)

    @property
    def judged_ids(self) -> Sequence[int]:
        """Response ids for the reward function: of all sequences that are not `aside`, sorted by last turn."""
        if not self.extra_sequences:
            return self.response_ids
        return [i for q in self._judged for i in q.response_ids]

    @property
    def judged_mask(self) -> list[int]:
        """Mask of `judged_ids`: 1 for a token that the model sampled, else 0."""
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
        """Add a sequence to the sample, and return it.

        Args:
            prompt_ids: prompt of the new sequence.
            parent: number of the sequence whose rewritten history the new one continues; None: none.
            aside: whether the new sequence is a request outside the main conversation, which is not trained.
        """
        number = 1 + len(self.extra_sequences)
        ids = token_ids(prompt_ids).tolist()
        sequence = TokenSequence(
            self.sample_id, self.group_id, self.index, ids, 1 + (self.seed + number) % LARGEST_SEED,
            sequence=number, parent=parent, aside=aside,
        )  # fmt: skip
        self.extra_sequences.append(sequence)
        return sequence

    def censor(self, cause: CensorCause, reason: str) -> None:
        """Set the status CENSORED, and the cause and reason of the missing reward.

        Args:
            reason: any text; it is sanitised and truncated to LONGEST_REASON.
        """
        self.status, self.censor_cause = Status.CENSORED, cause
        self.censor_reason = shorten(valid_text(str(reason)), LONGEST_REASON)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of the trained sequences' tokens; None if they have no tokens."""
        return min((s.version for q in self.trained_sequences for s in q.spans), default=None)


AnySequence = TypeVar("AnySequence", bound=TokenSequence)


def _write_once(name: str) -> property:
    """Return a property that replaces a slot of TokenSequence, and raises AttributeError at a second assignment.

    It prevents user code from changing the identity of a sample.
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
    """Text of a response for a reward function, with special tokens but without the stop id.

    Attributes:
        finished: whether the model ended the response, with a stop id or a stop text; otherwise it was truncated.
        ids: all response tokens, including the stop id.
        mask: for each token, 1 if the model sampled it, 0 if it comes from a tool, an environment or a user.
        prompt_ids: token ids of the prompt.
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
        """Create a response.

        Args:
            mask: see the attribute; None: the model sampled all tokens.
        """
        response = super().__new__(cls, text)
        response.finished, response.ids, response.prompt_ids = finished, ids, prompt_ids
        response.mask = [1] * len(ids) if mask is None else mask
        return response

    def with_text(self, text: str) -> Response:
        """Return a response with another text and the same attributes."""
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
    """A prompt of a prompt source.

    Attributes:
        index: index of the prompt in its source.
        text: the prompt as text.
        ids: token ids of the prompt; empty for a refused one.
        entry: data that the reward function needs to judge a response.
        question: the user's message, which `algo.prompt` may reword; empty for a chat with other messages.
        location: FILE:LINE of the row, for messages; empty for sources without rows.
        refusal: reason why the source cannot provide the prompt, with its location; empty: it can. Samples of a
            refused prompt are censored.
        refusal_cause: cause with which they are censored.
    """

    index: int
    text: str
    ids: list[int]
    entry: dict[str, Any]
    question: str = ""
    location: str = ""
    refusal: str = ""
    refusal_cause: CensorCause = CensorCause.ROW


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt.

    Attributes:
        group_id: id of the group.
        prompt_index: index of the prompt in its source.
        samples: the samples, by index.
        state: state of the group.
        train_step: train step that took the group; None: none yet.
    """

    group_id: int
    prompt_index: int
    samples: list[Sample]
    state: GroupState = GroupState.ACTIVE
    train_step: int | None = None

    @property
    def done(self) -> bool:
        return all(s.status.terminal for s in self.samples)

    @property
    def oldest_version(self) -> int | None:
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


@dataclass(slots=True)
class LogProbRequest:
    """Request for the trainer's log-probs of the response tokens from `start` on.

    The trainer's current weights have sampled these tokens.
    """

    sample: TokenSequence
    start: int


@dataclass(slots=True)
class LogProbResult:
    """The trainer's log-probs of response tokens.

    Attributes:
        sample_id: id of the sample.
        start: first of the tokens.
        logp: log-prob of each of the tokens.
        sequence: number of the sequence in the sample.
    """

    sample_id: int
    start: int
    logp: list[float]
    sequence: int = 0


@dataclass(slots=True)
class TrainBatch:
    """The groups of one train step, as `take` returns them.

    Attributes:
        train_step: number of the step.
        weight_version: newest weight version at the take.
        groups: the groups.
        metrics: metrics of the rollout.
        sources: `data_source` of each group's prompt; empty unless algo.teacher needs it.
    """

    train_step: int
    weight_version: int
    groups: list[SampleGroup]
    metrics: dict[str, int | float]
    sources: list[str] = field(default_factory=list)
