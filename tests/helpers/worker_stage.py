"""Run a rollout worker with scripted engines: `python -m tests.helpers.worker_stage CONFIG.json URL...`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.obs.role import end_with_parent
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.scoring import Scorer
from rlsys.worker.worker import Worker, WorkerParts, exit_now, standard_input
from tests.helpers.rollout_rig import length_reward
from tests.helpers.scripted_engine import EOS


def router_of(clients: list[EngineClient], **more: Any) -> Router:
    return Router(
        clients, vocab_size=128, context_length=200, stop_ids={EOS}, bounds=Bounds(1e-6, 1e-4), push_timeout_s=100,
        routes=True, **more,
    )  # fmt: skip


async def main() -> None:
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    async with make_session() as session:
        router = router_of([EngineClient(url, session) for url in sys.argv[2:]])
        scorer = Scorer(lambda: nullcontext(length_reward), lambda ids: "x" * len(ids), 60)

        def joiner(url: str, tp: int, pool: str | None) -> EngineClient:
            return EngineClient(url, session, tp=tp, pool=pool)

        parts = WorkerParts(config, router, scorer, None, joiner)
        await Worker(parts, exit_now).serve(standard_input())


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(main())
