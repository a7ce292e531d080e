"""A trainer rank that pushes its own tensors to engines, under torchrun: `sharded_cases.py MODEL FOLDER URL...`.

Each rank writes FOLDER/rank-N.json: the bytes that it sent over TCP during the push, and the peak bytes of weights
that it held in addition to its own shards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlsys.config import Config
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.planner.layout import lay_out, push_plan
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights import sharded_push
from rlsys.weights.weight_push import PushResult, WeightPush
from tests.helpers.push_cases import CANARIES, TcpCounter
from tests.helpers.ready_push import begin_push

PARALLEL = {"tp": 2, "pp": 2, "ep": 2}
RANKS = 8
PUSHES = 2


def config_of(model: Path, folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model}, "run": {"dir": folder}, "parallel": PARALLEL,
            "engine": {"count": 2, "tp": 2, "max_total_tokens": 4096, "max_running_requests": 8,
                       "extra_args": ["--skip-tokenizer-init"]},
            "launch": {"placement": "disaggregated"},
            "weights": {"bucket_mb": 0.05, "method": "sharded"}, "rollout": {"max_response_tokens": 64},
        }
    )  # fmt: skip


class TensorWatch:
    """Counter of the live, the peak and the total bytes of the tensors of an iterator."""

    def __init__(self) -> None:
        self.live = self.peak = self.total = 0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.live += tensor.nbytes
            self.total += tensor.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor, self._on_freed, tensor.nbytes)
            yield name, tensor
            del tensor

    def _on_freed(self, size: int) -> None:
        self.live -= size


def main(model: Path, folder: Path, urls: list[str]) -> None:
    config = config_of(model, folder)
    trainer, tcp_counter, tensor_watch = Trainer(config), TcpCounter(), TensorWatch()
    real = sharded_push.quantise_for_engines
    sharded_push.quantise_for_engines = lambda config, tensors: tensor_watch.watch(real(config, tensors))
    weight_push = WeightPush(trainer, push_plan(config, lay_out(config)))
    loop = asyncio.new_event_loop()
    router: list[Router] = []

    async def begin(version: int) -> WeightUpdate:
        if not router:
            session = make_session()
            engines = [EngineClient(url, session, tp=2, index=i) for i, url in enumerate(urls)]
            bounds = Bounds.of(config)
            router.append(Router(engines, vocab_size=128, context_length=512, stop_ids={2}, bounds=bounds))
        return WeightUpdate(version, await begin_push(router[0], version), CANARIES)

    def start(version: int) -> WeightUpdate:
        return loop.run_until_complete(begin(version))

    def finish(version: int, canaries: list[Canary], done: PushResult) -> dict[str, float]:
        return loop.run_until_complete(router[0].end_push(version, canaries, done.digests, done.excluded))

    report: dict[str, Any] = {"tcp": [], "metrics": []}
    for version in range(1, PUSHES + 1):
        ticket = trainer.on_main(partial(start, version))
        bytes_before = tcp_counter.total()
        done = weight_push.push(ticket)
        report["tcp"].append(tcp_counter.total() - bytes_before)
        canaries = trainer.canaries(CANARIES)
        end = trainer.on_main(partial(finish, version, canaries, done))
        report["metrics"].append(end)
        if trainer.is_main:
            report["expected"] = [len(rank) for rank in done.digests]
        for _, parameter in trainer.named_parameters():
            parameter.data.mul_(1.01)  # the next push has other weights
    weight_push.close()
    report |= {
        "given": tensor_watch.total,
        "most": tensor_watch.peak,
        "buckets": 2 * config.weights.bucket_mb * 2**20,
    }
    (folder / f"rank-{trainer.rank}.json").write_text(json.dumps(report))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
