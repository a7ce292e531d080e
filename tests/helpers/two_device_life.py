"""A trainer's life on a pretended GPU: `two_device_life.py FILE WORK CASE...`, a case being FAMILY[:VARIANT].

FAMILY is one of tests.helpers.tiny, VARIANT one of VARIANTS; with an `engine` among them all cases use tests/te_stub.
FILE gets `{case: {part: record}}`, a record being `refused`, `stacks`, `counts` (totals) and `places` (the largest of
each count).
Three cases are of another kind: `critic` (a policy with a critic of its own), `recipes` (a train step of every
shipped recipe, one part each), `planted` (a host tensor in the loss).
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


class Life:
    """Parts of one case, with what each recorded."""

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


def lives(case: str, work: Path) -> dict[str, Any]:
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import prefix_cases, tiny
    from tests.helpers import trainer_cases as cases

    family, _, variant = case.partition(":")
    model = tiny.write(work / case / "model", tiny.TINY[family], mtp="mtp" in variant)
    config = cases.config_of(model, work / case / "run", **VARIANTS[variant])
    life = Life()
    trainer: Trainer = life.part("build", lambda: Trainer(config))
    with closing(trainer):
        with TwoDevices():
            away = [name for name, parameter in trainer.named_parameters() if not on_gpu(parameter)]
        assert not away, f"parameters in host memory: {away}"
        life.part("steps", lambda: cases.steps(trainer, 2))
        life.part("score", lambda: trainer.passes.score(trainer.passes.pack(cases.samples())))
        shared = prefix_cases.samples()
        life.part(
            "shared prefixes",
            lambda: trainer.update(trainer.passes.pack(shared), cases.policy_loss, cases.LR),
        )
        life.part("canaries", lambda: trainer.canaries(cases.SEQUENCES))
        life.part("push", lambda: push(trainer))
        life.part("save", lambda: cases.save(trainer, 2))
        assert life.part("load", trainer.load_checkpoint) == 2
        life.part("step after load", lambda: cases.steps(trainer, 1))
    return life.parts


def push(trainer: Any) -> None:
    """What a weight update does here: gather, hash, lay out."""
    from rlsys.weights.buckets import StagingBuffers, send_in_buckets
    from rlsys.weights.checksums import EngineChecksums

    sums = EngineChecksums(trainer.served_config, 1)
    send_in_buckets(
        sums.watch(trainer.served_tensors()), 2**16, StagingBuffers(shared=True), lambda flat: None
    )
    assert sums.digests()[0]


def critic(case: str, work: Path) -> dict[str, Any]:
    from tests.helpers import critic_cases

    life = Life()
    trainer, _, objective = life.part("build", lambda: critic_cases.start(work / case))
    with closing(trainer):
        life.part("steps", lambda: [critic_cases.step(trainer, objective, n) for n in (1, 2)])
        life.part("save", lambda: critic_cases.save(trainer, objective, 2))
        assert life.part("load", lambda: trainer.load_checkpoint(objective)) == 2
        life.part("step after load", lambda: critic_cases.step(trainer, objective, 3))
    return life.parts


def recipes(case: str, work: Path) -> dict[str, Any]:
    """One trainer serves every signal: a critic, a teacher, a reference."""
    from tests.helpers import signal_cases

    life, run = Life(), work / case
    with closing(life.part("build", lambda: signal_cases.trainer_of(run))) as trainer:
        for recipe in signal_cases.RECIPES:
            life.part(recipe, partial(signal_cases.outcome, trainer, recipe, run))
    return life.parts


def planted(case: str, work: Path) -> dict[str, Any]:
    """The loss of a dense model's step multiplies by a mask that is in host memory."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import tiny
    from tests.helpers import trainer_cases as cases

    def loss(scores: Any, micro: Any) -> Any:
        mask = torch.ones(len(scores.logp))
        return (scores.logp * mask).sum(), {}

    life = Life()
    config = cases.config_of(tiny.write(work / case, tiny.TINY["qwen2"]), work / "run")
    with closing(life.part("build", lambda: Trainer(config))) as trainer:
        batch = life.part("pack", lambda: trainer.passes.pack(cases.samples()))
        life.part("step", lambda: trainer.update(batch, loss, 1e-3))
    return life.parts


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
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]  # of the pretended GPU
    recorded: dict[str, Any] = {}
    for case in todo:
        recorded[case] = OTHERS.get(case, lives)(case, work)
        file.write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
