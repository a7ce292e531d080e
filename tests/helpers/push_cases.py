"""One of four trainer ranks that push to two engines of their host, under torchrun:
`push_cases.py MODEL FOLDER URL URL`.

Each rank writes FOLDER/rank-N.json: the bytes that it sent over TCP during the push, and the bytes of weights that it
passed to engines in shared memory.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.planner.layout import lay_out, push_plan
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers.ready_push import begin_push

CANARIES = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]
PARALLEL = {"tp": 2, "ep": 2, "etp": 1, "dp": 2}


def config_of(model: Path, folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model}, "run": {"dir": folder}, "parallel": PARALLEL,
            "engine": {"count": 2, "tp": 2, "max_total_tokens": 4096, "max_running_requests": 8,
                       "extra_args": ["--skip-tokenizer-init"]},
            "weights": {"bucket_mb": 0.05}, "rollout": {"max_response_tokens": 64},
        }
    )  # fmt: skip


class TcpCounter:
    """Counter of the bytes that this process sends over TCP.

    It adds the kernel's counts of open sockets and the sizes of HTTP requests, whose sockets close before a count.
    """

    def __init__(self) -> None:
        self.http = 0
        real = http.client.HTTPConnection.send
        count = self

        def send(connection: http.client.HTTPConnection, data: Any) -> None:
            count.http += len(data)
            real(connection, data)

        http.client.HTTPConnection.send = send  # type: ignore[method-assign,assignment]

    def total(self) -> int:
        """Return the bytes sent so far."""
        total = self.http
        for fd in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
            except OSError:
                continue  # no connected socket, or closed since the listing
        return total


def main(model: Path, folder: Path, urls: list[str]) -> None:
    config = config_of(model, folder)
    trainer, tcp_counter = Trainer(config), TcpCounter()
    sync = GatheredPush(config, trainer.rank, push_plan(config, lay_out(config)))
    loop = asyncio.new_event_loop()
    router: list[Router] = []

    async def begin() -> WeightUpdate:
        session = make_session()
        engines = [EngineClient(url, session, tp=2, index=i) for i, url in enumerate(urls)]
        router.append(
            Router(engines, vocab_size=128, context_length=512, stop_ids={2}, bounds=Bounds.of(config))
        )
        return WeightUpdate(1, await begin_push(router[0], 1), CANARIES)

    ticket = trainer.on_main(lambda: loop.run_until_complete(begin()))
    checksums, bytes_before = EngineChecksums(trainer.hf, 2), tcp_counter.total()
    model_bytes = 0

    def count_bytes(tensors: Any) -> Any:
        nonlocal model_bytes
        for name, tensor in tensors:
            model_bytes += tensor.nbytes
            yield name, tensor

    tensors = trainer.named_hf_tensors()
    memory_bytes = sync.push(count_bytes(checksums.watch(tensors) if trainer.is_main else tensors), ticket)
    trainer.control.wait_for_all()
    report: dict[str, Any] = {
        "tcp": tcp_counter.total() - bytes_before,
        "memory": memory_bytes,
        "model": model_bytes,
    }
    canaries = trainer.canaries(CANARIES)
    end = trainer.on_main(
        lambda: loop.run_until_complete(router[0].end_push(1, canaries, checksums.digests()))
    )
    report |= {"metrics": end, "expected": [len(rank) for rank in checksums.digests()]}
    (folder / f"rank-{trainer.rank}.json").write_text(json.dumps(report))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
