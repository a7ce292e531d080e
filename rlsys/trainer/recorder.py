"""Metrics of a run on trainer rank 0: metrics.jsonl, with a `warning` line for each detected symptom."""

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
"""Number of samples in a warning, each of another group."""
_CHARACTERS = 1200
"""Maximum length of a text; the middle of a longer text is removed."""


class Recorder:
    """The only writer of a run's metrics while it trains; `steps_done` are the steps of earlier sessions."""

    def __init__(self, config: Config, steps_done: int) -> None:
        self._config = config
        self._metrics = MetricsWriter(config.run.dir, resume_step=steps_done)
        steps, evals = list[dict[str, Any]](), list[dict[str, Any]]()
        if steps_done:  # lines of earlier sessions, up to the checkpoint of this one
            earlier = read_metrics(config.run.dir)
            steps, evals = (
                [e for e in kind if e["step"] <= steps_done] for kind in (earlier.steps, earlier.evals)
            )
        self._watch = SymptomMonitor(steps, evals, config.rollout.max_staleness)
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
                samples = samples_for_warning(symptom.name, self._groups, decode, segments.load)
            self._metrics.write("warning", step, **symptom.entry(), samples=samples)

    def show(self, groups: Sequence[SampleGroup]) -> None:
        """Set the groups whose samples the next warnings show: those of the current step."""
        self._groups = groups


def samples_for_warning(
    symptom: str,
    groups: Sequence[SampleGroup],
    decode: Callable[[Sequence[int]], str],
    load: Callable[[Sample], Sample],
) -> list[dict[str, Any]]:
    """Select the most relevant sample of a few groups: a truncated one for lengths, the best one for rewards.

    `load` gives a sample its tokens.
    """

    def relevance(sample: Sample) -> float:
        if symptom == "at_the_cap":
            return float(sample.status is Status.TRUNCATED)
        return sample.reward or 0.0 if symptom == "held_out_falls" else 0.0

    samples = sorted(
        (max(g.samples, key=relevance) for g in groups if g.samples), key=relevance, reverse=True
    )
    return [
        {
            "prompt": _short(decode(s.prompt_ids)), "response": _short(decode(s.response_ids)),
            "tokens": s.tokens, "reward": s.reward,
        }
        for s in map(load, samples[:SAMPLES])
    ]  # fmt: skip


def _short(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
