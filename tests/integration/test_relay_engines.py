"""Two real engines behind a slow link: pieces of weights go from one to the other, and both are attested."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.config.rollout import PoolConfig
from rlsys.convert.config import HFConfig
from rlsys.core.identity import engine_identity
from rlsys.core.owner import claim
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.obs.metrics import read_metrics
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from rlsys.weights.push_plan import PushPlan
from tests.helpers.engine_stack import CANARIES, ENGINE_TENSORS, canaries, tensors
from tests.helpers.ready_push import begin_push
from tests.helpers.runs import checked_ledger, logs_of, train_locally
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]


@pytest.mark.parametrize("joined", [False, True], ids=["of the launch", "one joined"])
async def test_two_engines_take_pushes_through_a_chain(
    engine_config: Config, tmp_path: Path, joined: bool
) -> None:
    pool = PoolConfig(name="far", count=1 if joined else 2, relay=True)
    kinds = engine_config.engine.model_copy(update={"pools": [pool], "count": pool.count})
    (tmp_path / "run").mkdir()
    owner = claim(tmp_path / "run")
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        running_engine(engine_config, tmp_path / "a", owner=owner) as a,
        running_engine(engine_config, tmp_path / "b", owner=owner) as b,
    ):
        async with make_session() as session:
            clients = [
                EngineClient(
                    url, session, identity=engine_identity(owner, url),
                    index=i if i < pool.count else None, pool="far" if i >= pool.count else None,
                )
                for i, url in enumerate((a, b))
            ]  # fmt: skip
            router = Router(
                clients, vocab_size=128, context_length=512, stop_ids=(), bounds=Bounds.of(engine_config),
                engine_config=kinds,
            )  # fmt: skip
            sync = GatheredPush(engine_config, plan=PushPlan({}, group=False, chains=kinds.chains))
            hf = HFConfig.read(engine_config.model.path)
            watch = asyncio.create_task(router.watch())
            async with asyncio.timeout(120):
                while set(router.engine_states().values()) != {"without weights"}:
                    await asyncio.sleep(0.05)
            link = []
            for version, seed in ((1, 1), (2, 2), (3, 2)):
                ticket = WeightUpdate(version, await begin_push(router, version), CANARIES)
                assert len(ticket.engines) == 2 and all(engine.key for engine in ticket.engines)
                checksums = EngineChecksums(hf, 1)
                sent_bytes = await asyncio.to_thread(sync.push, checksums.watch(tensors(seed)), ticket)
                assert sync.excluded == {}
                metrics = await router.end_push(version, canaries(seed), checksums.digests())
                assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (ENGINE_TENSORS, 0)
                assert metrics["push_canary_mean"] < 1e-5
                link.append(sync.relayed_bytes)
            assert set(router.engine_states().values()) == {"version 3"}
            assert link[0] < 1.01 * sent_bytes and link[2] == 0, (
                "to the first engine alone, and what has changed"
            )
            for key in ("", "guess", clients[0].identity.api_key):
                request = urllib.request.Request(
                    f"{a}/relay/open", json.dumps({"token": "t", "line": [], "seconds": 9}).encode(),
                    {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
                )  # fmt: skip
                with pytest.raises(urllib.error.HTTPError) as e:
                    urllib.request.urlopen(request)
                assert e.value.code == 401
            watch.cancel()
            await asyncio.to_thread(sync.close)


def test_a_run_trains_with_a_chain_of_engines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_locally(
        run, "trainer.steps=2", "launch.placement=disaggregated",
        "engine.pools=[{name: far, count: 2, relay: true}]", "engine.count=null",
    )  # fmt: skip
    steps = read_metrics(run).steps
    assert [step["step"] for step in steps] == [1, 2], logs_of(run)
    for step in steps:
        assert step["push_tensors_equal"] > 0 == step["push_tensors_unknown"]
        assert step["push_relayed_bytes"] < 0.9 * step["push_bytes"], "what has changed, to one of two"
        assert bool(step["push_relayed_bytes"]) == (step.get("grad_norm") is not None), (
            "equal rewards change nothing"
        )
        assert step["pool_far_serving"] == 2
    checked_ledger(run)
