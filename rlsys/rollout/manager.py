"""RolloutManager: hands whole groups to the trainer and guides the pushes of weights.

    restore -> begin_push -> end_push -> [early ->] take -> (train) -> begin_push -> end_push -> take -> ...

Commands run one at a time, under a lock; what the trainer is told has been flushed before. When it repeats
steps after a restart, their groups come from the journal and nothing is generated until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.types import (
    CensorCause,
    GroupState,
    LogProbRequest,
    LogProbResult,
    Sample,
    SampleGroup,
    Status,
    TrainBatch,
)
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.data import PromptSource, Tokenizer
from rlsys.evaluation.eval_sets import EvalSetRunner
from rlsys.evaluation.evaluator import Evaluator
from rlsys.evaluation.results import EvalResult, EvalStatus
from rlsys.generators.generator import build_generator
from rlsys.generators.tools import ToolPenalties
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.ledger.ledger import Ledger, check_conservation
from rlsys.ledger.samples import SampleQuery, SampleView
from rlsys.obs.phases import Phases
from rlsys.planning.planning import Planning
from rlsys.rollout.canaries import Canaries
from rlsys.rollout.controller import OverProvision
from rlsys.rollout.figures import Figures
from rlsys.rollout.keep_budget import KeepBudget
from rlsys.rollout.received import Received
from rlsys.rollout.row_checks import RowChecks
from rlsys.rollout.runner import SampleRunner
from rlsys.rollout.selection import Selection
from rlsys.rollout.waiting import Waiting
from rlsys.router.engines import Engines
from rlsys.router.router import Router
from rlsys.worker.run_replay import ReplaySchedule, ReplayStops, load_record
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer
from rlsys.worker.streams import Streams
from rlsys.worker.workers import Workers

TAKE_PHASES = ("wait", "interrupt", "sleep", "commit")
"""Of a take: until its groups are there; samples come back; engines give their memory; the ledger is on the disk."""


class RolloutManager:
    """Owns where the trainer is. Groups are the buffer's, running samples the runner's, engines the router's."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        router: Router | Workers,
        source: PromptSource,
        scorer: Scorer,
        planning: Planning,
        tokenizer: Tokenizer | None = None,
        eval_sets: Sequence[EvalSetRunner] = (),
        spans: SampleSpans | None = None,
        rows: RowChecks | None = None,
    ) -> None:
        """`tokenizer`: generators of several turns need one. `eval_sets`: somebody else's to close. `spans`: stopped
        with the manager. `rows`: its figures are told."""
        self._spans = spans or SampleSpans(None)
        self._rows = rows
        self._config = config
        self._buffer = buffer
        self._tool_penalties = ToolPenalties(config, tokenizer, buffer.load)
        self._planning = planning
        planning.restore(buffer.note("planning") or "")
        record = load_record(config)
        repeat = None if record is None else ReplaySchedule(record, buffer)
        self._commits = CommitScheduler(buffer)
        self._router: Engines
        self._streams: Streams | Workers
        if isinstance(router, Workers):
            router.attach(self._commits, self._spans)
            self._router, self._streams = router.engines, router
        else:
            stops = None if record is None else ReplayStops(record)
            speak = sampling_turns(config, router) if stops is None else stops.turns(router, config)
            self._router, self._streams = router, Streams(
                config, router, scorer, build_generator(config, tokenizer, speak), self._commits,
                lambda s: buffer.groups[s.group_id], self._spans, config.flush_tokens, stops,
            )  # fmt: skip
        engines = self._router
        self._evaluator = Evaluator(config, engines, source, scorer, tokenizer, eval_sets)
        self._runner = SampleRunner(
            config, buffer, self._commits, planning, self._streams, repeat, self._spans
        )
        self._selection = Selection(config, buffer, repeat, self._streams.at_max_resumes)
        self._canaries = Canaries(source, config.eval.prompts, lambda: engines.limits)
        self._over_provision = OverProvision(config, buffer, self._runner)
        self._keep_budget = KeepBudget(config, buffer)
        self._waiting = Waiting(
            config, buffer, engines, self._runner, self._selection, self._called_away, self._give_up
        )
        self._figures = Figures(config, buffer, engines, scorer, planning, self._counts)
        counts_at_save = router.engines.counts_at_save if isinstance(router, Workers) else None
        self._received = Received(buffer, engines, counts_at_save)
        self._colocated = config.launch.placement == "colocated"
        self._command = asyncio.Lock()
        self._done_steps = 0
        """Train steps that have their groups: up to the last one taken, or the restored checkpoint's."""
        self._trained_steps: int | None = None
        """Train steps that the engines' weights contain; None before the first push."""
        self._push_due = True
        self._rolling = False
        """A push has updated some engines, and others serve with the weights before it until their round."""
        self._take_seconds = Phases("time_take", TAKE_PHASES).metrics
        """Of the last take that was the first of its step."""
        self._parts: list[list[int]] = []
        """Of the next step: ids of the groups that the trainer was given before its take."""
        self._leave_by: float | None = None
        """Loop time by which the trainer must have left; None as long as nobody asked for it."""

    # Commands of the trainer

    async def restore(self, train_step: int) -> None:
        """The trainer holds the weights after this many steps. Everything running stops; a push must follow."""
        async with self._command:
            await self._evaluator.stop()
            await self._interrupt_all()
            await self._runner.reset()
            self._buffer.restore(train_step)
            check_conservation(self._buffer.ledger())
            self._commits.flush()
            self._done_steps, self._trained_steps, self._push_due = train_step, None, True
            self._rolling = False
            self._parts = []

    async def early(self, train_step: int) -> TrainBatch | None:
        """Groups that `take(train_step)` will give, as soon as they fill a micro-batch of every rank; each once.

        None when the step's groups are all there, or something else comes first: ask `take`. In memory only until
        the take: a trainer that dies before has lost what it did with them, and a new one is given them again. A step
        that is repeated gets the portions that it had.
        """
        async with self._command:
            trained_steps = self._steps_before(train_step)
            if train_step > self._buffer.last_taken_step:
                version = self._buffer.versions.newest
                part: list[int] = []
                if self._selection.groups(trained_steps) is None:
                    self._generate(trained_steps)
                    given = {i for part in self._parts for i in part}
                    part = await self._waiting.for_part(trained_steps, given)
            else:
                version, _ = self._buffer.read_step(train_step)
                part = next(iter(self._buffer.parts(train_step)[len(self._parts) :]), [])
            if not part:
                return None
            groups = self._buffer.read_groups(part)
            self._tool_penalties.put(groups)
            self._selection.mask_old(groups, self._buffer.versions.trained_steps(version))
            self._commits.flush()
            self._parts.append(part)
            return TrainBatch(train_step, version, groups, {}, self._planning.sources(groups))

    def _steps_before(self, train_step: int) -> int:
        """Train steps that the weights contain which this step updates. RunError when it is not its turn."""
        next_step = self._done_steps + (not self._push_due)
        if self._trained_steps is None or train_step not in (self._done_steps, next_step):
            raise RunError(f"take({train_step}) after {self._done_steps} steps: a push comes first")
        return self._trained_steps

    async def take(self, train_step: int) -> TrainBatch | None:
        """The groups of this step, the same ones however often it is asked for; waits until there are enough.

        None when an engine came back without the current weights: push, then ask again; and when the run is
        leaving (`status`): there will be no more groups.
        """
        async with self._command:
            if self._leave_by is not None:
                return None
            trained_steps = self._steps_before(train_step)
            new = train_step > self._buffer.last_taken_step
            phases = Phases("time_take", TAKE_PHASES)
            if new:
                if self._selection.groups(trained_steps) is None:
                    self._generate(trained_steps)
                    with phases.add("wait"):
                        await self._waiting.for_groups(trained_steps)
                chosen = None if self._leave_by is not None else self._selection.groups(trained_steps)
                if chosen is None:
                    return None
                self._buffer.take(train_step, chosen, self._parts)
                self._runner.begin_step()
            counts = self._figures.counts()
            version, groups = self._buffer.read_step(train_step)
            self._tool_penalties.put(groups)
            if self._colocated:
                with phases.add("interrupt"):
                    await self._interrupt_all(keep=self._kept(train_step), wait_for_max_resumes=True)
                if self._config.launch.release_memory:
                    with phases.add("sleep"):
                        await self._router.release_memory()
            masked = self._selection.mask_old(groups, self._buffer.versions.trained_steps(version))
            metrics = self._figures.of_step(train_step, version, groups)
            if new:
                self._over_provision.steer(metrics["off_policy_share"])
            metrics |= {**self._over_provision.figures, **self._keep_budget.figures, "masked_tokens": masked}
            self._buffer.check_counts()
            with phases.add("commit"):
                self._commits.flush()
            if new:
                self._take_seconds = phases.metrics
            self._done_steps, self._push_due, self._parts = train_step, True, []
            self._canaries.see(groups, self._buffer.load)
            self._go_on()
            beside = {f"reward_figure_{k}": v for k, v in self._runner.beside_rewards.take().items()}
            return TrainBatch(
                train_step,
                version,
                groups,
                {
                    **metrics,
                    **beside,
                    **counts,
                    **self._figures.totals(),
                    **self._spans.metrics(),
                    **self._take_seconds,
                },
                self._planning.sources(groups),
            )

    async def unscored(self, train_step: int) -> list[LogProbRequest]:
        """After `take(train_step)`: live samples with tokens that the trainer's still resident weights sampled."""
        async with self._command:
            if train_step != self._done_steps or not self._push_due or not self._colocated:
                raise RunError(f"unscored({train_step}): engines must rest, between a take and its push")
            found = self._selection.unscored(train_step - 1)
            self._commits.flush()
            return found

    async def store_scores(self, scores: list[LogProbResult]) -> None:
        async with self._command:
            self._buffer.store_scores(scores)
            self._commits.flush()

    async def begin_push(self, mismatch_kept: float | None = None) -> WeightUpdate:
        """Interrupt, take a new version, drop what it makes too old. When no step is due, for stale engines only.
        `mismatch_kept`: of the step that was trained, see KeepBudget.steer.

        With `weights.rolling` each call is one round: the engines of the ticket rest, the others go on.
        """
        async with self._command:
            self._runner.raise_failure()
            first, members = self._push_due and not self._rolling, self._next_members()
            if (members or (first and not self._colocated)) and self._trained_steps is not None:
                await self._waiting.until_interruptible(self._trained_steps, members or None)
            if first:
                self._keep_budget.steer(mismatch_kept)
                await self._begin_version(rolls=bool(members))
            version = self._buffer.versions.newest
            engines = await self._router.begin_push(version, only_stale=not first, members=members)
            if members:
                await self._streams.save_running()
                self._received.settle()
            self._commits.flush()
            return WeightUpdate(version, engines, self._canaries.sequences())

    async def _begin_version(self, *, rolls: bool) -> None:
        """The next weight version, and no group any more that is too old for every step to come (invariant 7).

        `rolls`: engines go on, but not with such groups. Else nothing is in flight from here on.
        """
        if not self._colocated and (
            not rolls or self._selection.too_old(self._done_steps)
        ):  # else take has done it
            await self._interrupt_all(
                keep=self._kept(self._done_steps), keep_serving=rolls, wait_for_max_resumes=True
            )
        self._buffer.versions.new(self._done_steps)
        await self._runner.drop(self._selection.too_old(self._done_steps), GroupState.EXPIRED)
        self._commits.flush()
        self._rolling = rolls
        if rolls:
            self._go_on()

    def _kept(self, done_steps: int) -> Callable[[Sample], bool]:
        """What may stay in its engine over the push after so many steps."""
        in_flight = (s for g in self._buffer.active() for s in g.samples if s.status is Status.IN_FLIGHT)
        chosen = self._keep_budget.choose(in_flight)
        return lambda sample: chosen(sample) and self._selection.stays_young(sample, done_steps)

    def _next_members(self) -> list[str]:
        """URLs of the engines of the next round. None after a restart: nothing is made then that could go on."""
        at_once = self._config.weights.rolling
        may_roll = at_once is not None and self._trained_steps is not None and self._push_due
        return self._router.next_members(at_once or 0) if may_roll else []

    async def end_push(
        self,
        ticket: WeightUpdate,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        left_out: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """Attest the engines of the ticket but those of `left_out` (URL -> why), then go on generating. Returns the
        push's metrics; as long as `push_left` of them is not 0, the trainer begins another round.

        Until the last round, admission counts with the oldest weights that serve.
        """
        async with self._command:
            version = self._buffer.versions.newest
            if ticket.weight_version != version:
                raise RunError(f"end_push of weight version {ticket.weight_version}, begun was {version}")
            metrics = await self._router.end_push(version, canaries, checksums, left_out)
            if not metrics["push_left"]:
                self._trained_steps, self._push_due, self._rolling = self._done_steps, False, False
            self._go_on()
            return metrics

    async def evaluate(self) -> EvalResult:
        """Of the weights that serve. The engines keep them meanwhile: a push is another command."""
        async with self._command:
            return await self._evaluator.measure(self._waiting.watched, self._done_steps)

    async def begin_evaluation(self) -> bool:
        """The same in the background, by an engine that is pinned for it. False: none can be spared now."""
        async with self._command:
            return self._evaluator.begin(self._done_steps)

    async def end_evaluation(self, wait: bool) -> EvalStatus:
        """What became of it; its line of metrics is the trainer's to write."""
        async with self._command:
            return await self._evaluator.poll(wait, self._waiting.watched)

    async def commit(self, train_step: int) -> None:
        """A checkpoint of this step is on disk: what no kept checkpoint can want is forgotten.

        RunError for a step that has not been taken: nothing of it can be on disk.
        """
        async with self._command:
            if train_step > self._done_steps:
                raise RunError(f"commit({train_step}) after {self._done_steps} steps: no such checkpoint yet")
            t = self._config.trainer
            self._commits.flush()
            check_conservation(await self._buffer.committed_ledger())
            await self._streams.save_running()  # the engines' files go with what nobody has claimed of them
            self._buffer.prune(train_step - (t.keep_checkpoints - 1) * t.checkpoint_every)
            self._commits.flush()

    async def leave(self, seconds: float) -> None:
        """The machines will be taken away: a waiting take gives up, everything is parked and on disk afterwards.

        The trainer has about so many seconds to save what it has.
        """
        self._leave_by = asyncio.get_running_loop().time() + seconds
        self._runner.wake.set()
        async with self._command:
            await self._evaluator.stop()
            await self._interrupt_all()
            self._commits.flush()

    async def close(self) -> None:
        """Park what is in flight, durably, and end every task."""
        try:
            await self._evaluator.stop()
            await self._interrupt_all()
        finally:
            await self._runner.reset()
            self._commits.flush()
            self._spans.stop(s for g in self._buffer.active() for s in g.samples)

    # Figures

    async def ledger(self) -> Ledger:
        """For readers, who may not look into the file while it is open here."""
        self._commits.flush()
        return await self._buffer.committed_ledger()

    def samples(self, query: SampleQuery) -> list[SampleView]:
        """The same: a page of them, what is not flushed included."""
        return self._buffer.samples(query)

    def status(self) -> dict[str, object]:
        """For the live display. `leaving`: seconds left; None when nobody asked the run to leave."""
        left = None if self._leave_by is None else self._leave_by - asyncio.get_running_loop().time()
        own = {"train_step": self._done_steps, "leaving": left, "waiting_for": self._waiting.missing()}
        return self._figures.now() | own

    def _counts(self) -> dict[str, int]:
        """What the generator counts, and samples that were censored, by cause."""
        censored = {f"censored_samples_{cause}": self._runner.censored[cause] for cause in CensorCause}
        rows = {} if self._rows is None else self._rows.figures
        return {**self._streams.counts, **censored, **rows}

    # Order of operations

    async def _give_up(self, late: Collection[SampleGroup], trained_steps: int) -> None:
        await self._interrupt_all()
        await self._runner.censor_overdue(late)
        self._generate(trained_steps)

    def _called_away(self) -> bool:
        """Something else comes first: an engine needs weights, or the run is to leave."""
        return bool(self._router.stale_engines) or self._leave_by is not None

    def _generate(self, trained_steps: int) -> None:
        """Samples that wait for an engine go on, and what may start starts."""
        self._router.resume()
        self._runner.advance(trained_steps)

    def _go_on(self) -> None:
        """Disaggregated engines always generate, unless the trainer repeats steps whose groups are there already.

        Colocated ones only while a take waits: what they made during an evaluation or a checkpoint would be a
        surplus that grows old, and what a take with enough of it interrupts would have been prefilled for nothing.
        """
        caught_up = self._done_steps >= self._buffer.last_taken_step
        if not self._colocated and caught_up and self._leave_by is None and self._trained_steps is not None:
            self._generate(self._trained_steps)

    async def _interrupt_all(
        self,
        keep: Callable[[Sample], bool] | None = None,
        *,
        keep_serving: bool = False,
        wait_for_max_resumes: bool = False,
    ) -> None:
        """Nothing is in flight when this returns, or only samples to `keep` in engines that hold them; every token
        that came is in the buffer, lost ones are counted. `going_on`: engines go on with samples to keep. `gently`:
        rollout.max_resumes counts, unless something else comes first.
        """
        wait_for_max_resumes = wait_for_max_resumes and not self._called_away()
        if not keep_serving:
            self._runner.pause()
        parked = await self._streams.interrupt(
            keep, keep_serving=keep_serving, wait_for_max_resumes=wait_for_max_resumes
        )
        self._buffer.replay_log.record_interrupts(parked)
        self._spans.on_interrupt(parked)
        self._received.settle()
