"""What happens to each sample, and when: a span of its life (rlsys/obs/spans.py).

In memory only. What a process that is killed knew of unfinished samples is lost; what is parked when a process ends
in order is sent as a span of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlsys.core.types import Sample
from rlsys.obs.otlp import SpanSender
from rlsys.obs.spans import Span, Value, child_of, sample_span


@dataclass
class Life:
    """Of a sample in this process. `version`: of the weights that sampled its last token, None before the first."""

    start: float
    version: int | None
    parked: bool
    events: list[tuple[float, str, dict[str, Value]]] = field(default_factory=list)


class SampleSpans:
    """Owns the lives of the samples that have begun here and are not settled. Without a sender it does nothing."""

    def __init__(self, sender: SpanSender | None, clock: Callable[[], float] = time.time) -> None:
        self._sender = sender
        self._clock = clock
        self._lives: dict[int, Life] = {}

    def begin(self, sample: Sample) -> None:
        """It waits for an engine from now on. Once more is no new life."""
        if self._sender is not None and sample.sample_id not in self._lives:
            version = sample.spans[-1].version if sample.spans else None
            self._lives[sample.sample_id] = Life(self._clock(), version, parked=bool(sample.tokens))

    def heard(self, sample: Sample) -> None:
        """It has just got tokens."""
        if (life := self._lives.get(sample.sample_id)) is None:
            return
        version = sample.spans[-1].version
        if life.version is None:
            self._note(life, "first_token", {"rlsys.weight_version": version})
        elif life.parked:
            self._note(life, "resume", {"rlsys.weight_version": version, "rlsys.engine": sample.engine or ""})
        if life.version not in (None, version):
            self._note(life, "weights", {"rlsys.weight_version": version})
        life.version, life.parked = version, False

    def interrupted(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if (life := self._lives.get(sample.sample_id)) is not None:
                self._note(life, "interrupt", {"rlsys.tokens": sample.tokens})
                life.parked = True

    def _note(self, life: Life, name: str, attributes: dict[str, Value]) -> None:
        life.events.append((self._clock(), name, attributes))

    def end(self, sample: Sample, reason: str | None = None) -> None:
        """It has its reward, or `reason` says why there will be none."""
        if (life := self._lives.pop(sample.sample_id, None)) is None:
            return
        if sample.reward is not None:
            self._note(life, "reward", {"rlsys.reward": sample.reward})
        self._send(sample, life, error=reason)

    def stop(self, samples: Iterable[Sample]) -> None:
        """The process ends. What it did of these unfinished ones is sent, as parts of their spans to come."""
        for sample in samples:
            if (life := self._lives.pop(sample.sample_id, None)) is not None:
                self._send(sample, life, part=True)
        if self._sender is not None:
            self._sender.close()

    def _send(self, sample: Sample, life: Life, *, error: str | None = None, part: bool = False) -> None:
        assert self._sender is not None
        whole = sample_span(self._sender.run_id, sample.sample_id)
        attributes: dict[str, Value] = {
            "rlsys.sample": sample.sample_id,
            "rlsys.group": sample.group_id,
            "rlsys.status": sample.status.value,
            "rlsys.tokens": sample.tokens,
            "rlsys.resumes": sample.resumes,
            "rlsys.weight_versions": sorted({s.version for s in sample.spans}),
        }
        if sample.reward is not None:
            attributes["rlsys.reward"] = sample.reward
        span = Span(
            name="sample, until a stop" if part else "sample",
            id=child_of(whole) if part else whole,
            start=life.start,
            end=self._clock(),
            parent=whole if part else None,
            attributes=attributes,
            events=life.events,
            error=error,
        )
        self._sender.send([span])

    def figures(self) -> dict[str, float]:
        """Metrics of a take: what spans cost this process so far."""
        if self._sender is None:
            return {}
        made = {"spans": self._sender.span_count, "spans_lost": self._sender.dropped}
        return {**made, "time_spans": self._sender.seconds}
