"""Process of the server: `... -m rlsys.tenants.serve --config RUN/config.yaml --engine URL --port N --tenant NAME`.

`rlsys tenants` starts the process and its engine, and restarts them after a crash. The trainer runs in a separate
thread.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_config
from rlsys.convert.adapters import matrices
from rlsys.core.identity import engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.engine.wire import Limits, make_session
from rlsys.engine_requests import RESERVED_TOKENS
from rlsys.http_server.server import serving
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.tenants.front import Front, ServerInfo
from rlsys.tenants.keys import FOLDER, Keys, key_of
from rlsys.tenants.learner import Learner
from rlsys.tenants.ledger import Ledger
from rlsys.tenants.sampler import Engine
from rlsys.tenants.service import Service
from rlsys.tenants.work import Work

log = logging.getLogger("rlsys.tenants")


async def serve(config: Config, engine_url: str, host: str, port: int, tenants: list[str]) -> None:
    """Serve until an error that no request has caused.

    Args:
        config: config of the server.
        engine_url: URL of the engine.
        host: address on which the server listens.
        port: port on which the server listens.
        tenants: names of the tenants.
    """
    owner, _ = owner_of_process(config.run.dir)
    keys = Keys({name: key_of(config.run.dir, name) for name in tenants})
    ledgers = {name: Ledger(config.run.dir / FOLDER / name, owner.check) for name in tenants}
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "trainer") as trainer:
        learner = await loop.run_in_executor(trainer, Learner, config)
        info = describe_server(config, learner)
        steps = sum(ledger.count("optim_step") for ledger in ledgers.values())
        metrics = TenantMetrics(MetricsWriter(config.run.dir, resume_step=steps), steps)
        async with make_session() as session:
            limits = Limits(config.answer_seconds, config.work_seconds)
            identity = engine_identity(owner, engine_url)
            engine = Engine(engine_url, session, identity, limits, 2 * config.start_seconds)
            await engine.begin()
            work = Work(learner, info.vocab_size, info.context)
            slots = config.max_running_requests
            service = Service(ledgers, work, trainer, engine, slots, metrics.step, metrics.on_recovery)
            async with serving(Front(service, keys, info).app(), host, port) as url:
                log.info("listening on %s for %s", url, ", ".join(tenants))
                metrics.begin()
                await service.run()


def describe_server(config: Config, learner: Learner) -> ServerInfo:
    """Return the base model and the adapters of the server."""
    hf, lora = learner.trainer.hf, config.trainer.lora
    assert lora is not None
    max_tokens = min(hf.context_length, config.fixed_pool_tokens or hf.context_length) - RESERVED_TOKENS
    targets = ", ".join(lora.targets or matrices(hf))
    path = config.model.path
    return ServerInfo(path.name, str(path), hf.vocab_size, hf.context_length, max_tokens, lora.rank, targets)


class TenantMetrics:
    """Writes metrics.jsonl. Owns the number of optimizer steps of all tenants.

    Args:
        writer: writer of the file.
        steps: number of optimizer steps before this start of the server.
    """

    def __init__(self, writer: MetricsWriter, steps: int) -> None:
        self._writer, self._step = writer, steps

    def begin(self) -> None:
        """Write a line for the start of the server."""
        self._writer.write("run", self._step, event="resume" if self._step else "start")

    def on_recovery(self) -> None:
        """Write a line, after the engine has sampled again, that resets the supervisor's count of restarts."""
        self._writer.write("work", self._step, event="sampled")

    def step(self, metrics: dict[str, float]) -> None:
        """Write the line of an optimizer step."""
        self._step += 1
        self._writer.write("step", self._step, **metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tenant", action="append", required=True)
    args: Any = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    config = load_config(args.config)
    run_role(lambda: asyncio.run(serve(config, args.engine, args.host, args.port, args.tenant)))


if __name__ == "__main__":
    main()
