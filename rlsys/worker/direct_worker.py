"""DirectWorker: the only worker of a run, in the coordinator's event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.core.types import TokenSequence
from rlsys.data import Tokenizer
from rlsys.engine_requests import Limits
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.commit_scheduler import CommitScheduler
from rlsys.router.router import Router
from rlsys.worker.link import LiveStatus, call_method
from rlsys.worker.sample_spans import SampleSpans
from rlsys.worker.scoring import Scorer
from rlsys.worker.streams import Streams, build_streams


class DirectWorker:
    """A worker that calls its router and its streams directly. RemoteWorker describes the methods.

    The coordinator uses the same sample objects, and the ledger saves their tokens.
    """

    grows_trees = False  # no gang start: the coordinator has all samples of each group
    pending_calls = 0

    def __init__(
        self, config: Config, router: Router, scorer: Scorer, tokenizer: Tokenizer | None = None
    ) -> None:
        self._config, self._router, self._scorer, self._tokenizer = config, router, scorer, tokenizer
        self.launch_engines = list(router.engine_states())
        self.watch, self.resume = router.watch, router.resume
        self.add_engine, self.pin, self.unpin = router.add_engine, router.pin, router.unpin

    def attach(self, buffer: RolloutBuffer, commits: CommitScheduler, spans: SampleSpans) -> None:
        """See Workers.attach."""
        self._buffer = buffer
        self._streams: Streams = build_streams(
            self._config, self._router, self._scorer, self._tokenizer, commits,
            lambda sample: buffer.groups[sample.group_id], spans,
        )  # fmt: skip
        streams = self._streams
        self.status = LiveStatus(self._router, streams)
        self.generate, self.score = streams.generate, streams.score
        self.save_running, self.advance = streams.save_running, streams.advance

    async def open(self, *_: Any) -> None:
        """Do nothing: the router and the scorer exist."""

    async def close(self) -> None:
        """Do nothing: the samples are parked, and no process runs."""

    def fail_all(self, error: str) -> None:
        """Do nothing: every call raises its own error."""

    def load(self, group_id: int) -> tuple[float, ...]:
        """See RemoteWorker.load. All keys are equal, because there is only one worker."""
        return ()

    async def interrupt(
        self, keep: Callable[[TokenSequence], bool] | None, *, keep_serving: bool, wait_for_max_resumes: bool
    ) -> list[TokenSequence]:
        """See Streams.interrupt. `wait_for_max_resumes` has no effect, because the coordinator has already waited."""
        return await self._streams.interrupt(keep, keep_serving=keep_serving)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the router."""
        return await call_method(self._router, name, arguments)

    @property
    def limits(self) -> Limits:
        """Limits of prompts in the router."""
        return self._router.limits

    @property
    def serving(self) -> int:
        """Number of serving engines."""
        counts, _ = self._router.tally()
        return int(counts["engines_serving"])

    @property
    def counts_at_save(self) -> tuple[int, int]:
        """Numbers of received and of saved tokens of samples. They are equal when all samples are saved."""
        counts, _ = self._router.tally()
        return int(counts["received_tokens"] - counts["evaluation_tokens"]), self._buffer.added_tokens
