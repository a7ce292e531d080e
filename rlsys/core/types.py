"""The domain words. Standard library only: every process imports this file, and nothing heavy with it.

A `Sample` is one response to one prompt; a `SampleGroup` is all responses to one prompt (GRPO's group).
A sample's response may be made in several segments, by several weight versions, on several engines;
`append` is the only way to make it longer and keeps every per-token array equally long (invariant 2).

A sample of an agent may be an episode of several sequences, each a prompt and what follows it, with one reward. The
sample itself is the first of them, and holds the others; `sequences` are all. What counts samples counts episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlsys.core.arrays import LogProbs, TokenIds, log_probs, token_ids
from rlsys.core.spans import Fork, Piece, RouteSpan, TokenSpan, TurnMark, VersionSpan
from rlsys.core.texts import shortened, valid_text


class Status(StrEnum):
    """Where one sample is. Terminal: FINISHED, TRUNCATED, CENSORED."""

    PARKED = "parked"  # not in an engine: fresh (no tokens yet) or interrupted (its tokens are kept)
    IN_FLIGHT = "in_flight"  # an engine works on it
    FINISHED = "finished"  # ended by a stop token
    TRUNCATED = "truncated"  # ended by max_response_tokens
    CENSORED = "censored"  # no reward can be given (reward error, refused prompt); never a reward of 0

    @property
    def terminal(self) -> bool:
        return self in (Status.FINISHED, Status.TRUNCATED, Status.CENSORED)


LARGEST_REWARD = 1e18
"""The trainer computes advantages in float32, which holds its square."""
LONGEST_REASON = 2000
"""Characters of the reason why a sample has no reward: an exception's message may have megabytes."""


def is_reward(value: object) -> bool:
    """Whether it is a number that can be trained on: finite, and at most LARGEST_REWARD."""
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD  # which NaN is not


class CensorCause(StrEnum):
    """What went wrong with a sample that has no reward."""

    PROMPT = "prompt"  # it leaves no room for a response, or has an id outside the vocabulary
    ROW = "row"  # its row cannot be read as a prompt
    TOOL = "tool"  # a tool, an agent or an environment failed
    ENGINE = "engine"  # engines died of it, or refused it
    REWARD = "reward"  # the reward function raised, hung, or gave no number
    TEACHER = "teacher"  # the teacher refused it, or was away
    DEADLINE = "deadline"  # rollout.group_deadline
    EXCEPTION = "exception"  # what nobody foresaw


class GroupState(StrEnum):
    """Where one group is in the ledger. Every group ever issued is in exactly one of these (invariant 3)."""

    ACTIVE = "active"  # some sample is parked or in flight
    READY = "ready"  # all samples terminal, waiting for `take`
    TRAINED = "trained"  # taken by a train step
    FILTERED = "filtered"  # finished, and a planner does not keep it
    EXPIRED = "expired"  # older than max_staleness, under the policies drop and wait
    CENSORED = "censored"  # some sample could not be rewarded


LARGEST_SEED = 2**31 - 1


@dataclass(slots=True)
class Segment:
    """What one engine call added to a sample.

    `ids` and `mu` have one entry per new token; `spans` count from the segment's first token.
    `finish` is None while streaming, else "stop", "length" or "abort". `routes` come with the finish, and cover all
    segments of the call. `checks` and `checked` too, where engines draft tokens. `call_spans` too, when the weights
    changed under the call: while it streamed, every segment had the version that its last token had.
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
    tops: list[list[tuple[float, int]]] | None = (
        None  # of each token, the most probable ids with their log-probs
    )
    named: tuple[int, int] | None = None  # the least and the largest id of `support` and `tops`
    rounded: int = 0  # tokens whose log-prob a rounding had put above 0
    checks: int = 0  # passes in which the engine checked drafts, and tokens of the call that they gave
    checked: int = 0


@dataclass(slots=True)
class Sample:
    """One response, or a further sequence of one. `mu[i]` is the engine's log-prob of `response_ids[i]` when it was
    sampled.

    Its tokens are in hand, or `pieces` says where they lie: then `response_ids`, `mu`, `routes`, `support`,
    `teacher_logprobs` and `behaviour` are empty. `spans` are there always, and tile the response.

    `routes` is in order and without overlap. Positions that no span covers have no routes: the engine was not asked
    for them, or it died before it handed them over; such tokens train without replay.
    """

    sample_id: int
    group_id: int
    index: int  # place in the group, 0 .. group_size-1
    prompt_ids: list[int]
    seed: int  # of the engine's sampler; kept over interruptions
    response_ids: TokenIds = field(default_factory=token_ids)
    mu: LogProbs = field(default_factory=log_probs)
    spans: list[VersionSpan] = field(default_factory=list)
    status: Status = Status.PARKED
    reward: float | None = None  # what advantages see
    named_rewards: dict[str, float] | None = None  # its parts, where the reward function names them
    plain_reward: float | None = None  # the reward function's, where a group reward took its place
    turn_marks: list[TurnMark] | None = None
    """Of each turn of the model, sequence by sequence, where an environment or the reward function gives them."""
    answer: str | None = None  # the canonical final answer
    censor_reason: str | None = None
    censor_cause: CensorCause | None = None  # not kept over a restart: what is censored does not run again
    resumes: int = 0  # how often it went on after an interruption with tokens in hand
    # Since it got its last token, kept over restarts: engines that died with a request of it, and those that answered
    # one with a server error.
    deaths: int = 0
    faults: int = 0
    cached_tokens: int = 0  # prompt tokens served from an engine's prefix cache, over all segments
    prefilled_tokens: int = 0  # prompt tokens sent, over all segments
    engine: str | None = None  # url of the engine that holds its prefix
    routes: list[RouteSpan] = field(default_factory=list)
    observed: list[TokenSpan] = field(default_factory=list)  # what a tool wrote: no model sampled it
    tool_penalty: float = 0.0  # of a response with tools, see rollout/tools.py: set at take
    # Sampled, but too old to be trained on: set at take.
    masked: list[TokenSpan] = field(default_factory=list)
    trained_prompt: list[int] | None = None
    """The prompt that its response is trained on, where that is not the one it was drawn from (LENS)."""
    own_prompt: bool = False
    """It was drawn from another prompt than its group's, and is trained on that (agents)."""
    support: bytearray = field(default_factory=bytearray)
    """Rows of the ids that sampling kept, one a response token (rlsys/segments/support.py); empty: all."""
    teacher_logprobs: bytes = b""
    """What a teacher that is an engine finds most probable in the place of each response token
    (rlsys/segments/teacher_logprobs.py). It is large: from the time it is saved, only who loads the sample has it."""
    taught: bool = False  # a teacher was asked about the whole response
    behaviour: list[float] = field(default_factory=list)
    """The trainer's log-probs of the first response tokens under the weights that sampled them; NaN: not scored."""
    mu_sum: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    sequence: int = 0  # which one of its sample; of a further one, reward and its like are the first one's
    parent: int | None = None  # the sequence whose history it goes on from, written anew; None: from none
    aside: bool = False  # said to an agent on the side: in the ledger, and never trained
    spoke: int = 0  # the number of its last turn among those of all sequences; says who spoke last
    further: list[Sample] = field(default_factory=list)
    """The sequences after the first, by number. Only the first one has some."""
    fork: Fork | None = None  # where it branches off another sample of its group (rlsys/core/forks.py)
    given: int = 0  # tokens at its beginning that count as sampled, and that no engine made for it
    discarded: int = 0  # tokens that were made for it and cut off again

    def __post_init__(self) -> None:
        if self.mu:
            self.mu_sum = sum(self.mu)

    @property
    def tokens(self) -> int:
        """Response tokens of this sequence, wherever they are."""
        return self.spans[-1].end if self.spans else 0

    @property
    def sequences(self) -> list[Sample]:
        """All of the sample, the first one first."""
        return [self, *self.further]

    @property
    def trained_sequences(self) -> list[Sample]:
        """Those with something to train."""
        return [q for q in self.sequences if q.spans and not q.aside] if self.further else [self]

    @property
    def all_tokens(self) -> int:
        """Response tokens of all sequences."""
        return self.tokens + sum(q.tokens for q in self.further)

    @property
    def judged_ids(self) -> Sequence[int]:
        """What a reward is for: the response; of several sequences all, the one that spoke last at the end."""
        if not self.further:
            return self.response_ids
        return [i for q in self._judged for i in q.response_ids]

    @property
    def judged_mask(self) -> list[int]:
        """For each of `judged_ids`, 1 where the model sampled it."""
        mask: list[int] = []
        for sequence in self._judged:
            own = [1] * sequence.tokens
            for span in sequence.observed:
                own[span.start : span.end] = [0] * (span.end - span.start)
            mask += own
        return mask

    @property
    def _judged(self) -> list[Sample]:
        if not self.further:
            return [self]
        return sorted((q for q in self.sequences if not q.aside), key=lambda q: (q.spoke, q.sequence))

    def begin(self, prompt_ids: Sequence[int], parent: int | None = None, *, aside: bool = False) -> Sample:
        """A further sequence of this sample, of which this is the first."""
        number = 1 + len(self.further)
        made = Sample(
            self.sample_id, self.group_id, self.index, list(prompt_ids), 1 + (self.seed + number) % LARGEST_SEED,
            own_prompt=True, sequence=number, parent=parent, aside=aside,
        )  # fmt: skip
        self.further.append(made)
        return made

    def censor(self, cause: CensorCause, reason: str) -> None:
        """There will be no reward. The reason may be anybody's text: it is made valid, and cut."""
        self.status, self.censor_cause = Status.CENSORED, cause
        self.censor_reason = shortened(valid_text(reason), LONGEST_REASON)

    def append(self, segment: Segment) -> None:
        """Add a segment's tokens and routes. Raises ValueError when they disagree; then nothing changed."""
        n = len(segment.ids)
        if len(segment.mu) != n:
            raise ValueError(f"sample {self.sample_id}: {n} ids but {len(segment.mu)} log-probs")
        at = 0
        for span in segment.spans:
            if span.start != at or span.end < span.start:
                raise ValueError(
                    f"sample {self.sample_id}: version spans {segment.spans} do not tile [0, {n})"
                )
            at = span.end
        if at != n:
            raise ValueError(f"sample {self.sample_id}: version spans cover {at} of {n} tokens")
        rows = None if segment.support is None else segment.support.count(0)
        if rows is not None and rows != n:
            raise ValueError(f"sample {self.sample_id}: {n} ids but {rows} rows of the ids that were kept")
        base = len(self.response_ids)
        if n and base and bool(self.support) != (rows is not None):
            raise ValueError(f"sample {self.sample_id}: only some of its tokens say which ids were kept")
        if segment.call_spans is not None and segment.call_spans[-1].end > base + n:
            raise ValueError(f"sample {self.sample_id}: {segment.call_spans} are more than {base + n} tokens")
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
        """The engine's last word on all tokens from `base` on."""
        self.spans = [s for s in self.spans if s.start < base]
        if self.spans:
            self.spans[-1].end = min(self.spans[-1].end, base)
        self._add_spans(base, spans)

    def observe(self, ids: Sequence[int]) -> None:
        """Add what the environment says: tokens that no model sampled. They have mu 0, the version of the token
        before them, and are never trained. Raises ValueError before the model's first token."""
        if not self.spans:
            raise ValueError(f"sample {self.sample_id}: an observation before the first token")
        start, end = len(self.response_ids), len(self.response_ids) + len(ids)
        self.response_ids.extend(ids)
        self.mu.extend([0.0] * len(ids))
        if self.support:
            self.support.extend(bytes(len(ids)))  # each kept alone: of log-prob 0, as its mu
        self.spans[-1].end = end
        if end > start:
            self.observed.append(TokenSpan(start, end))

    @property
    def observed_last(self) -> bool:
        """The environment spoke last: what the model says next is a new turn, not a resumed one."""
        return bool(self.observed) and self.observed[-1].end == self.tokens

    def turns(self) -> list[TokenSpan]:
        """The stretches of this sequence's response that a model sampled, between those that it was told."""
        starts = [0, *(span.end for span in self.observed)]
        ends = [*(span.start for span in self.observed), self.tokens]
        return [TokenSpan(a, b) for a, b in zip(starts, ends, strict=True) if b > a]

    @property
    def sampled_tokens(self) -> int:
        """Response tokens that a model sampled."""
        return self.tokens - sum(span.end - span.start for span in self.observed)

    @property
    def received_tokens(self) -> int:
        """Tokens that engines made for this sequence, those that were cut off again included."""
        return self.sampled_tokens - self.given + self.discarded

    def trained(self) -> list[bool]:
        """Whether a response token is trained, `[tokens]`."""
        out = [True] * self.tokens
        for span in (*self.observed, *self.masked):
            out[span.start : span.end] = [False] * (span.end - span.start)
        return out

    def _check_routes(self, routes: RouteSpan, last: int) -> None:
        """`last`: the position after the last one that was predicted from."""
        first = self.routes[-1].end if self.routes else 0
        if not first <= routes.start < routes.end == last:
            raise ValueError(
                f"sample {self.sample_id}: routes of positions [{routes.start}, {routes.end}), expected up to "
                f"{last} and from {first} on"
            )
        if routes.place is not None:
            return
        if not routes.experts or len(routes.experts) % (routes.end - routes.start):
            found = f"{len(routes.experts)} bytes of routes for {routes.end - routes.start} positions"
            raise ValueError(f"sample {self.sample_id}: {found}")

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens of all sequences that are trained."""
        return min((s.version for q in self.trained_sequences for s in q.spans), default=None)

    def versions(self) -> list[int]:
        """Weight version of every response token, `[tokens]`."""
        out: list[int] = []
        for span in self.spans:
            out.extend([span.version] * (span.end - span.start))
        return out


class Response(str):
    """The text of a response, as reward functions get it: with special tokens, without the stop id that ended it.

    finished: the model ended the response by itself, with one of its stop ids or with a stop text; else the response
    was cut off. ids: all response tokens, the stop id included. mask: for each of them 1 where the model sampled it,
    0 where a tool, an environment or a user gave it. prompt_ids: the tokens before them.
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
        """`mask`: None where the model sampled all."""
        response = super().__new__(cls, text)
        response.finished, response.ids, response.prompt_ids = finished, ids, prompt_ids
        response.mask = [1] * len(ids) if mask is None else mask
        return response

    def with_text(self, text: str) -> Response:
        """The same response, told in another text."""
        return Response(text, **self.__getnewargs_ex__()[1])

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        given = {"finished": self.finished, "ids": self.ids, "mask": self.mask, "prompt_ids": self.prompt_ids}
        return (str(self),), given


@dataclass(slots=True)
class Prompt:
    """One problem. `entry` is what the reward function needs to judge a response.

    `question` is the user's message, which `algo.prompt` may put in another way; empty where a source gives chats.
    `where` is the place of its record, FILE:LINE, for messages; empty where a source has no records.
    """

    index: int
    text: str
    ids: list[int]
    entry: dict[str, Any]
    question: str = ""
    where: str = ""
    refusal: str = ""
    """Why the source could not make a prompt of its row, with the row's place; then `ids` is empty. Its samples are
    censored, for `refusal_cause`."""
    refusal_cause: CensorCause = CensorCause.ROW


@dataclass(slots=True)
class SampleGroup:
    """All samples of one prompt. `prompt_index` names the prompt in its source, so the source needs no state."""

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
class Unscored:
    """A sample whose response tokens from `start` on the trainer's resident weights sampled: to be scored by them."""

    sample: Sample
    start: int


@dataclass(slots=True)
class Scored:
    """The trainer's log-probs of response tokens `start`, `start` + 1, ... of a sample's sequence."""

    sample_id: int
    start: int
    logp: list[float]
    sequence: int = 0


@dataclass(slots=True)
class Taken:
    """What `take` hands to the trainer: the groups of one train step, and what the rollout did for it."""

    train_step: int
    weight_version: int
    groups: list[SampleGroup]
    metrics: dict[str, int | float]
    sources: list[str] = field(default_factory=list)
    """Of each group the `data_source` of its prompt; empty unless algo.teacher asks for it."""
