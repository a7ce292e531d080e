"""The front over a real trainer, without an engine: strangers, repeated requests, and a server that ends at any
moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from rlsys.core.identity import ANONYMOUS
from rlsys.engine.wire import DEFAULT_LIMITS, make_session
from rlsys.tenants.front import LIMITS, Front
from rlsys.tenants.keys import FOLDER, Keys, key_of
from rlsys.tenants.learner import Learner
from rlsys.tenants.ledger import Ledger
from rlsys.tenants.sampler import Engine
from rlsys.tenants.serve import describe_server
from rlsys.tenants.service import Service
from rlsys.tenants.wire import put_bytes, put_number
from rlsys.tenants.work import Work
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

TENANTS = ("alice", "bob")
ADAM = {
    "learning_rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    folder = cases.write_model(tmp_path / "model")
    learner = Learner(cases.config_of(folder, tmp_path / "run", trainer={"lora": {"rank": 4, "alpha": 8}}))
    yield learner
    learner.trainer.close()


class Rig:
    """A client of the server, as any tenant or as a stranger."""

    def __init__(self, client: TestClient[Any, Any], run: Path, service: Service) -> None:
        self._client, self._run, self.service = client, run, service

    async def post(self, path: str, body: Any, tenant: str = "alice") -> tuple[int, Any]:
        headers = {"X-API-Key": key_of(self._run, tenant) if tenant in TENANTS else tenant}
        data = body
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/x-protobuf"
        else:
            data = json.dumps(body)
        async with self._client.post(f"/api/v1/{path}", data=data, headers=headers) as answer:
            content = await answer.read()
            return answer.status, content if answer.content_type.endswith("protobuf") else json.loads(content)

    async def result(self, path: str, body: Any) -> Any:
        status, accepted = await self.post(path, body)
        assert status == 200, accepted
        return (await self.post("retrieve_future", accepted))[1]

    async def model(self, session: str, number: int = 0) -> str:
        lora = {"rank": 4, "seed": 5}
        body = {"session_id": session, "model_seq_id": number, "base_model": "model", "lora_config": lora}
        return str((await self.result("create_model", body))["model_id"])

    async def session(self, tenant: str = "alice") -> str:
        return str((await self.post("create_session", {}, tenant))[1]["session_id"])


@asynccontextmanager
async def rig(learner: Learner) -> AsyncIterator[Rig]:
    """A server over what the ledgers hold. When the block ends it is gone, whatever it was doing."""
    run = learner.trainer.config.run.dir
    ledgers = {name: Ledger(run / FOLDER / name) for name in TENANTS}
    served = describe_server(learner.trainer.config, learner)
    with ThreadPoolExecutor(1) as thread:
        async with make_session() as session:
            engine = Engine("http://127.0.0.1:9", session, ANONYMOUS, DEFAULT_LIMITS, 0.0)
            work = Work(learner, served.vocab_size, served.context)
            service = Service(ledgers, work, thread, engine, 4, lambda _: None)
            app = Front(service, Keys({name: key_of(run, name) for name in TENANTS}), served).app()
            running = asyncio.ensure_future(service.run())
            async with TestClient(TestServer(app)) as client:
                yield Rig(client, run, service)
            running.cancel()
    for ledger in ledgers.values():
        ledger.close()


def passes(model: str, seq: int, ids: list[int], only: int = 0) -> bytes:
    """A request for a pass over one sequence."""

    def tensor(values: Any, kind: int) -> bytes:
        return put_bytes(1, values.tobytes()) + put_number(3, kind)

    inputs = {"target_tokens": tensor(np.array(ids[1:]), 2)}
    inputs["weights"] = tensor(np.ones(len(ids) - 1, np.float32), 1)
    entries = b"".join(put_bytes(2, put_bytes(1, k) + put_bytes(2, v)) for k, v in inputs.items())
    chunk = put_bytes(1, put_bytes(1, np.array(ids[:-1], np.int32).tobytes()))
    head = put_bytes(1, model) + put_number(2, seq) + put_bytes(4, "cross_entropy") + put_number(6, only)
    return head + put_bytes(3, put_bytes(1, chunk) + entries)


def step(model: str, seq: int) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": ADAM, "type": "optim_step"}


async def three_steps(at: Rig, model: str, first: int = 1, last: int = 6) -> list[Any]:
    results = []
    for seq in range(first, last + 1):
        odd = seq % 2
        path = "forward_backward" if odd else "optim_step"
        results.append(
            await at.result(path, passes(model, seq, [3, 5, 7, 9, seq]) if odd else step(model, seq))
        )
    return results


def test_unauthenticated_clients_and_other_tenants_are_denied_access(learner: Learner) -> None:
    async def scenario() -> None:
        async with rig(learner) as client:
            model = await client.model(session := await client.session())
            _, own_request = await client.post("forward_backward", passes(model, 1, [3, 5, 7]))
            save = {"model_id": model, "seq_id": 2, "path": "w", "type": "save_weights"}
            path = (await client.result("save_weights", save))["path"]
            for api_key in ("", "tml-guess", "tml-" + "0" * 64):
                for endpoint in ("create_session", "retrieve_future", "nothing/there"):
                    assert (await client.post(endpoint, {}, api_key))[0] == 401
            bobs = await client.session("bob")
            load = {"path": path, "optimizer": True, "session_id": bobs, "model_seq_id": 0}
            create = {"session_id": session, "model_seq_id": 9, "base_model": "model"}
            for endpoint, body in (
                ("forward_backward", passes(model, 3, [3, 5, 7])), ("optim_step", step(model, 3)),
                ("retrieve_future", own_request), ("get_info", {"model_id": model}), ("load_weights", load),
                ("create_model", create), ("session_heartbeat", {"session_id": session}), ("nothing", {}),
            ):  # fmt: skip
                status, content = await client.post(endpoint, body, "bob")
                nobodys = str(content).replace(model, "x").replace(session, "x").replace(path, "x")
                assert (status, "error" in content) == (404, True), (endpoint, content)
                assert "alice" not in nobodys
            assert (await client.post("telemetry", {"x": "y" * LIMITS.body_bytes}))[0] in (200, 413)
            assert (await client.post("forward_backward", b"\xff" * 9))[0] == 400
            assert (await client.post("forward_backward", b"\x0a" + b"\xff" * 4))[0] == 400

    asyncio.run(scenario())


def test_requests_for_a_model_that_failed_creation_are_rejected(learner: Learner) -> None:
    async def scenario() -> None:
        async with rig(learner) as client:
            model = await client.model(session := await client.session())
            save = {"model_id": model, "seq_id": 1, "path": "s", "type": "save_weights_for_sampler"}
            path = (await client.result("save_weights_for_sampler", save))["path"]
            load = {"path": path, "optimizer": False, "session_id": session, "model_seq_id": 1}
            assert "no such weights" in (await client.result("load_weights", load))["error"]
            missing_model = f"{session}:train:1"
            for result in (
                await client.result("forward_backward", passes(missing_model, 1, [3, 5, 7])),
                await client.result("optim_step", step(missing_model, 2)),
            ):
                assert "does not exist; its first request failed" in result["error"]
            learner.enter(model, Path())
            assert learner.state().updates == 0 and not learner.state().gradients

    asyncio.run(scenario())


def test_a_repeated_request_is_executed_once(learner: Learner) -> None:
    async def scenario() -> None:
        async with rig(learner) as client:
            model = await client.model(await client.session())
            late = await client.post("optim_step", step(model, 2))  # before the one that it follows
            responses = [await client.post("forward_backward", passes(model, 1, [3, 5, 7])) for _ in range(2)]
            assert responses[0] == responses[1]
            assert (await client.post("optim_step", step(model, 2))) == late
            result = (await client.post("retrieve_future", late[1]))[1]
            assert result["metrics"]["updates:max"] == 1
            assert (await client.post("optim_step", {**step(model, 2), "adam_params": {}}))[0] == 422
            again = await client.result("optim_step", step(model, 3))
            assert "expected a forward_backward since" in again["error"] and again["category"] == "user"

    asyncio.run(scenario())


def test_a_server_stopped_after_any_request_resumes_bit_for_bit(learner: Learner, tmp_path: Path) -> None:
    """After each request in turn, with one more that was accepted and not done."""

    async def scenario() -> None:
        async with rig(learner) as client:
            model = await client.model(await client.session())
            expected = await three_steps(client, model)
        for cut in range(1, 6):
            async with rig(learner) as client:
                model = await client.model(await client.session())
                results = await three_steps(client, model, last=cut)
            learner.forget(model)
            ledger = Ledger(tmp_path / "run" / FOLDER / "alice")
            odd = (cut + 1) % 2
            body = passes(model, cut + 1, [3, 5, 7, 9, cut + 1])
            kind = "forward_backward" if odd else "optim_step"
            ledger.accept(model, cut + 1, kind, body if odd else json.dumps(step(model, cut + 1)).encode())
            ledger.close()
            async with rig(learner) as client:
                request = {"request_id": f"{model}:{cut}"}
                assert (await client.post("retrieve_future", request))[1] == results[-1], (
                    "it keeps its result"
                )
                request = {"request_id": f"{model}:{cut + 1}"}
                results.append((await client.post("retrieve_future", request))[1])
                results += await three_steps(client, model, first=cut + 2)
            assert results == expected, cut
        learner.trainer.check_base()

    asyncio.run(scenario())
