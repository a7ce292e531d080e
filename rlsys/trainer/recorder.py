"""Writer of a run's metrics.jsonl on trainer rank 0, with a `warning` line for each detected symptom."""

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
"""Maximum number of samples in a warning, each from a different group."""
_CHARACTERS = 1200
"""Maximum number of characters of a text in a warning; the middle of a longer text is removed."""


class Recorder:
    """The only writer of a run's metrics while the run trains."""

    def __init__(self, config: Config, steps_done: int) -> None:
        """Open the metrics. `steps_done`: number of steps of the loaded checkpoint."""
        self._config = config
        self._metrics = MetricsWriter(config.run.dir, resume_step=steps_done)
        steps, evals = list[dict[str, Any]](), list[dict[str, Any]]()
        if steps_done:
            earlier = read_metrics(config.run.dir)
            steps = [entry for entry in earlier.steps if entry["step"] <= steps_done]
            evals = [entry for entry in earlier.evals if entry["step"] <= steps_done]
        self._monitor = SymptomMonitor(steps, evals, config.rollout.max_staleness)
        self._groups: Sequence[SampleGroup] = ()
        self._spans = SpanSender(config.run.dir, "trainer") if config.run.spans else None

    def write(self, kind: str, step: int, **values: object) -> None:
        """Write a line of metrics, and a `warning` line for each symptom that it reveals. Send the step's spans."""
        entry = self._metrics.write(kind, step, **values, **mismatch_quantiles(values))
        if self._spans is not None and kind == "step":
            trained = [s for g in self._groups for s in g.samples]
            self._spans.send(step_spans(self._spans.run_id, entry, trained))
        if self._spans is not None and kind == "run" and values["event"] in ("end", "leave"):
            self._spans.close()
        if kind not in ("step", "eval"):
            return
        for symptom in self._monitor.add(entry):
            decode = Tokenizer.of(self._config).decode
            with SegmentReader(self._config.run.dir) as segments:
                samples = samples_for_warning(symptom.name, self._groups, decode, segments.load)
            self._metrics.write("warning", step, **symptom.entry(), samples=samples)

    def show(self, groups: Sequence[SampleGroup]) -> None:
        """Set the groups of the current step; the following warnings show samples of these groups."""
        self._groups = groups


def samples_for_warning(
    symptom: str,
    groups: Sequence[SampleGroup],
    decode: Callable[[Sequence[int]], str],
    load: Callable[[Sample], Sample],
) -> list[dict[str, Any]]:
    """Return the samples that illustrate a symptom, at most one per group and SAMPLES in all.

    Args:
        symptom: Name of the symptom. `at_the_cap` selects truncated samples, `held_out_falls` those with the highest
            rewards.
        groups: Groups of the step.
        decode: Returns the text of token ids.
        load: Returns a sample with its tokens.
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
