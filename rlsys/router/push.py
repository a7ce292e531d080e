"""The order of a weight push, in one place (docs/architecture.md); every step of it has a time limit.

A push may fail half-way. An engine that fails a step, or dies, is without weights from then on and gets the next
push to stale engines: it is rolled forward, a few times. One that answers with other log-probs than the trainer's is
quarantined until it is restarted. Neither serves meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.engine.wire import EngineError
from rlsys.obs.phases import Phases
from rlsys.router.attest import CHANCE, WARNING, Agreement, Bounds, nearness
from rlsys.router.checksums import Checksums, Match
from rlsys.router.dispatch import Dispatcher, Interruption
from rlsys.router.engine_state import NEVER, EngineState
from rlsys.router.failures import REFUSES
from rlsys.router.pool import Pool

PROBE_SECONDS = 1.0
PHASES = ("wake_weights", "open", "close", "wake_cache", "flush", "version", "checksums", "canaries")
"""Of a weight update, in an engine; tensors come between `open` and `close`."""
TRIES = 5
"""To get an engine ready, at the least, before `begin` runs out of patience."""
log = logging.getLogger("rlsys.router")


class WeightPush:
    """`begin`, then the trainer sends tensors, then `end`. Owns the engines of the push under way.

    patience: seconds that `begin` waits for an engine, long enough for one to be restarted. sole: see Router. tps:
    sizes of engines, ascending; () or one: all are alike.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        bounds: Bounds,
        interruption: Interruption,
        patience: float,
        *,
        sole: bool = True,
        tps: Sequence[int] = (),
    ) -> None:
        self._sole = sole
        self._tps = tps
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._bounds = bounds
        self._interruption = interruption
        self.patience = patience
        self._pushing: list[EngineState] = []
        self._under_way = False
        self._last: tuple[int, list[Canary], Sequence[dict[str, str]]] | None = None
        """What the trainer said of the version that it pushed last."""
        self._checksums = Checksums()
        self._told = False  # that some tensors cannot be compared
        self._canaries: dict[int, dict[tuple[int, ...], list[float]]] = {}
        """The trainer's log-probs of each canary, of the last two versions."""
        self._figures = Figures()
        self._first: dict[str, Agreement] = {}
        """Of each engine, by URL: its first comparison with tensors that were all seen to agree."""

    def announce(self) -> None:
        """A push is to begin. Until it has ended, no engine gets weights from another one."""
        self._under_way = True

    async def begin(
        self, version: int, *, only_stale: bool, members: Collection[str] = ()
    ) -> list[EngineAddress]:
        """Get every engine (or only those without the current weights) ready for tensors; nothing may run in them.

        `members`: URLs of the engines of this round of a rolling push, beside those without weights; `only_stale`
        from the second round on. Without them the push waits up to `patience` for an engine, since the supervisor may
        be restarting the only one; then RunError.
        """
        self.announce()
        if not only_stale:
            self._last = None
            self._pool.older = self._pool.version if members else None
            self._pool.version = version
        if not (only_stale and members):
            self._figures = Figures()
        try:
            async with asyncio.timeout(self.patience):
                while True:
                    await self._pool.probe()
                    turn = [e for e in self._pool.before_roll() if e.url in members]
                    targets = [*self._pool.stale(), *turn]
                    held = {e.url: NEVER if e.copied else e.version for e in targets}
                    ready = await asyncio.gather(
                        *(self._dispatcher.attempt(e, self._prepare(e)) for e in targets)
                    )
                    self._pushing = [e for e, ok in zip(targets, ready, strict=True) if ok]
                    if self._pushing or only_stale or members or not self._sole:
                        break
                    self._raise_if_hopeless()
                    await asyncio.sleep(PROBE_SECONDS)
            for engine, ok in zip(targets, ready, strict=True):
                if not ok:
                    engine.missed_push()
            for engine in self._pool.engines:
                engine.resting = False  # who has an update open is without weights; who refused it is dead
        except TimeoutError:
            raise RunError(
                f"no engine was there for weight version {version} within {self.patience:g} s: {states(self._pool)}"
            ) from None
        return [
            EngineAddress(
                e.url,
                e.client.tp,
                held[e.url],
                e.client.index,
                e.client.identity.admin_key,
                e.client.epoch,
                e.chain,
            )
            for e in self._pushing
        ]

    async def _prepare(self, engine: EngineState) -> None:
        """A hung engine may come to itself, or another one come back: so it is not waited for to the end."""
        async with asyncio.timeout(self.patience / TRIES):
            phases = self._figures.phases
            if engine.version == NEVER:
                with phases.concurrent("wake_weights"):
                    await engine.wake_weights()
            if not engine.counting and not engine.paused:
                await engine.start_counting()
            engine.version, engine.copied = NEVER, False  # until it is attested again
            engine.attested.clear()
            with phases.concurrent("open"):
                await engine.client.begin_weight_update()

    async def end(
        self,
        version: int,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]],
        left_out: Mapping[str, str],
    ) -> dict[str, float]:
        """Empty caches and attest. Raises RunError when every engine is quarantined. The figures are of all rounds of
        a rolling push so far; `push_left`: engines that still serve with the weights before it.

        `checksums`: what each rank of an engine must hold, one size of engine after the other
        (rlsys.weights.checksums); empty: not compared. `left_out`: URLs of engines that did not get all tensors, and
        why: they hold a part of them, and get all once more.
        """
        pushing, self._pushing = self._pushing, []
        self._last = version, canaries, checksums
        for engine in pushing:
            if engine.url in left_out:
                engine.failure = left_out[engine.url]
                engine.died()
                engine.missed_push()
        pushing = [e for e in pushing if e.url not in left_out]
        self._canaries[version] = {tuple(c.ids): c.logp for c in canaries}
        self._canaries = {v: self._canaries[v] for v in sorted(self._canaries)[-2:]}
        finishing = (self._finish(e, version, canaries, checksums) for e in pushing)
        try:
            await asyncio.gather(
                *(self._dispatcher.attempt(e, f) for e, f in zip(pushing, finishing, strict=True))
            )
        finally:
            # Not before: an engine that is being attested still looks as if it had nothing.
            self._under_way = False
        for engine in pushing:
            if engine.version != version and engine.quarantined is None:
                engine.missed_push()
        self._raise_if_hopeless()
        self._dispatcher.interrupted = False
        self._dispatcher.wake()
        left = [] if self._pool.older is None else self._pool.before_roll()
        if not left:
            self._pool.older = None
        return {**self._figures.told(), "push_left": len(left)}

    @property
    def attested(self) -> bool:
        """Whether no push goes on, and every tensor of the newest version is known by its checksum."""
        return (
            not self._under_way
            and self._pool.older is None
            and self._last is not None
            and bool(self._last[2])
        )

    async def attest(self, engine: EngineState) -> None:
        """As at the end of a push: of one that has got the newest version by itself."""
        assert self._last is not None
        await self._finish(engine, *self._last)

    async def _finish(
        self, engine: EngineState, version: int, canaries: list[Canary], checksums: Sequence[dict[str, str]]
    ) -> None:
        """Nothing of the old weights may stay, and the version is reported only by an engine that has it.

        Held requests go on before the canaries, which would wait behind a pause; what they bring is kept back
        until the engine is attested.
        """
        engine.agreement = engine.match = None
        phases = self._figures.phases
        with phases.concurrent("close"):
            await engine.client.end_weight_update()
        with phases.concurrent("wake_cache"):
            await engine.wake_cache()
        if self._interruption != "in_place":
            with phases.concurrent("flush"):
                await engine.client.flush(
                    paused=engine.paused
                )  # old keys and values are wrong for new weights
        with phases.concurrent("version"):
            await engine.client.set_weight_version(version)
            reported = await engine.client.weight_version()
        if checksums:  # while it is still paused: later they would wait for a pass that reads many prefixes
            engine.match = await self._compare(engine, checksums)
        await self._dispatcher.unpause(engine)
        counting = engine.counting
        engine.counting = False  # a push that ends in here leaves tokens that nobody takes
        with phases.concurrent("canaries"):
            answers = await asyncio.gather(*(self._ask(engine, c) for c in canaries))
        refused = answers.count(None)
        canaries = [c for c, answer in zip(canaries, answers, strict=True) if answer is not None]
        seen = [answer for answer in answers if answer is not None]
        engine.received += len(canaries)  # each asked for one token more
        engine.counting = counting
        self._figures.refused = max(self._figures.refused, refused)
        if refused and not canaries and (engine.match is None or engine.match.unknown):
            self._quarantine(
                engine, f"refused all of {refused} canaries, and nothing else speaks for its weights"
            )
            return
        engine.agreement = Agreement.of([x for c in canaries for x in c.logp], [x for s in seen for x in s])
        self._figures.add(engine)
        if (objection := self._objection(engine, version, reported, canaries, seen)) is not None:
            self._quarantine(engine, objection)
            return
        bounds = self._bounds_of(engine)
        if not engine.agreement.within(bounds):
            self._figures.warned += 1
            gaps = engine.agreement.against(bounds)
            log.warning(
                "%s: its tensors are the trainer's, but canary log-probs differ: %s", engine.url, gaps
            )
        if canaries and engine.match is not None and not engine.match.unknown:
            self._first.setdefault(engine.url, engine.agreement)
        self._checksums.attest(engine.url)
        engine.has(version)

    async def _ask(self, engine: EngineState, canary: Canary) -> list[float] | None:
        """Log-probs of its tokens; None where the engine refuses it, which says something about the canary."""
        try:
            return await engine.client.token_logprobs(canary.ids)
        except EngineError as e:
            if e.status not in REFUSES:
                raise
            log.warning("a canary of %d tokens is left out: %s", len(canary.ids), e)
            return None

    def _bounds_of(self, engine: EngineState) -> Bounds:
        return self._bounds.after(self._first.get(engine.url))

    def _objection(
        self,
        engine: EngineState,
        version: int,
        reported: int,
        canaries: list[Canary],
        seen: list[list[float]],
    ) -> str | None:
        """Why it must not serve, in words; None: it is attested."""
        match, agreement, bounds = engine.match, engine.agreement, self._bounds_of(engine)
        uncompared = bounds.uncompared
        assert agreement is not None
        if reported != version:
            return f"reports weight version {reported}, {version} was pushed"
        if match is not None and match.wrong:
            return match.complaint()
        if match is not None and match.share_unknown > uncompared:
            return (
                f"{len(match.unknown)} tensor(s), {match.share_unknown:.0%}, cannot be compared, more than the "
                f"{uncompared:.0%} that model.fp8 and engine.extra_args explain, first: {match.unknown[0]}"
            )
        equal = match is not None and not match.unknown
        if not agreement.within(bounds, self._patience_with(match)) and not (
            equal and agreement.of_ties(bounds)
        ):
            return f"canary log-probs differ from the trainer's: {agreement.against(bounds)}"
        if not self._follows(version, canaries, seen, match):
            return "canary log-probs are nearer to those before the trainer's step than to those after it"
        return None

    def _follows(
        self, version: int, canaries: list[Canary], seen: list[list[float]], match: Match | None
    ) -> bool:
        """Where checksums do not speak for every tensor: whether the engine went the trainer's last step with it."""
        earlier = min(self._canaries)
        if earlier == version or (match is not None and not match.unknown):
            return True
        before = self._canaries[earlier]
        old: list[float] = []
        new: list[float] = []
        here: list[float] = []
        for canary, found in zip(canaries, seen, strict=True):
            if (was := before.get(tuple(canary.ids))) is not None:
                old, new, here = [*old, *was], [*new, *canary.logp], [*here, *found]
        gain, error = nearness(old, new, here)
        return gain + CHANCE * error >= 0

    def _patience_with(self, match: Match | None) -> float:
        """Times the bounds. Only rounding to half precision earns any, and only where tensors were seen to agree."""
        return WARNING if match is not None and match.equal and not self._bounds.exact else 1.0

    async def _compare(self, engine: EngineState, checksums: Sequence[dict[str, str]]) -> Match:
        with self._figures.phases.concurrent("checksums"):
            own = of_size(checksums, self._tps, engine.client.tp)
            match = self._checksums.compare(engine.url, own, await engine.client.checksums())
        if match.unknown and not self._told:
            self._told = True
            log.warning(
                "%s holds %d of its %d tensors in a layout that cannot be compared with the trainer's, first: %s; "
                "only canaries speak for them",
                engine.url, len(match.unknown), match.equal + len(match.unknown) + len(match.wrong), match.unknown[0],
            )  # fmt: skip
        return match

    def _quarantine(self, engine: EngineState, reason: str) -> None:
        engine.quarantined = reason
        engine.cut_off()

    def _raise_if_hopeless(self) -> None:
        if self._sole and self._pool.hopeless:
            raise RunError(f"no engine can serve weight version {self._pool.version}: {states(self._pool)}")


@dataclass
class Figures:
    """Of a push: the worst of its engines. `warned`: engines beyond the bounds of canaries that were let pass.
    `refused`: canaries that one engine did not take. `phases`: in their order."""

    agreements: list[Agreement] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    warned: int = 0
    refused: int = 0
    phases: Phases = field(default_factory=lambda: Phases("time_push", PHASES))

    def add(self, engine: EngineState) -> None:
        if engine.agreement is not None:
            self.agreements.append(engine.agreement)
        if engine.match is not None:
            self.matches.append(engine.match)

    def told(self) -> dict[str, float]:
        return {
            "push_canary_mean": max((a.mean for a in self.agreements), default=0.0),
            "push_canary_p999": max((a.p999 for a in self.agreements), default=0.0),
            "push_canary_warnings": self.warned,
            "push_canaries_refused": self.refused,
            "push_tensors_equal": min((m.equal for m in self.matches), default=0),
            "push_tensors_unknown": max((len(m.unknown) for m in self.matches), default=0),
            "push_share_unknown": max((m.share_unknown for m in self.matches), default=0.0),
            **(phases := self.phases.metrics),
            "time_checksums": phases["time_push_checksums"],
        }


def of_size(checksums: Sequence[dict[str, str]], tps: Sequence[int], tp: int) -> Sequence[dict[str, str]]:
    """Those of the ranks of an engine of `tp`, out of those of engines of all sizes `tps`; none for another size."""
    if len(tps) < 2:
        return checksums
    first = sum(smaller for smaller in tps if smaller < tp)
    return checksums[first : first + tp] if tp in tps else []


def worst(pushes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of one push through several routers, some of which may have had no engine to push to."""
    told = [{**Figures().told(), "push_left": 0}, *pushes]
    out = {key: max(found[key] for found in told) for key in told[0]}
    for key in ("push_canary_warnings", "push_left"):
        out[key] = sum(found[key] for found in told)
    out["push_tensors_equal"] = min((n for found in told if (n := found["push_tensors_equal"])), default=0)
    return out


def states(pool: Pool) -> str:
    return "; ".join(f"{e.url} {e.state}" for e in pool.engines)
