"""Preference steps on synthetic pairs, on one rank or, under torchrun, in other parallel layouts:
`-m tests.helpers.preference_cases WORKPLACE LAYOUT...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlsys.algo import build
from rlsys.algo.sft.preferences import Preference
from rlsys.data.trace import Trace
from rlsys.trainer.sft.preference import preference_step
from rlsys.trainer.sft.sft import trainer_for
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

LR = 1e-4
LOSSES: dict[str, dict[str, Any]] = {"dpo": {}, "kto": {}, "reward_model": {"centre": 0.01}}


def traces() -> list[Trace]:
    """Return five pairs of answers with different lengths."""
    samples = cases.samples()
    return [
        Trace(
            list(samples[i // 2].prompt_ids), [int(t) for t in s.response_ids], pair=i // 2, liked=i % 2 == 0,
            margin=0.1 * (i // 2),
        )
        for i, s in enumerate(samples)
    ]  # fmt: skip


def start(folder: Path, run: Path, name: str, **sections: Any) -> tuple[Trainer, Preference]:
    loss: Preference = build("preference", name, **LOSSES[name])
    sections["rollout"] = {"temperature": 1.0, "max_response_tokens": 64}
    config = cases.config_of(folder, run, **sections)
    return trainer_for(config, loss), loss


def steps(folder: Path, run: Path, name: str, n: int = 3, **sections: Any) -> list[dict[str, Any]]:
    """Return the metrics of `n` steps, except those of padding and shared prefixes."""
    trainer, loss = start(folder, run, name, **sections)
    step_metrics = [preference_step(trainer, loss, traces(), LR) for _ in range(n)]
    if name == "reward_model":
        trainer.export_hf(run / f"exported-{trainer.config.parallel.world_size}")
    trainer.close()
    return [
        {k: v for k, v in step.items() if k not in ("padding_share", "shared_share")} for step in step_metrics
    ]


def main(workplace: Path, layouts: list[str]) -> None:
    results = {}
    for layout in layouts:
        for name in LOSSES:
            run = workplace / f"{layout}-{name}"
            results[f"{layout} {name}"] = steps(workplace / "model", run, name, **cases.sections(layout))
    if dist.get_rank() == 0:
        (workplace / "seen.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
