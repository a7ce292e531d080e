"""What trainer rank 0 writes down of a run: metrics.jsonl, with a `warning` line where its figures show a symptom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlsys.config import Config
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.data import Tokenizer
from rlsys.obs.metrics import MetricsWriter, mismatch_quantiles, read_metrics
from rlsys.obs.otlp import SpanSender
from rlsys.obs.spans import step_spans
from rlsys.obs.symptoms import SymptomMonitor
from rlsys.segments.records import SegmentReader

SAMPLES = 3
"""Shown with a warning, each of another group."""
_CHARACTERS = 1200
"""Of a text; what is longer loses its middle."""


class Recorder:
    """The only writer of a run's metrics while it trains; `steps_done` of an earlier session are known to it."""

    def __init__(self, config: Config, steps_done: int) -> None:
        self._config = config
        self._metrics = MetricsWriter(config.run.dir, resume_step=steps_done)
        self._watch = SymptomMonitor()
        if steps_done:  # what an earlier session wrote, up to the checkpoint that this one begins with
            before = read_metrics(config.run.dir)
            steps, evals = (
                [e for e in kind if e["step"] <= steps_done] for kind in (before.steps, before.evals)
            )
            self._watch = SymptomMonitor(steps, evals)
        self._groups: Sequence[SampleGroup] = ()
        self._spans = SpanSender(config.run.dir, "trainer") if config.run.spans else None

    def write(self, kind: str, step: int, **values: object) -> None:
        entry = self._metrics.write(kind, step, **values, **mismatch_quantiles(values))
        if self._spans is not None and kind == "step":
            trained = [s for g in self._groups for s in g.samples]
            self._spans.send(step_spans(self._spans.run_id, entry, trained))
        if self._spans is not None and kind == "run" and values["event"] in ("end", "leave"):
            self._spans.close()
        if kind not in ("step", "eval"):
            return
        for symptom in self._watch.add(entry):
            decode = Tokenizer.of(self._config).decode
            with SegmentReader(self._config.run.dir) as segments:
                samples = told_samples(symptom.name, self._groups, decode, segments.load)
            self._metrics.write("warning", step, **symptom.entry(), samples=samples)

    def show(self, groups: Sequence[SampleGroup]) -> None:
        """Samples for the warnings from now on: those of the step that is trained."""
        self._groups = groups


def told_samples(
    symptom: str,
    groups: Sequence[SampleGroup],
    decode: Callable[[Sequence[int]], str],
    loaded: Callable[[Sample], Sample],
) -> list[dict[str, Any]]:
    """Of a few groups, the sample that shows most: of lengths one that was cut off, of a reward the best one.

    `loaded` gives a sample its tokens.
    """

    def tells(sample: Sample) -> float:
        if symptom == "at_the_cap":
            return float(sample.status is Status.TRUNCATED)
        return sample.reward or 0.0 if symptom == "held_out_falls" else 0.0

    each = sorted((max(g.samples, key=tells) for g in groups if g.samples), key=tells, reverse=True)
    return [
        {
            "prompt": _short(decode(s.prompt_ids)), "response": _short(decode(s.response_ids)),
            "tokens": s.tokens, "reward": s.reward,
        }
        for s in map(loaded, each[:SAMPLES])
    ]  # fmt: skip


def _short(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
