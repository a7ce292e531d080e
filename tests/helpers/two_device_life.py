"""Lifecycle of a trainer on a simulated GPU: `two_device_life.py FILE WORK CASE...`.

A case is FAMILY[:VARIANT], with a family of tests.helpers.tiny and a variant of VARIANTS. If a variant begins with
`engine`, all cases use tests/te_stub. Three cases have other names: `critic` (a policy with its critic), `recipes` (a
train step of every shipped recipe, one part each) and `planted` (a host tensor in the loss).

FILE receives `{case: {part: record}}`. A record has `refused`, `stacks`, `counts` (totals) and `places` (the largest
counts by source line).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.helpers.two_devices import TwoDevices, import_trainer, on_gpu

PLACES = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora": {"trainer": {"lora": {"rank": 4, "alpha": 8}}},
    "muon": {"trainer": {"optimizer": "muon"}},
    "mtp": {"trainer": {"mtp_loss": 0.3}},
    "mtp_trunk": {"trainer": {"mtp_loss": 0.3, "mtp_trunk": True}},
    "replay": {"trainer": {"replay": "engine", "balance_loss": 0.1}, "engine": {"return_routes": True}},
    "recompute": {"trainer": {"recompute": ["layer"]}},
    "padded": {"parallel": {"dispatcher": "allgather"}},
    "support": {"rollout": {"top_k": 8}},
    "bias": {"trainer": {"balance_rate": 0.01}},
    "engine": {},
    "engine_replay": {"trainer": {"replay": "engine"}, "engine": {"return_routes": True}},
}


class CaseRecorder:
    """Records of the parts of one case."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {}

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        with TwoDevices() as devices:
            result = work()
        self.parts[name] = {
            "refused": devices.refused, "stacks": devices.stacks, "counts": devices.counts.totals(),
            "places": {kind: dict(counter.most_common(PLACES)) for kind, counter in vars(devices.counts).items()},
        }  # fmt: skip
        return result


def lifecycle(case: str, work: Path) -> dict[str, Any]:
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import prefix_cases, tiny
    from tests.helpers import trainer_cases as cases

    family, _, variant = case.partition(":")
    model = tiny.write(work / case / "model", tiny.TINY[family], mtp="mtp" in variant)
    config = cases.config_of(model, work / case / "run", **VARIANTS[variant])
    recorder = CaseRecorder()
    trainer: Trainer = recorder.part("build", lambda: Trainer(config))
    with closing(trainer):
        with TwoDevices():
            host_names = [name for name, parameter in trainer.named_parameters() if not on_gpu(parameter)]
        assert not host_names, f"parameters in host memory: {host_names}"
        recorder.part("steps", lambda: cases.steps(trainer, 2))
        recorder.part("score", lambda: trainer.passes.score(trainer.passes.pack(cases.samples())))
        shared = prefix_cases.samples()
        recorder.part(
            "shared prefixes",
            lambda: trainer.update(trainer.passes.pack(shared), cases.policy_loss, cases.LR),
        )
        recorder.part("canaries", lambda: trainer.canaries(cases.SEQUENCES))
        recorder.part("push", lambda: push(trainer))
        recorder.part("save", lambda: cases.save(trainer, 2))
        assert recorder.part("load", trainer.load_checkpoint) == 2
        recorder.part("step after load", lambda: cases.steps(trainer, 1))
    return recorder.parts


def push(trainer: Any) -> None:
    """Run the trainer's part of a weight update: gather, hash and pack tensors."""
    from rlsys.weights.buckets import StagingBuffers, send_in_buckets
    from rlsys.weights.checksums import EngineChecksums

    sums = EngineChecksums(trainer.served_config, 1)
    send_in_buckets(
        sums.watch(trainer.served_tensors()), 2**16, StagingBuffers(shared=True), lambda flat: None
    )
    assert sums.digests()[0]


def critic(case: str, work: Path) -> dict[str, Any]:
    from tests.helpers import critic_cases

    recorder = CaseRecorder()
    trainer, _, objective = recorder.part("build", lambda: critic_cases.start(work / case))
    with closing(trainer):
        recorder.part("steps", lambda: [critic_cases.step(trainer, objective, n) for n in (1, 2)])
        recorder.part("save", lambda: critic_cases.save(trainer, objective, 2))
        assert recorder.part("load", lambda: trainer.load_checkpoint(objective)) == 2
        recorder.part("step after load", lambda: critic_cases.step(trainer, objective, 3))
    return recorder.parts


def recipes(case: str, work: Path) -> dict[str, Any]:
    """Run a train step of every recipe on one trainer with a critic, a teacher and a reference."""
    from tests.helpers import signal_cases

    recorder, run = CaseRecorder(), work / case
    with closing(recorder.part("build", lambda: signal_cases.trainer_of(run))) as trainer:
        for recipe in signal_cases.RECIPES:
            recorder.part(recipe, partial(signal_cases.outcome, trainer, recipe, run))
    return recorder.parts


def planted(case: str, work: Path) -> dict[str, Any]:
    """Run a step of a dense model whose loss multiplies by a mask in host memory."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import tiny
    from tests.helpers import trainer_cases as cases

    def loss(scores: Any, micro: Any) -> Any:
        mask = torch.ones(len(scores.logp))
        return (scores.logp * mask).sum(), {}

    recorder = CaseRecorder()
    config = cases.config_of(tiny.write(work / case, tiny.TINY["qwen2"]), work / "run")
    with closing(recorder.part("build", lambda: Trainer(config))) as trainer:
        batch = recorder.part("pack", lambda: trainer.passes.pack(cases.samples()))
        recorder.part("step", lambda: trainer.update(batch, loss, 1e-3))
    return recorder.parts


OTHERS = {"critic": critic, "recipes": recipes, "planted": planted}


def use_engine_stub() -> None:
    import megatron_patches

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "te_stub"))
    megatron_patches.have_transformer_engine = lambda: True
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"


def main(file: Path, work: Path, todo: list[str]) -> None:
    if any(":engine" in case for case in todo):
        use_engine_stub()
    import_trainer()
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]  # of the simulated GPU
    recorded: dict[str, Any] = {}
    for case in todo:
        recorded[case] = OTHERS.get(case, lifecycle)(case, work)
        file.write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
