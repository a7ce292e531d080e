"""run.spans: what OpenTelemetry is told of samples and steps; the packages themselves, where they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli import main
from rlsys.config import identity
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup, Status, TrainBatch
from rlsys.obs import otlp
from rlsys.obs.metrics import read_run_id, run_id
from rlsys.obs.otlp import SpanSender, check_spans, is_available
from rlsys.obs.spans import Span, child_of, sample_span, step_spans
from rlsys.trainer.recorder import Recorder
from rlsys.worker.direct_worker import DirectWorker
from rlsys.worker.sample_spans import SampleSpans
from tests.helpers.otlp_receiver import Receiver, running_receiver
from tests.helpers.rollout_rig import Rig, abandon, make_config, rig, slow_group_zero

APRIL: dict[str, Any] = {"over_provision": 2, "max_staleness": 4}
BEGAN = 100.0


class Kept:
    """A sender that keeps what it is given."""

    run_id = "run"
    dropped = 0
    seconds = 0.5

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.closed = False

    @property
    def span_count(self) -> int:
        return len(self.spans)

    def send(self, spans: Any) -> None:
        self.spans += spans

    def close(self) -> None:
        self.closed = True

    def named(self, name: str) -> list[Span]:
        return [s for s in self.spans if s.name == name]


def watched(r: Rig, sender: Kept | SpanSender) -> None:
    """As the service gives a manager its spans."""
    spans = r.manager._spans = r.manager._runner._spans = SampleSpans(sender)
    (worker,) = r.manager._workers.workers
    assert isinstance(worker, DirectWorker)
    worker._streams._spans = spans


async def take_until(r: Rig, group_id: int) -> TrainBatch:
    """The take that has this group."""
    for step in range(1, 9):
        batch = await r.take(step)
        if any(g.group_id == group_id for g in batch.groups):
            return batch
        await r.push()
    raise AssertionError(r.manager.status())


def happened(span: Span) -> list[str]:
    return [name for _, name, _ in span.events]


async def test_each_sample_has_a_span_with_its_events(tmp_path: Path) -> None:
    sender = Kept()
    async with rig(make_config(tmp_path, rollout=APRIL), slow_group_zero) as r:
        watched(r, sender)
        await r.start()
        batch = await take_until(r, 0)
        spans = {s.attributes["rlsys.sample"]: s for s in sender.named("sample")}
        (slow,) = (g.samples[0] for g in batch.groups if g.group_id == 0)
        assert slow.resumes == 2
        assert happened(spans[2]) == ["first_token", "reward"]
        slow_span = spans[slow.sample_id]
        assert happened(slow_span) == ["first_token", *["interrupt", "resume", "weights"] * 2, "reward"]
        assert slow_span.attributes["rlsys.weight_versions"] == [1, 2, 4]
        assert (slow_span.attributes["rlsys.tokens"], slow_span.attributes["rlsys.reward"]) == (8, 0.0)
        times = [slow_span.start, *(event_time for event_time, _, _ in slow_span.events), slow_span.end]
        assert times == sorted(times)
        assert batch.metrics["spans"] == len(sender.spans) and batch.metrics["time_spans"] == 0.5
    assert sender.closed


async def test_a_sample_keeps_its_trace_over_a_stop_and_over_a_kill(tmp_path: Path) -> None:
    """What a process did that was stopped is a part of the span to come; what one did that was killed is lost."""
    config, senders = make_config(tmp_path, rollout=APRIL), [Kept(), Kept(), Kept()]

    def long(sample: Sample) -> int:
        return 15 if sample.group_id == 0 else 3

    async with rig(config, long) as r:
        watched(r, senders[0])
        await r.start()
        await r.take(1)
    (part,) = (s for s in senders[0].named("sample, until a stop") if s.attributes["rlsys.sample"] == 0)
    r = Rig(config, long, lambda p, t: _one())
    watched(r, senders[1])
    await r.start()
    abandon(r.buffer)
    async with rig(config, long) as r:
        watched(r, senders[2])
        await r.start()
        assert (await r.take(1)).train_step == 1  # the same once more: its trainer is gone, too
        await r.push()
        for step in range(2, 6):
            await r.take(step)
            await r.push()
    (final_span,) = (s for s in senders[2].named("sample") if s.attributes["rlsys.sample"] == 0)
    assert (final_span.id, final_span.parent) == (sample_span("run", 0), None)
    assert (
        part.parent == final_span.id
        and part.id.trace == final_span.id.trace
        and part.id.span != final_span.id.span
    )
    assert happened(part) == ["first_token", "interrupt"] and "resume" in happened(final_span)
    assert not senders[1].spans


async def _one() -> float:
    return 1.0


async def test_the_span_of_a_dropped_sample_names_the_reason(tmp_path: Path) -> None:
    sender = Kept()
    config = make_config(
        tmp_path, rollout={"over_provision": 2, "max_staleness": 1, "max_response_tokens": 99}
    )
    async with rig(config, lambda s: 60 if s.group_id == 0 else 3) as r:
        watched(r, sender)
        await r.start()
        for step in (1, 2, 3):
            await r.take(step)
            await r.push()
    dropped = [s for s in sender.named("sample") if s.error]
    assert {(s.attributes["rlsys.group"], s.error) for s in dropped} == {(0, "its group is expired")}


async def test_disabled_spans_add_no_metrics(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout=APRIL)
    assert not config.run.spans
    async with rig(config) as r:
        await r.start()
        batch = await r.take(1)
    assert not {"spans", "time_spans"} & batch.metrics.keys()


def test_whether_spans_are_sent_is_no_other_run(tmp_path: Path) -> None:
    assert identity(make_config(tmp_path)) == identity(
        make_config(tmp_path, run={"dir": tmp_path, "spans": True})
    )


# -- steps -------------------------------------------------------------------------------------------------------

LINE = {
    "kind": "step", "step": 3, "time": 1000.0, "time_step": 10.0, "time_rollout": 6.0, "time_train": 3.0,
    "time_sync": 1.0, "time_score": 0.5, "reward": 0.25, "mismatch_hist": [1, 2], "kl": None,
}  # fmt: skip


def test_a_step_span_has_its_stages_and_links_to_trained_samples() -> None:
    samples = [Sample(7, 0, 0, [1], 0), Sample(8, 0, 1, [1], 0)]
    step, *stages = step_spans("run", LINE, samples)
    assert (step.name, step.start, step.end, step.parent) == ("step", 990.0, 1000.0, None)
    assert step.links == [sample_span("run", 7), sample_span("run", 8)]
    assert step.attributes == {"rlsys.step": 3, "rlsys.reward": 0.25}
    names = {s.id: s.name for s in (step, *stages)}
    assert [(s.name, s.start, s.end, names[s.parent]) for s in stages if s.parent] == [
        ("rollout", 990.0, 996.0, "step"),
        ("train", 996.0, 999.0, "step"),
        ("score", 996.0, 996.5, "train"),
        ("push", 999.0, 1000.0, "step"),
    ]
    assert {s.id.trace for s in stages} == {step.id.trace}


def test_a_step_that_is_trained_again_is_in_the_same_trace_and_no_other_run_is() -> None:
    first, second, other_span = (next(step_spans(run, LINE, [])) for run in ("run", "run", "other"))
    assert first.id.trace == second.id.trace != other_span.id.trace and first.id.span != second.id.span
    assert sample_span("run", 1) != sample_span("run", 2) != sample_span("other", 2)
    root = sample_span("run", 1)
    assert child_of(root).trace == root.trace and child_of(root).span not in (root.span, 0)


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "run", "time": 100.0}\n{"kind": "run", "time": 200.0}\n'
    )
    assert read_run_id(tmp_path) == run_id(tmp_path.name, 100.0)


def test_packages_that_are_missing_are_one_line_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp.importlib.util, "find_spec", lambda _: None)
    check_spans(False)
    with pytest.raises(UserError, match=r"run.spans = true: .* pip install 'rlsys\[otel\]'"):
        check_spans(True)
    assert main.main(["explain", "quickstart", "run.spans=true", f"run.dir={tmp_path}/x"]) == 2
    assert "run.spans = true" in capsys.readouterr().err


# -- the packages ------------------------------------------------------------------------------------------------

installed = pytest.mark.skipif(not is_available(), reason="the extra otel is not installed")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with running_receiver() as trace_receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", trace_receiver.url)
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
        yield trace_receiver


@installed
async def test_sample_and_step_spans_reach_the_receiver(receiver: Receiver, tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout=APRIL, run={"dir": tmp_path, "spans": True})
    recorder = Recorder(config, 0)
    recorder.write("run", 0, event="start")
    async with rig(config, slow_group_zero) as r:
        watched(r, SpanSender(tmp_path, "rollout"))
        await r.start()
        batch = await r.take(1)
        recorder.show(batch.groups)
        times = {name: value for name, value in LINE.items() if name.startswith("time_")}
        recorder.write("step", 1, reward=0.5, **times)
    recorder.write("run", 1, event="end")
    samples = {s.attributes["rlsys.sample"]: s for s in receiver.named("sample")}
    (step,) = receiver.named("step")
    trained = [samples[s.sample_id] for g in batch.groups for s in g.samples]
    assert step.links == [(s.trace, s.span) for s in trained] and step.attributes["rlsys.reward"] == 0.5
    assert {s.name for s in receiver.spans if s.parent == step.span} == {"rollout", "train", "push"}
    assert step.end - step.start == 10_000_000_000
    assert [name for name, _, _ in trained[0].events] == ["first_token", "reward"]
    assert (trained[0].service, step.service) == ("rlsys.rollout", "rlsys.trainer")
    assert receiver.named("sample, until a stop")  # what was parked when the process ended


@installed
def test_rejected_spans_are_counted_and_do_not_stop_the_run(receiver: Receiver, tmp_path: Path) -> None:
    receiver.status = 400  # not one to try again
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "run", "time": BEGAN}) + "\n")
    sender = SpanSender(tmp_path, "rollout")
    group = SampleGroup(0, 0, [Sample(0, 0, 0, [1], 0, status=Status.FINISHED, reward=1.0)])
    spans = SampleSpans(sender)
    for sample in group.samples:
        spans.begin(sample)
        spans.end(sample)
    spans.stop([])
    assert (sender.span_count, sender.dropped) == (1, 1) and spans.metrics()["spans_lost"] == 1
