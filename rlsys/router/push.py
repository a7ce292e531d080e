"""WeightPush: the steps of a weight push in order (docs/architecture.md); every step has a time limit.

A push may fail half-way. An engine that fails a step, or dies, is without weights and takes part in the next
push to stale engines, a limited number of times. An engine whose log-probs differ from the trainer's is
quarantined until it is restarted. In both cases the engine does not serve meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.wire import EngineError
from rlsys.obs.phases import Phases
from rlsys.router.attest import STANDARD_ERRORS, WARNING_FACTOR, Agreement, Bounds, nearness
from rlsys.router.dispatch import Dispatcher, Interruption
from rlsys.router.engine_checksums import ChecksumVerifier, Match
from rlsys.router.engine_state import NEVER, EngineState
from rlsys.router.failure_policy import REFUSAL_STATUSES

PROBE_SECONDS = 1.0
PHASES = ("wake_weights", "open", "close", "wake_cache", "flush", "version", "checksums", "canaries")
"""Phases of a weight update in an engine; the tensors are sent between `open` and `close`."""
PREPARE_ATTEMPTS = 5
"""Attempts to prepare an engine within the timeout of a push."""
log = logging.getLogger("rlsys.router")


class WeightPush:
    """Directs weight pushes: `begin`, then the trainer sends tensors, then `end`.

    Owns the engines of the current push.

    Args:
        timeout_s: time limit in seconds of a copy of weights between engines; one attempt to prepare an engine may
            take a fifth of it.
        bounds: limits of the attestation.
        interruption: treatment of samples in flight during a push.
        tps: tensor-parallel sizes of the engines, ascending; empty or a single size: all engines are equal.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        bounds: Bounds,
        interruption: Interruption,
        timeout_s: float,
        *,
        tps: Sequence[int] = (),
    ) -> None:
        self._tps = tps
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._bounds = bounds
        self._interruption = interruption
        self.timeout_s = timeout_s
        self._targets: list[EngineState] = []
        self._under_way = False
        self._last: tuple[int, list[Canary], Sequence[dict[str, str]]] | None = None
        """Canaries and checksums of the last pushed version."""
        self._checksums = ChecksumVerifier()
        self._warned_unknown = False  # whether the warning about `unknown` tensors was logged
        self._canaries: dict[int, dict[tuple[int, ...], list[float]]] = {}
        """Version -> the trainer's log-probs of each canary, for the last two versions."""
        self._metrics = PushMetrics()
        self._first: dict[str, Agreement] = {}
        """Engine URL -> its first comparison in which all tensors were equal."""

    def announce(self) -> None:
        """Announce a push. Until it ends, no engine copies weights from another engine."""
        self._under_way = True

    async def begin(
        self, version: int, *, only_stale: bool, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """Prepare engines to receive tensors. No request may run in them.

        Args:
            version: the weight version to push.
            only_stale: push only to engines without current weights. With `members`, continue a rolling push.
            members: URLs of the engines of this round of a rolling push.

        Returns:
            the engines that are ready. If no engine is ready for a push to all engines, the caller repeats the call
                (`begin_when_ready`).
        """
        self.announce()
        if not only_stale:
            self._last = None
            self._pool.older = self._pool.version if members else None
            self._pool.version = version
        if not (only_stale and members):
            self._metrics = PushMetrics()
        await self._pool.probe()
        round_members = [e for e in self._pool.rolling_targets() if e.url in members]
        targets = [*self._pool.stale(), *round_members]
        previous_versions = {e.url: NEVER if e.has_peer_copy else e.version for e in targets}
        ready = await asyncio.gather(*(self._dispatcher.attempt(e, self._prepare(e)) for e in targets))
        self._targets = [e for e, succeeded in zip(targets, ready, strict=True) if succeeded]
        if self._targets or only_stale or members:  # otherwise the caller repeats this push
            for engine, succeeded in zip(targets, ready, strict=True):
                if not succeeded:
                    engine.record_failed_push()
        for engine in self._pool.engines:
            engine.update_pending = False  # its weight update has begun, or it is dead
        return [_address(e, previous_versions[e.url]) for e in self._targets]

    async def _prepare(self, engine: EngineState) -> None:
        """Prepare one engine. The time limit is short, because the caller repeats failed attempts."""
        async with asyncio.timeout(self.timeout_s / PREPARE_ATTEMPTS):
            phases = self._metrics.phases
            if engine.version == NEVER:
                with phases.concurrent("wake_weights"):
                    await engine.wake_weights()
            if not engine.counting and not engine.paused:
                await engine.start_counting()
            engine.version, engine.has_peer_copy = NEVER, False  # until it is attested again
            engine.attested.clear()
            with phases.concurrent("open"):
                await engine.client.begin_weight_update()

    async def end(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]],
        excluded: Mapping[str, str],
    ) -> dict[str, float]:
        """Finish the push that `begin` started: empty caches and attest the engines.

        Args:
            version: the pushed weight version.
            canaries: sequences with the trainer's log-probs under this version.
            checksums: the expected checksums of each rank, for one engine size after the other
                (rlsys.weights.checksums); empty: checksums are not compared.
            excluded: URL -> reason, for engines that did not get all tensors. The next push sends them all tensors
                again.

        Returns:
            metrics over all rounds of a rolling push so far; `push_left`: number of engines that still serve the
                previous weights.
        """
        pushing, self._targets = self._targets, []
        self._last = version, canaries, checksums
        for engine in pushing:
            if engine.url in excluded:
                engine.failure = excluded[engine.url]
                engine.mark_dead()
                engine.record_failed_push()
        pushing = [e for e in pushing if e.url not in excluded]
        self._canaries[version] = {tuple(c.ids): c.logp for c in canaries}
        self._canaries = {v: self._canaries[v] for v in sorted(self._canaries)[-2:]}
        finishing = (self._finish(e, version, canaries, checksums) for e in pushing)
        try:
            await asyncio.gather(
                *(self._dispatcher.attempt(e, f) for e, f in zip(pushing, finishing, strict=True))
            )
        finally:
            # Only now: while an engine is attested, it appears to have no weights, and a copy would start.
            self._under_way = False
        for engine in pushing:
            if engine.version != version and engine.quarantined is None:
                engine.record_failed_push()
        self._dispatcher.interrupted = False
        self._dispatcher.wake()
        remaining = [] if self._pool.older is None else self._pool.rolling_targets()
        if not remaining:
            self._pool.older = None
        return {**self._metrics.to_dict(), "push_left": len(remaining)}

    @property
    def attested(self) -> bool:
        """Whether an engine can be attested without a push: none is under way, and the last one had checksums."""
        return (
            not self._under_way
            and self._pool.older is None
            and self._last is not None
            and bool(self._last[2])
        )

    async def attest(self, engine: EngineState) -> None:
        """Attest an engine that got the newest version without a push."""
        assert self._last is not None
        await self._finish(engine, *self._last)

    async def _finish(
        self, engine: EngineState, version: int, canaries: list[Canary], checksums: Sequence[dict[str, str]]
    ) -> None:
        """Finish the update of one engine. If it is attested, set its version, otherwise quarantine it.

        Paused requests continue before the canaries, which would otherwise wait for them. The tokens of these
        requests are held back until the engine is attested.
        """
        engine.agreement = engine.match = None
        reported_version = await self._close(engine, version)
        if checksums:  # while the engine is paused: later they would wait for a pass with many prefills
            engine.match = await self._compare(engine, checksums)
        await self._dispatcher.unpause(engine)
        answered_canaries, logprobs = await self._measure_canaries(engine, canaries)
        if canaries and not answered_canaries and (engine.match is None or engine.match.unknown):
            self._quarantine(
                engine, f"refused all {len(canaries)} canaries, and checksums do not cover all of its tensors"
            )
            return
        engine.agreement = Agreement.of(
            [x for c in answered_canaries for x in c.logp], [x for values in logprobs for x in values]
        )
        self._metrics.add(engine)
        objection = self._objection(engine, version, reported_version, answered_canaries, logprobs)
        if objection is not None:
            self._quarantine(engine, objection)
            return
        bounds = self._bounds_of(engine)
        if not engine.agreement.within(bounds):
            self._metrics.warned_engines += 1
            gaps = engine.agreement.describe(bounds)
            log.warning(
                "%s: its tensors equal the trainer's, but canary log-probs differ: %s", engine.url, gaps
            )
        if answered_canaries and engine.match is not None and not engine.match.unknown:
            self._first.setdefault(engine.url, engine.agreement)
        self._checksums.attest(engine.url)
        engine.set_version(version)

    async def _close(self, engine: EngineState, version: int) -> int:
        """End the weight update of one engine and label its weights. Return the version that it reports."""
        phases = self._metrics.phases
        with phases.concurrent("close"):
            await engine.client.end_weight_update()
        with phases.concurrent("wake_cache"):
            await engine.wake_cache()
        if self._interruption != "in_place":
            with phases.concurrent("flush"):
                # Keys and values of the old weights are wrong for the new ones.
                await engine.client.flush(paused=engine.paused)
        with phases.concurrent("version"):
            await engine.client.set_weight_version(version)
            return await engine.client.weight_version()

    async def _measure_canaries(
        self, engine: EngineState, canaries: list[Canary]
    ) -> tuple[list[Canary], list[list[float]]]:
        """Return the canaries that the engine answers, and the log-probs of each."""
        counting = engine.counting
        engine.counting, engine.uncounted = False, True  # a failure below leaves uncounted tokens
        with self._metrics.phases.concurrent("canaries"):
            answers = await asyncio.gather(*(self._canary_logprobs(engine, c) for c in canaries))
        answered_canaries = [c for c, answer in zip(canaries, answers, strict=True) if answer is not None]
        logprobs = [answer for answer in answers if answer is not None]
        engine.received += len(answered_canaries)  # each canary generates one token
        engine.counting = counting
        refusals = len(canaries) - len(answered_canaries)
        self._metrics.refused_canaries = max(self._metrics.refused_canaries, refusals)
        return answered_canaries, logprobs

    async def _canary_logprobs(self, engine: EngineState, canary: Canary) -> list[float] | None:
        """Return the log-probs of a canary; None if the engine refuses it."""
        try:
            return await engine.client.token_logprobs(canary.ids)
        except EngineError as e:
            if e.status not in REFUSAL_STATUSES:
                raise
            log.warning("%s: skipped a canary of %d tokens: %s", engine.url, len(canary.ids), e)
            return None

    def _bounds_of(self, engine: EngineState) -> Bounds:
        return self._bounds.after(self._first.get(engine.url))

    def _objection(
        self,
        engine: EngineState,
        version: int,
        reported_version: int,
        canaries: list[Canary],
        logprobs: list[list[float]],
    ) -> str | None:
        """Return the reason why the engine must not serve; None: it is attested."""
        match, agreement, bounds = engine.match, engine.agreement, self._bounds_of(engine)
        max_unknown_share = bounds.max_unknown_share
        assert agreement is not None
        if reported_version != version:
            return f"reports weight version {reported_version}; expected {version}"
        if match is not None and match.wrong:
            return match.mismatch_message()
        if match is not None and match.share_unknown > max_unknown_share:
            return (
                f"{len(match.unknown)} tensor(s), {match.share_unknown:.0%}, cannot be compared; expected at most "
                f"{max_unknown_share:.0%} with this model.fp8 and engine.extra_args; first: {match.unknown[0]}"
            )
        equal = match is not None and not match.unknown
        if not agreement.within(bounds, self._tolerance(match)) and not (
            equal and agreement.differs_by_ties(bounds)
        ):
            return f"canary log-probs differ from the trainer's: {agreement.describe(bounds)}"
        if not self._follows_last_step(version, canaries, logprobs, match):
            return "canary log-probs are nearer to those before the trainer's step than to those after it"
        return None

    def _follows_last_step(
        self, version: int, canaries: list[Canary], logprobs: list[list[float]], match: Match | None
    ) -> bool:
        """Return whether the engine's log-probs followed the trainer's last step.

        If checksums cover every tensor, or no earlier version is known, return True without a comparison.
        """
        earlier = min(self._canaries)
        if earlier == version or (match is not None and not match.unknown):
            return True
        previous = self._canaries[earlier]
        old: list[float] = []
        new: list[float] = []
        reported: list[float] = []
        for canary, values in zip(canaries, logprobs, strict=True):
            previous_logp = previous.get(tuple(canary.ids))
            if previous_logp is not None:
                old.extend(previous_logp)
                new.extend(canary.logp)
                reported.extend(values)
        gain, error = nearness(old, new, reported)
        return gain + STANDARD_ERRORS * error >= 0

    def _tolerance(self, match: Match | None) -> float:
        """Return the largest accepted gap as a multiple of the bounds.

        It exceeds 1 only in half precision, if some tensors are known to be equal.
        """
        return WARNING_FACTOR if match is not None and match.equal and not self._bounds.exact else 1.0

    async def _compare(self, engine: EngineState, checksums: Sequence[dict[str, str]]) -> Match:
        """Compare the engine's checksums with the expected ones. `checksums`: see `end`."""
        with self._metrics.phases.concurrent("checksums"):
            expected = checksums_of_size(checksums, self._tps, engine.client.tp)
            match = self._checksums.compare(engine.url, expected, await engine.client.checksums())
        if match.unknown and not self._warned_unknown:
            self._warned_unknown = True
            log.warning(
                "%s: %d of %d tensors have a layout that cannot be compared with the trainer's, first: %s; "
                "only canaries verify them",
                engine.url, len(match.unknown), match.equal + len(match.unknown) + len(match.wrong), match.unknown[0],
            )  # fmt: skip
        return match

    def _quarantine(self, engine: EngineState, reason: str) -> None:
        engine.quarantined = reason
        engine.cancel_flights()


@dataclass
class PushMetrics:
    """Metrics of a push: the worst value over its engines.

    Attributes:
        agreements: comparison of the log-probs of each engine.
        matches: comparison of the checksums of each engine.
        warned_engines: number of accepted engines whose canaries exceed the bounds.
        refused_canaries: largest number of canaries that an engine refused.
        phases: duration of each of PHASES.
    """

    agreements: list[Agreement] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    warned_engines: int = 0
    refused_canaries: int = 0
    phases: Phases = field(default_factory=lambda: Phases("time_push", PHASES))

    def add(self, engine: EngineState) -> None:
        if engine.agreement is not None:
            self.agreements.append(engine.agreement)
        if engine.match is not None:
            self.matches.append(engine.match)

    def to_dict(self) -> dict[str, float]:
        return {
            "push_canary_mean": max((a.mean for a in self.agreements), default=0.0),
            "push_canary_p999": max((a.p999 for a in self.agreements), default=0.0),
            "push_canary_warnings": self.warned_engines,
            "push_canaries_refused": self.refused_canaries,
            "push_tensors_equal": min((m.equal for m in self.matches), default=0),
            "push_tensors_unknown": max((len(m.unknown) for m in self.matches), default=0),
            "push_share_unknown": max((m.share_unknown for m in self.matches), default=0.0),
            **(phases := self.phases.metrics),
            "time_checksums": phases["time_push_checksums"],
        }


def _address(engine: EngineState, previous_version: int) -> EngineAddress:
    return EngineAddress(
        engine.url,
        engine.client.tp,
        previous_version,
        engine.client.index,
        engine.client.identity.admin_key,
        engine.client.epoch,
        engine.chain,
    )


def checksums_of_size(
    checksums: Sequence[dict[str, str]], tps: Sequence[int], tp: int
) -> Sequence[dict[str, str]]:
    """Return the checksums of the ranks of an engine of one size.

    Args:
        checksums: checksums of all ranks, for one size of `tps` after the other.
        tps: tensor-parallel sizes of the engines, ascending.
        tp: tensor-parallel size of the engine. If `tps` lacks it, the result is empty.
    """
    if len(tps) < 2:
        return checksums
    first = sum(smaller for smaller in tps if smaller < tp)
    return checksums[first : first + tp] if tp in tps else []


def merge_push_metrics(pushes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of one push by several routers.

    - push_canary_warnings and push_left: the sum.
    - push_tensors_equal: the smallest value of the routers that have engines, which is not 0.
    - all others: the largest value.
    """
    metrics = [{**PushMetrics().to_dict(), "push_left": 0}, *pushes]
    merged = {key: max(push[key] for push in metrics) for key in metrics[0]}
    for key in ("push_canary_warnings", "push_left"):
        merged[key] = sum(push[key] for push in metrics)
    merged["push_tensors_equal"] = min(
        (n for push in metrics if (n := push["push_tensors_equal"])), default=0
    )
    return merged


class EngineSet(Protocol):
    """The engines of one router, or of several."""

    @property
    def all_quarantined(self) -> bool:
        """Whether there are engines, and all are quarantined."""

    def engine_states(self) -> dict[str, str]:
        """Return URL -> state."""


async def begin_when_ready(
    begin: Callable[[], Awaitable[list[EngineAddress]]], engines: EngineSet, version: int, timeout_s: float
) -> list[EngineAddress]:
    """Begin a push to all engines as soon as at least one of them is ready.

    Args:
        begin: tries to begin the push; returns the engines that are ready.
        engines: the engines of the push.
        version: the weight version to push.
        timeout_s: time limit in seconds; it should allow the supervisor to restart an engine.

    Raises:
        RunError: no engine was ready in time, or every engine is quarantined.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (ready := await begin()):
                raise_if_all_quarantined(engines, version)
                await asyncio.sleep(PROBE_SECONDS)
            return ready
    except TimeoutError:
        raise RunError(
            f"no engine was ready for weight version {version} within {timeout_s:g} s: "
            f"{describe_states(engines.engine_states())}"
        ) from None


def raise_if_all_quarantined(engines: EngineSet, version: int) -> None:
    """Check that an engine can serve.

    Raises:
        RunError: every engine is quarantined.
    """
    if engines.all_quarantined:
        states = describe_states(engines.engine_states())
        raise RunError(f"no engine can serve weight version {version}, because all are quarantined: {states}")


def describe_states(states: Mapping[str, str]) -> str:
    """Return URL and state of each engine, for messages."""
    return "; ".join(f"{url} {state}" for url, state in states.items())
