"""Synthetic run folder with the text of the quickstart's tokenizer, a ledger and metrics.

Groups have two samples. Steps 1 and 2 took groups 0 and 1. Group 2 is active: the pushes of versions 2 and 3
interrupted its first sample, which has tokens of three versions; its second sample has a tool result.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlsys.config import dump_config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, Sample, SampleGroup, Segment, Status
from rlsys.data.tokenizer import Tokenizer
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.obs.token_records import TokenRecord, to_floats, write_records
from tests.helpers.rollout_rig import make_config

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "quickstart-moe"
PROMPT = "12 + 30 ="
SET = {"hard/accuracy": 0.1, "hard/pass_2": 0.2, "hard/pass_8": 0.4, "hard/pass_8_low": 0.3}
"""Metrics of a named evaluation set."""
RESPONSE_PARTS = ("12 + 30 = 4", "2, so it ", "is 42")


def write_run(folder: Path) -> Path:
    """Write the run inside `folder` and return its folder."""
    config = make_config(folder, model={"path": str(MODEL)})
    run = config.run.dir
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(dump_config(config))
    tokenizer = Tokenizer(MODEL)
    buffer = RolloutBuffer(run / FILE_NAME, "synthetic", 2)

    def issue() -> SampleGroup:
        index = buffer.next_group_id
        return buffer.issue(Prompt(index, PROMPT, tokenizer.encode(PROMPT), {}), [1, 2])

    def append_text(sample: Sample, text: str, version: int) -> None:
        ids = tokenizer.encode(text)
        mu = [-0.1 - i / 100 for i in range(len(ids))]
        sample.append(Segment(ids, mu, [VersionSpan(version, 0, len(ids))]))

    for step in (1, 2):
        version = buffer.versions.new(step - 1)
        group = issue()
        for sample, text, reward in zip(group.samples, (f"{step} = 42", "17"), (1.0, 0.0), strict=True):
            append_text(sample, text, version)
            sample.status, sample.reward, sample.answer = Status.FINISHED, reward, text[-2:]
        buffer.finish(group, GroupState.READY)
        buffer.take(step, [group])
        write_records(run, step, {s.sample_id: _figures(s) for s in group.samples})

    group = issue()
    first, second = group.samples
    append_text(second, "2 + 2", 2)
    second.observe(tokenizer.encode("4"))
    append_text(second, "8", 2)
    for version, text in zip((2, 3, 4), RESPONSE_PARTS, strict=True):
        if version > 2:
            buffer.versions.new(version - 1)
        append_text(first, text, version)
        first.status = Status.PARKED
        first.resumes = version - 2
        if version < 4:
            buffer.replay_log.record_interrupts([first])
    buffer.save(group.samples)
    buffer.close()
    _write_metrics(run)
    return run


def _figures(sample: Sample) -> TokenRecord:
    logp = [m + 0.001 for m in sample.mu]
    advantages = [1.0 if sample.reward else -1.0] * len(sample.mu)
    ids = np.array(sample.response_ids, dtype="<i4").tobytes()
    return TokenRecord(ids, to_floats(sample.mu), to_floats(logp), to_floats(advantages))


def _write_metrics(run: Path) -> None:
    lines = [{"kind": "run", "event": "start", "step": 0, "time": 100.0}]
    lines.append({"kind": "eval", "step": 0, "time": 101.0, "accuracy": 0.25, "prompts": 4} | SET)
    for step in (1, 2):
        parts = {"time_rollout": 2.0, "time_train": 1.0, "time_sync": 0.5, "time_step": 3.5}
        lines.append(
            {
                "kind": "step",
                "step": step,
                "time": 101.0 + 4 * step,
                "reward": step / 4,
                "tokens": 20,
                **parts,
            }
        )
    lines.append({"kind": "run", "event": "end", "step": 2, "time": 110.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
