"""One of four trainer ranks that push their own tensors, under torchrun: `sharded_ranks FOLDER A B DIES REFUSES`.

The four URLs are those of tests.helpers.receiving_engine processes. Rank 0 writes FOLDER/seen.json. Each push has the
case, the checksums of all tensors, the tensors that engines received, the excluded engines, and the number of groups
that engine A has joined so far.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.trainer.trainer import Trainer
from rlsys.weights import sharded_push
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.shard_plan import plan_senders
from rlsys.weights.weight_push import WeightPush
from tests.helpers import trainer_cases as cases
from tests.helpers.receiving_engine import sha

RANKS = 4
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "owners of experts send": ("qwen3-moe", {"pp": 2, "ep": 2}, {}),
    "latent attention": ("deepseek-v3", {"tp": 2, "ep": 4, "etp": 1}, {}),
    "experts together, cut": ("qwen3-moe", {"tp": 2, "ep": 2}, {"experts_together": True}),
    "stacked experts": ("gpt-oss", {"pp": 2, "ep": 2}, {}),
    "interleaved stages, tied": ("qwen3", {"tp": 2, "pp": 2, "vpp": 2}, {}),
}
"""Case -> model, layout, and arguments of plan_senders."""


def request(url: str, path: str = "/", body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url + path, data) as answer:
        return json.load(answer)


class Session:
    def __init__(self, folder: Path, urls: list[str]) -> None:
        self.folder, self.urls = folder, urls
        self.seen: list[dict[str, Any]] = []

    def run(self, name: str, pushes: list[list[int]]) -> None:
        """Run pushes to the given engines, each with different weights."""
        model, layout, planned = CASES[name]
        config = cases.config_of(
            self.folder / model, self.folder / "run", parallel=layout,
            weights={"method": "sharded", "bucket_mb": 0.02},
        )  # fmt: skip
        trainer = Trainer(config)
        # Without a GPU, plan_senders would choose one sender for all experts of a layer.
        sharded_push.plan_senders = lambda config, hf, **_: plan_senders(config, hf, **planned)
        weight_push = WeightPush(trainer, PushPlan({}, group=True))
        for i, engines in enumerate(pushes):
            addresses = [EngineAddress(self.urls[e], 1, i - 1, index=e) for e in engines]
            for engine in addresses if trainer.is_main else ():
                request(engine.url, "/begin", {})
            trainer.control.wait_for_all()
            result = weight_push.push(WeightUpdate(i + 1, addresses, []))
            expected = {n: sha(tensor) for n, tensor in trainer.named_hf_tensors()}
            if trainer.is_main:
                self._note(name, expected, result.excluded, engines)
            for _, parameter in trainer.named_parameters():
                parameter.data.mul_(1.5)
        weight_push.close()
        trainer.close()

    def _note(
        self, name: str, expected: dict[str, str], left_out: dict[str, str], engines: list[int]
    ) -> None:
        answers = {e: request(self.urls[e]) for e in engines if self.urls[e] not in left_out}
        self.seen.append(
            {
                "case": name, "expected": expected, "left_out": {self.urls.index(u): w for u, w in left_out.items()},
                "got": {e: answer["got"][-1] for e, answer in answers.items()},
                "joined": len(answers[engines[0]]["joined"]),
            }
        )  # fmt: skip


def main(folder: Path, urls: list[str]) -> None:
    session = Session(folder, urls)
    for name in CASES:
        session.run(name, [[0, 1]])
    session.run(next(iter(CASES)), [[0, 2, 3], [0], [0]])
    if session.seen:
        (folder / "seen.json").write_text(json.dumps(session.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
