"""Measure on real ranks the step that a rehearsal simulates, under torchrun: `rehearsal_cases.py OUT LAYOUT...`.

A layout is, for example, `tp=2,ep=2,etp=1` or `dp=2,trainer.lora.rank=8`. For layout I, rank r writes OUT/I.r.json:
allocated bytes, phases and collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
from rlsys.config import load_config
from rlsys.rehearse.kinds import node_of
from rlsys.rehearse.meter import Meter
from rlsys.rehearse.stand_ins import installed
from rlsys.rehearse.step import Rehearsal, samples_for, stand_in_loss
from rlsys.trainer.pack import build
from rlsys.trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/quickstart.yaml"
MICRO_BATCHES = 2
PROFILE = "profile"
"""Argument in place of OUT and LAYOUT: print the bytes that a plain step allocates."""


def overrides(layout: str) -> list[str]:
    """Return the overrides of a layout, with 1,024 tokens so that a step takes a second."""
    sizes = [size if "." in size else f"parallel.{size}" for size in layout.split(",") if size]
    return [*sizes, "trainer.token_budget=1024", "trainer.recompute=[]"]


def without_metering(collective: Callable[..., Any], meter: Callable[[], Meter]) -> Callable[..., Any]:
    """Exclude a collective of Python objects from the log, because a rehearsal does not log these either."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with meter().paused():
            return collective(*args, **kwargs)

    return call


def main(out: Path, layouts: list[str]) -> None:
    rehearsals: list[Rehearsal] = []
    for name in ("broadcast_object_list", "all_gather_object"):
        setattr(dist, name, without_metering(getattr(dist, name), lambda: rehearsals[-1].meter))
    for i, layout in enumerate(layouts):
        config = load_config(CONFIG, overrides(layout))
        rehearsal = Rehearsal(config, node_of(config), None, lambda text: None)
        rehearsals.append(rehearsal)
        with installed({"always"}, rehearsal.setting(1.0)):
            rehearsal.build()
            rehearsal.step(MICRO_BATCHES)
        report = {
            "held": rehearsal.meter.memory.nonzero,
            "phases": [dataclasses.asdict(phase) for phase in rehearsal.meter.phases],
            "collectives": [dataclasses.asdict(call) for call in rehearsal.meter.collectives.calls],
        }
        (out / f"{i}.{dist.get_rank()}.json").write_text(json.dumps(report))
        rehearsal.trainer.close()


def profiled_peak() -> int:
    """Return the peak bytes that a plain step allocates in addition to those at its start, by torch's profiler."""
    config = load_config(CONFIG, overrides(""))
    trainer = Trainer(config)
    shared = trainer.passes.pack.shared
    batch = [build(samples_for(config, trainer.hf.vocab_size, shared != "no"), shared)] * MICRO_BATCHES
    trainer.update(batch, stand_in_loss, 1e-6)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.update(batch, stand_in_loss, 1e-6)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(sizes))


if __name__ == "__main__":
    if sys.argv[1:] == [PROFILE]:
        print(profiled_peak())
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
