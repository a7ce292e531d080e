"""Workers: the rollout workers of a run, as their coordinator uses them.

Each worker has its own engines (worker_engines.py). All samples of a group run in one worker. A single worker runs in
the coordinator's event loop (direct_worker.py); several workers are processes (remote_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import RunError, error_text
from rlsys.core.imports import module_command
from rlsys.core.run_files import CONFIG_FILE
from rlsys.core.types import Prompt, Sample, TokenSequence
from rlsys.data import Tokenizer
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.router.router import Router
from rlsys.worker.direct_worker import DirectWorker
from rlsys.worker.remote_worker import RemoteWorker
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import RewardParts, Scorer, Verdict
from rlsys.worker.worker_calls import call_each
from rlsys.worker.worker_engines import RolloutWorker, WorkerEngines


class Workers:
    """Owns the rollout workers and the part names of the run's first reward."""

    def __init__(self, config: Config, workers: Sequence[RolloutWorker]) -> None:
        self.workers = workers
        self._parts = RewardParts()
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self.engines = WorkerEngines(config, workers)

    async def start(self, buffer: RolloutBuffer) -> None:
        """Start all workers.

        Raises:
            RunError: a worker did not start.
        """
        engines = self.engines
        await call_each(
            [
                w.open(buffer, partial(engines.state_for, w), partial(engines.on_worker_death, w), self._fail)
                for w in self.workers
            ]
        )

    def attach(self, buffer: RolloutBuffer, commits: CommitScheduler, spans: SampleSpans) -> None:
        """Set the objects that save and trace samples. Call it before the first sample."""
        self._on_failure = lambda error: commits.on_failure(error)
        for worker in self.workers:
            worker.attach(buffer, commits, spans)

    def watches(self) -> list[Coroutine[Any, Any, None]]:
        """Return one endless coroutine per worker, which watches its engines or its process."""
        return [w.watch() for w in self.workers]

    async def close(self) -> None:
        """Stop all workers. Call it after an interrupt."""
        await call_each([w.close() for w in self.workers])

    def _fail(self, error: BaseException) -> None:
        """Fail the run, because a worker failed or cannot be started."""
        text = error_text(error)
        for worker in self.workers:
            worker.fail_all(text)
        self._on_failure(RunError(text))

    # Samples: see Streams

    @property
    def counts(self) -> Mapping[str, int]:
        """See Streams.counts; the sum over workers."""
        return self.engines.generated()

    @property
    def gang_start(self) -> bool:
        """Whether all samples of a group must start together, because a worker grows them as a tree."""
        return any(w.grows_trees for w in self.workers)

    def _worker_for(self, sample: Sample) -> RolloutWorker:
        return min(self.workers, key=lambda w: w.load(sample.group_id))

    async def generate(self, sample: Sample, prompt: Prompt) -> None:
        """See Streams.generate."""
        await self._worker_for(sample).generate(sample, prompt)

    async def score(self, sample: Sample, prompt: Prompt) -> Verdict:
        """See Streams.score."""
        return self._parts.conform(await self._worker_for(sample).score(sample, prompt))

    async def interrupt(
        self,
        keep: Callable[[TokenSequence], bool] | None = None,
        *,
        keep_serving: bool = False,
        wait_for_max_resumes: bool = False,
    ) -> list[TokenSequence]:
        """Interrupt all workers, see RemoteWorker.interrupt."""
        self.engines.open = False
        parked = await call_each(
            [
                w.interrupt(keep, keep_serving=keep_serving, wait_for_max_resumes=wait_for_max_resumes)
                for w in self.workers
            ]
        )
        return [sequence for sequences in parked for sequence in sequences]

    def advance(self, trained_steps: int) -> None:
        """See Streams.advance."""
        self.engines.advance(trained_steps)

    def at_max_resumes(self) -> list[str]:
        """See Streams.at_max_resumes."""
        return [url for w in self.workers for url in w.status.at_max_resumes]

    async def save_running(self) -> None:
        """See Streams.save_running."""
        await call_each([w.save_running() for w in self.workers])


def direct_workers(
    config: Config, router: Router, scorer: Scorer, tokenizer: Tokenizer | None = None
) -> Workers:
    """Create a single worker in this process.

    Args:
        tokenizer: required by generators with several turns.
    """
    return Workers(config, [DirectWorker(config, router, scorer, tokenizer)])


def remote_workers(config: Config, commands: Sequence[Sequence[str]]) -> Workers:
    """Create workers in their own processes.

    Args:
        commands: command line of each worker.
    """
    return Workers(config, [RemoteWorker(config, i, command) for i, command in enumerate(commands)])


def worker_commands(config: Config, urls: Sequence[str]) -> list[list[str]]:
    """Return the command lines that start the workers of a run.

    Args:
        urls: URLs of all engines of the launch.
    """
    engines = [argument for url in urls for argument in ("--engine", url)]
    module = module_command("rlsys.worker.worker", "--config", str(config.run.dir / CONFIG_FILE))
    return [[*module, "--number", str(i), *engines] for i in range(config.rollout.workers)]
