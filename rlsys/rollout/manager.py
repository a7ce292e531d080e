"""RolloutManager: gives complete groups to the trainer and directs the pushes of weights.

    restore -> begin_push -> end_push -> [early ->] take -> (train) -> begin_push -> end_push -> take -> ...

Commands run one at a time, under a lock, and flush the ledger before they return. When the trainer repeats steps
after a restart, the groups of these steps come from the journal, and no sample runs until the trainer has caught up.
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
    SampleGroup,
    Status,
    TokenSequence,
    TrainBatch,
)
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.data import PromptSource, Tokenizer
from rlsys.evaluation.eval_sets import EvalSetRunner
from rlsys.evaluation.evaluator import Evaluator
from rlsys.evaluation.results import EvalResult, EvalStatus
from rlsys.generators.tools import ToolPenalties
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.ledger.ledger import Ledger, check_conservation
from rlsys.ledger.samples import SampleQuery, SampleView
from rlsys.obs.phases import Phases
from rlsys.planning.planning import Planning
from rlsys.rollout.canaries import Canaries
from rlsys.rollout.controller import OverProvision
from rlsys.rollout.keep_budget import KeepBudget
from rlsys.rollout.progress_watch import ProgressWatch
from rlsys.rollout.row_checks import RowChecks
from rlsys.rollout.run_metrics import RunMetrics
from rlsys.rollout.runner import SampleRunner
from rlsys.rollout.selection import Selection
from rlsys.rollout.token_reconciliation import TokenReconciliation
from rlsys.worker.run_replay import ReplaySchedule, load_record
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import Workers

TAKE_PHASES = ("wait", "interrupt", "sleep", "commit")
"""Phases of a take: wait for groups; interrupt samples; release engine memory; commit the ledger."""


class RolloutManager:
    """Executes the trainer's commands. Owns the trainer's position.

    The buffer owns the groups, the runner owns the tasks of samples, and the workers own the engines.
    """

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        workers: Workers,
        source: PromptSource,
        scorer: Scorer,
        planning: Planning,
        tokenizer: Tokenizer | None = None,
        eval_sets: Sequence[EvalSetRunner] = (),
        spans: SampleSpans | None = None,
        rows: RowChecks | None = None,
    ) -> None:
        """Create the manager.

        Args:
            source: provides held-out prompts and canaries.
            scorer: scores the responses of evaluations.
            planning: decides on groups; its state is restored from the buffer.
            tokenizer: required by generators with several turns.
            eval_sets: additional evaluations; the caller closes them.
            spans: tracing of samples; the manager stops it.
            rows: the check of all rows; its metrics become metrics of the steps.
        """
        self._spans = spans or SampleSpans(None)
        self._rows = rows
        self._config = config
        self._buffer = buffer
        self._tool_penalties = ToolPenalties(config, tokenizer, buffer.load)
        self._planning = planning
        planning.restore(buffer.note("planning") or "")
        record = load_record(config)
        replay = None if record is None else ReplaySchedule(record, buffer)
        self._commits = CommitScheduler(buffer)
        workers.attach(buffer, self._commits, self._spans)
        self._workers, self._engines = workers, workers.engines
        engines = self._engines
        self._evaluator = Evaluator(config, engines, source, scorer, tokenizer, eval_sets)
        self._runner = SampleRunner(config, buffer, self._commits, planning, workers, replay, self._spans)
        self._selection = Selection(config, buffer, replay, workers.at_max_resumes)
        self._canaries = Canaries(source, config.eval.prompts, lambda: engines.limits)
        self._over_provision = OverProvision(config, buffer, self._runner)
        self._keep_budget = KeepBudget(config, buffer)
        self._progress_watch = ProgressWatch(
            config, buffer, engines, self._runner, self._selection, self._is_preempted, self._censor_overdue
        )
        self._metrics = RunMetrics(config, buffer, engines, scorer, planning, self._counts)
        self._reconciliation = TokenReconciliation(buffer, engines)
        self._colocated = config.launch.placement == "colocated"
        self._command = asyncio.Lock()
        self._done_steps = 0
        """The last train step whose groups were taken, or the step of the restored checkpoint."""
        self._trained_steps: int | None = None
        """Number of train steps in the engines' weights; None before the first push."""
        self._push_due = True
        """Whether the trainer must push before it takes the next step."""
        self._rolling = False
        """Whether a rolling push is under way: some engines have the new weights, the others wait for their round."""
        self._take_seconds = Phases("time_take", TAKE_PHASES).metrics
        """Durations of the phases of the last take that was not a repetition."""
        self._parts: list[list[int]] = []
        """Portions of the next step: ids of the groups that `early` has returned since the last take."""
        self._leave_by: float | None = None
        """Loop time by which the trainer must have left; None: no request to leave."""

    # Commands of the trainer

    async def restore(self, train_step: int) -> None:
        """Set the trainer's position to its checkpoint, and interrupt all samples. A push must follow.

        Args:
            train_step: number of train steps in the checkpoint.
        """
        async with self._command:
            await self._evaluator.stop()
            await self._interrupt_all()
            await self._runner.reset()
            self._buffer.restore(train_step)
            check_conservation(self._buffer.ledger())
            self._commits.flush()
            self._done_steps = train_step
            self._trained_steps = None
            self._push_due = True
            self._rolling = False
            self._parts = []

    async def early(self, train_step: int) -> TrainBatch | None:
        """Wait for groups of `take(train_step)` that fill a micro-batch of every rank. Each group is returned once.

        Portions are only in memory until the take: if the trainer dies earlier, its successor receives the groups
        again. A repeated step has the same portions.

        Returns:
            the next portion of groups; None if all groups of the step are ready, or the wait is preempted.
        """
        async with self._command:
            trained_steps = self._steps_before(train_step, "early")
            if train_step > self._buffer.last_taken_step:
                version = self._buffer.versions.newest
                part: list[int] = []
                if self._selection.groups(trained_steps) is None:
                    self._generate(trained_steps)
                    returned_ids = {group_id for portion in self._parts for group_id in portion}
                    part = await self._progress_watch.wait_for_part(trained_steps, returned_ids)
            else:
                version, _ = self._buffer.read_step(train_step)
                part = next(iter(self._buffer.parts(train_step)[len(self._parts) :]), [])
            if not part:
                return None
            groups = self._buffer.read_groups(part)
            self._tool_penalties.set_penalties(groups)
            self._selection.mask_old(groups, self._buffer.versions.trained_steps(version))
            self._commits.flush()
            self._parts.append(part)
            return TrainBatch(train_step, version, groups, {}, self._planning.sources(groups))

    def _steps_before(self, train_step: int, command: str) -> int:
        """Return the number of train steps in the weights that the engines have before this step.

        Args:
            command: name of the command, for errors.

        Raises:
            RunError: `train_step` is neither the next step nor the last one, or a push is missing.
        """
        call = f"{command}({train_step}) after {self._done_steps} steps"
        next_step = self._done_steps + 1
        if self._trained_steps is None or (self._push_due and train_step == next_step):
            raise RunError(f"{call}: the trainer must push first")
        if train_step not in (self._done_steps, next_step):
            raise RunError(f"{call}: expected step {self._done_steps} or {next_step}")
        return self._trained_steps

    async def take(self, train_step: int) -> TrainBatch | None:
        """Wait for the groups of this step and return them. A repeated call returns the same groups.

        Returns:
            None if an engine came back without the current weights (push, then call again), or if the run is
                leaving (`status`), so that there are no more groups.
        """
        async with self._command:
            if self._leave_by is not None:
                return None
            trained_steps = self._steps_before(train_step, "take")
            new = train_step > self._buffer.last_taken_step
            phases = Phases("time_take", TAKE_PHASES)
            if new and not await self._take_new(train_step, trained_steps, phases):
                return None
            counts = self._metrics.counts()
            version, groups = self._buffer.read_step(train_step)
            self._tool_penalties.set_penalties(groups)
            if self._colocated:
                await self._free_devices(train_step, phases)
            masked = self._selection.mask_old(groups, self._buffer.versions.trained_steps(version))
            metrics = self._metrics.step_metrics(train_step, version, groups)
            if new:
                self._over_provision.steer(metrics["off_policy_share"])
            metrics |= {**self._over_provision.metrics, **self._keep_budget.metrics, "masked_tokens": masked}
            self._buffer.check_counts()
            with phases.add("commit"):
                self._commits.flush()
            if new:
                self._take_seconds = phases.metrics
            self._done_steps, self._push_due, self._parts = train_step, True, []
            self._canaries.update(groups, self._buffer.load)
            self._continue_generation()
            metrics |= {f"reward_figure_{k}": v for k, v in self._runner.reward_metrics.take().items()}
            metrics |= counts | self._metrics.totals() | self._spans.metrics() | self._take_seconds
            return TrainBatch(train_step, version, groups, metrics, self._planning.sources(groups))

    async def _take_new(self, train_step: int, trained_steps: int, phases: Phases) -> bool:
        """Wait for the groups of a step that was not taken before, and assign them to it.

        Returns:
            False if the wait was preempted.
        """
        if self._selection.groups(trained_steps) is None:
            self._generate(trained_steps)
            with phases.add("wait"):
                await self._progress_watch.wait_for_groups(trained_steps)
        selected = None if self._leave_by is not None else self._selection.groups(trained_steps)
        if selected is None:
            return False
        self._buffer.take(train_step, selected, self._parts)
        self._runner.begin_step()
        return True

    async def _free_devices(self, train_step: int, phases: Phases) -> None:
        """Interrupt generation on the trainer's devices, and release the engines' memory if the config says so."""
        with phases.add("interrupt"):
            await self._interrupt_all(keep=self._keep_predicate(train_step), wait_for_max_resumes=True)
        if self._config.launch.release_memory:
            with phases.add("sleep"):
                await self._engines.release_memory()

    async def unscored(self, train_step: int) -> list[LogProbRequest]:
        """Return live samples with tokens sampled by the trainer's resident weights.

        Raises:
            RunError: the call is not between the take of this step and its push, or engines are disaggregated.
        """
        async with self._command:
            if train_step != self._done_steps or not self._push_due or not self._colocated:
                raise RunError(
                    f"unscored({train_step}): allowed only between a take and its push, with colocated engines"
                )
            requests = self._selection.unscored(train_step - 1)
            self._commits.flush()
            return requests

    async def store_scores(self, scores: list[LogProbResult]) -> None:
        """Store log-probs durably, for the later step that trains on the tokens of these samples."""
        async with self._command:
            self._buffer.store_scores(scores)
            self._commits.flush()

    async def begin_push(self, mismatch_kept: float | None = None) -> WeightUpdate:
        """Interrupt samples, create a new weight version, and drop groups that are too old for it.

        Without a new train step, push to stale engines only. With `weights.rolling`, each call is one round:
        the engines of the update pause, the others continue.

        Args:
            mismatch_kept: see KeepBudget.steer.
        """
        async with self._command:
            self._runner.raise_failure()
            first = self._push_due and not self._rolling
            members = self._next_members()
            if (members or (first and not self._colocated)) and self._trained_steps is not None:
                await self._progress_watch.wait_until_interruptible(self._trained_steps, members or None)
            if first:
                self._keep_budget.steer(mismatch_kept)
                await self._begin_version(rolls=bool(members))
            version = self._buffer.versions.newest
            engines = await self._engines.begin_push(version, only_stale=not first, members=members)
            if members:
                await self._workers.save_running()
                self._reconciliation.reconcile()
            self._commits.flush()
            return WeightUpdate(version, engines, self._canaries.sequences())

    async def _begin_version(self, *, rolls: bool) -> None:
        """Create the next weight version, and drop the groups that are too old for every later step (invariant 7).

        Args:
            rolls: whether the push is rolling, so that engines continue with the other groups. Otherwise the samples
                of these groups are interrupted.
        """
        # `take` has already interrupted colocated engines.
        if not self._colocated and (not rolls or self._selection.too_old(self._done_steps)):
            await self._interrupt_all(
                keep=self._keep_predicate(self._done_steps), keep_serving=rolls, wait_for_max_resumes=True
            )
        self._buffer.versions.new(self._done_steps)
        await self._runner.drop(self._selection.too_old(self._done_steps), GroupState.EXPIRED)
        self._commits.flush()
        self._rolling = rolls
        if rolls:
            self._continue_generation()

    def _keep_predicate(self, done_steps: int) -> Callable[[TokenSequence], bool]:
        """Return a predicate that is true for samples that may stay in their engine during the next push.

        Args:
            done_steps: number of train steps in the weights of the next push.
        """
        in_flight = (s for g in self._buffer.active() for s in g.samples if s.status is Status.IN_FLIGHT)
        within_budget = self._keep_budget.choose(in_flight)
        return lambda sample: within_budget(sample) and self._selection.stays_young(sample, done_steps)

    def _next_members(self) -> list[str]:
        """Return the URLs of the engines of the next round of a rolling push.

        The list is empty without `weights.rolling`, before the first push, and without a new train step.
        """
        round_size = self._config.weights.rolling
        if round_size is None or self._trained_steps is None or not self._push_due:
            return []
        return self._engines.next_members(round_size)

    async def end_push(
        self,
        update: WeightUpdate,
        canaries: list[Canary],
        checksums: Sequence[dict[str, str]] = (),
        excluded: Mapping[str, str] = {},
    ) -> dict[str, float]:
        """Attest the engines of the update, then continue generation.

        Until the last round of a rolling push, groups are admitted by the age of the oldest served weights.

        Args:
            update: the result of begin_push.
            canaries: sequences with the trainer's log-probs.
            checksums: see WeightPush.end.
            excluded: URL -> reason, for engines that did not get all tensors.

        Returns:
            metrics of the push; while `push_left` is not 0, the trainer starts another round.

        Raises:
            RunError: `update` does not belong to the last begin_push.
        """
        async with self._command:
            version = self._buffer.versions.newest
            if update.weight_version != version:
                raise RunError(
                    f"end_push: weight version {update.weight_version}; expected {version}, as in begin_push"
                )
            metrics = await self._engines.end_push(version, canaries, checksums, excluded)
            if not metrics["push_left"]:
                self._trained_steps, self._push_due, self._rolling = self._done_steps, False, False
            self._continue_generation()
            return metrics

    async def evaluate(self) -> EvalResult:
        """Evaluate the served weights."""
        async with self._command:
            return await self._evaluator.measure(self._progress_watch.watch, self._done_steps)

    async def begin_evaluation(self) -> bool:
        """Start a background evaluation on a pinned engine.

        Returns:
            False if no engine can be pinned now.
        """
        async with self._command:
            return self._evaluator.begin(self._done_steps)

    async def end_evaluation(self, wait: bool) -> EvalStatus:
        """Return the status of the background evaluation; with `wait`, after it has ended."""
        async with self._command:
            return await self._evaluator.poll(wait, self._progress_watch.watch)

    async def commit(self, train_step: int) -> None:
        """Delete tokens that no kept checkpoint needs, after a checkpoint of this step was saved.

        Raises:
            RunError: the step has not been taken, so it cannot have a checkpoint.
        """
        async with self._command:
            if train_step > self._done_steps:
                raise RunError(
                    f"commit({train_step}) after {self._done_steps} steps: expected a step that has been taken"
                )
            t = self._config.trainer
            self._commits.flush()
            check_conservation(await self._buffer.committed_ledger())
            await self._workers.save_running()  # claims routes before the engines' files are deleted
            self._buffer.prune(train_step - (t.keep_checkpoints - 1) * t.checkpoint_every)
            self._commits.flush()

    async def leave(self, seconds: float) -> None:
        """Park all samples durably and end a waiting take, because the machines will be taken away.

        Args:
            seconds: time for the trainer to save its state.
        """
        self._leave_by = asyncio.get_running_loop().time() + seconds
        self._runner.wake.set()
        async with self._command:
            await self._evaluator.stop()
            await self._interrupt_all()
            self._commits.flush()

    async def close(self) -> None:
        """Park samples in flight durably, and end all tasks."""
        try:
            await self._evaluator.stop()
            await self._interrupt_all()
        finally:
            await self._runner.reset()
            self._commits.flush()
            self._spans.stop(s for g in self._buffer.active() for s in g.samples)

    # Status and readers

    async def ledger(self) -> Ledger:
        """Return the ledger, for readers that cannot open the file while this process has it open."""
        self._commits.flush()
        return await self._buffer.committed_ledger()

    def samples(self, query: SampleQuery) -> list[SampleView]:
        """Return one page of samples, including changes that are not flushed."""
        return self._buffer.samples(query)

    def status(self) -> dict[str, object]:
        """Return the status for the live display.

        - train_step: number of train steps that have their groups.
        - leaving: number of seconds in which the trainer must have left; None: no request to leave.
        - waiting_for: description of unfinished groups.
        - others: see RunMetrics.status.
        """
        seconds_left = None if self._leave_by is None else self._leave_by - asyncio.get_running_loop().time()
        own_status = {
            "train_step": self._done_steps,
            "leaving": seconds_left,
            "waiting_for": self._progress_watch.missing(),
        }
        return self._metrics.status() | own_status

    def _counts(self) -> dict[str, int]:
        """Return the counts of the generator, and of censored samples by cause."""
        censored = {f"censored_samples_{cause}": self._runner.censored[cause] for cause in CensorCause}
        rows = {} if self._rows is None else self._rows.metrics
        return {**self._workers.counts, **censored, **rows}

    # Order of operations

    async def _censor_overdue(self, late: Collection[SampleGroup], trained_steps: int) -> None:
        """Interrupt all samples, censor late groups, and continue generation."""
        await self._interrupt_all()
        await self._runner.censor_overdue(late)
        self._generate(trained_steps)

    def _is_preempted(self) -> bool:
        """Return whether a wait must end early: an engine needs weights, or the run is leaving."""
        return bool(self._engines.stale_engines) or self._leave_by is not None

    def _generate(self, trained_steps: int) -> None:
        """Resume samples that wait for an engine, and start new ones."""
        self._engines.resume()
        self._runner.advance(trained_steps)

    def _continue_generation(self) -> None:
        """Continue generation on disaggregated engines, unless the trainer repeats steps that have their groups.

        Colocated engines generate only during a take: samples generated during an evaluation or a checkpoint would
        only grow old, and samples interrupted by a take that has enough groups would be prefilled for nothing.
        """
        caught_up = self._done_steps >= self._buffer.last_taken_step
        if not self._colocated and caught_up and self._leave_by is None and self._trained_steps is not None:
            self._generate(self._trained_steps)

    async def _interrupt_all(
        self,
        keep: Callable[[TokenSequence], bool] | None = None,
        *,
        keep_serving: bool = False,
        wait_for_max_resumes: bool = False,
    ) -> None:
        """Interrupt samples. On return, every token that arrived is in the buffer, and lost tokens are counted.

        Args:
            keep: returns whether a sample stays in its engine, if the engine keeps samples; None: no sample stays.
            keep_serving: the engines continue with the samples that stay.
            wait_for_max_resumes: first wait for samples that rollout.max_resumes protects, unless preempted.
        """
        wait_for_max_resumes = wait_for_max_resumes and not self._is_preempted()
        if not keep_serving:
            self._runner.pause()
        parked = await self._workers.interrupt(
            keep, keep_serving=keep_serving, wait_for_max_resumes=wait_for_max_resumes
        )
        self._buffer.replay_log.record_interrupts(parked)
        self._spans.on_interrupt(parked)
        self._reconciliation.reconcile()
