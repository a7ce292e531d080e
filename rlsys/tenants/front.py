"""The HTTP front: what Tinker's client (0.38.0) asks of its server, with the tenant's key in `X-API-Key`.

    GET  /api/v1/healthz                                            it lives; the one that needs no key
    GET  /api/v1/get_server_capabilities
    POST /api/v1/client/config  client/dynamic_config               how the client behaves
         /api/v1/create_session  session_heartbeat  sessions/ID/finish  telemetry
         /api/v1/create_model  get_info
         /api/v1/forward_backward                                   Protocol Buffers, forward alone too
         /api/v1/optim_step  save_weights  save_weights_for_sampler  load_weights
         /api/v1/create_sampling_session  asample
         /api/v1/retrieve_future                                    waits a while for a result
    GET  /api/v1/samplers/ID  training_runs/ID/checkpoints

What belongs to another tenant is answered as what is not there is. Every refusal is JSON: {"error": ...}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from rlsys.core.errors import UserError
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import Handler, Refusal, api_key, guarded_app
from rlsys.tenants.keys import Keys
from rlsys.tenants.ledger import Conflict, TooMany
from rlsys.tenants.messages import NotServed, read_request
from rlsys.tenants.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    OfModel,
    OfSession,
    OptimStep,
    Retrieve,
    Sample,
    SaveForSampler,
    SaveWeights,
    read,
)
from rlsys.tenants.sampler import check_sample
from rlsys.tenants.service import NotThere, Service, Tenant
from rlsys.tenants.wire import BadMessage
from rlsys.tenants.work import model_id, sampler_id

LIMITS = ServerLimits(connections=512, body_bytes=32 * 2**20)
JSON_BYTES, SMALL_BYTES = 4 * 2**20, 2**14
STATUSES = {NotThere: 404, TooMany: 429, Conflict: 422, BadMessage: 400, NotServed: 400}
CHUNK_BYTES = 4_000_000
"""The client cuts a forward pass into requests of about so many bytes."""
WAIT_SECONDS = 20.0
"""Less than the client waits for an answer."""
_PROTOBUF = "application/x-protobuf"
_IN_PROTOBUF = ("forward", "forward_backward", "sample")
_API = "/api/v1"
_HEALTH = f"{_API}/healthz"
_TENANT = web.RequestKey("tenant", str)

T = TypeVar("T", bound=BaseModel)
Answer = Callable[[Tenant, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Served:
    """What the server is for. `room`: the longest sequence that the engine takes; `targets`: what has adapters."""

    name: str
    tokenizer: str
    vocab_size: int
    context: int
    room: int
    rank: int
    targets: str


class Front:
    def __init__(self, service: Service, keys: Keys, served: Served) -> None:
        self._service, self._keys, self._served = service, keys, served

    def app(self) -> web.Application:
        posts: dict[str, Answer] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets: dict[str, Answer] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "training_runs/{model}/checkpoints": self._checkpoints,
        }
        routes = [
            web.get(_HEALTH, _healthy),
            *(web.post(f"{_API}/{path}", self._for_tenant(answer)) for path, answer in posts.items()),
            *(web.get(f"{_API}/{path}", self._for_tenant(answer)) for path, answer in gets.items()),
        ]
        return guarded_app(routes, LIMITS, statuses=STATUSES, admit=self._admit)

    def _admit(self, request: web.Request) -> None:
        tenant = self._keys.tenant(api_key(request))
        if tenant is None and request.path != _HEALTH:
            raise Refusal(401, "X-API-Key: no key of this server")
        request[_TENANT] = tenant or ""

    def _for_tenant(self, answer: Answer) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await answer(self._service.tenants[request[_TENANT]], request)

        return handler

    # -- sessions -------------------------------------------------------------------------------------------------

    async def _client_config(self, tenant: Tenant, request: web.Request) -> web.Response:
        return web.json_response(
            {"fwdbwd_max_chunk_bytes_count": CHUNK_BYTES, "use_pyqwest_transport": False}
        )

    async def _dynamic_config(self, tenant: Tenant, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _capabilities(self, tenant: Tenant, request: web.Request) -> web.Response:
        of = self._served
        model = {"model_name": of.name, "max_context_length": of.room, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, tenant: Tenant, request: web.Request) -> web.Response:
        session = await self._service.new_session(tenant)
        told = (
            f"adapters of rank {self._served.rank} beside {self._served.targets}; the output layer has none"
        )
        return web.json_response({"type": "create_session", "session_id": session, "info_message": told})

    async def _heartbeat(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, _ = await _read(tenant, request, OfSession)
        tenant.check_session(asked.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, tenant: Tenant, request: web.Request) -> web.Response:
        """Its models stay: another session may train and sample them."""
        tenant.check_session(request.match_info["session"])
        return web.json_response({})

    async def _telemetry(self, tenant: Tenant, request: web.Request) -> web.Response:
        """Nobody here looks at it."""
        return web.json_response({"status": "accepted"})

    # -- training -------------------------------------------------------------------------------------------------

    async def _create_model(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, body = await _read(tenant, request, CreateModel)
        tenant.check_session(asked.session_id)
        self._check_model(asked)
        model = model_id(asked.session_id, asked.model_seq_id)
        await self._service.new_model(tenant, model)
        return await self._accepted(tenant, model, 0, "create_model", body)

    def _check_model(self, asked: CreateModel) -> None:
        of, lora = self._served, asked.lora_config
        if asked.base_model != of.name:
            raise UserError(f"base_model = {asked.base_model[:100]}: this server has {of.name}")
        if asked.optimizer_config.type != "adamw":
            raise UserError(f"optimizer_config = {asked.optimizer_config.type[:50]}: this server has adamw")
        if lora is None:
            raise UserError("lora_config: this server trains adapters only")
        if lora.rank != of.rank:
            raise UserError(f"rank = {lora.rank}: this server's adapters have rank {of.rank}")
        if not (lora.train_mlp and lora.train_attn):
            raise UserError(
                f"train_mlp, train_attn: this server's adapters stand beside {of.targets}, together"
            )

    async def _info(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, _ = await _read(tenant, request, OfModel)
        model = tenant.model(asked.model_id)
        of = self._served
        data = {"arch": of.name, "model_name": of.name, "tokenizer_id": of.tokenizer}
        told = {"type": "get_info", "model_data": data, "model_id": model.id, "is_lora": True}
        return web.json_response({**told, "lora_rank": of.rank, "model_name": of.name})

    async def _forward_backward(self, tenant: Tenant, request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            raise Refusal(415, f"Content-Type: expected {_PROTOBUF}")
        async with tenant.reading:
            body = await request.read()
        asked = await asyncio.to_thread(read_request, body)
        model = tenant.model(asked.model_id)
        if asked.seq_id < 1:
            raise UserError(f"seq_id = {asked.seq_id}: expected 1 or more")
        kind = "forward" if asked.forward_only else "forward_backward"
        return await self._accepted(tenant, model.id, asked.seq_id, kind, body)

    async def _optim_step(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, body = await _read(tenant, request, OptimStep)
        return await self._of_model(tenant, asked.model_id, asked.seq_id, "optim_step", body)

    async def _save_weights(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, body = await _read(tenant, request, SaveWeights)
        return await self._of_model(tenant, asked.model_id, asked.seq_id, "save_weights", body)

    async def _save_for_sampler(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, body = await _read(tenant, request, SaveForSampler)
        return await self._of_model(tenant, asked.model_id, asked.seq_id, "save_weights_for_sampler", body)

    async def _load_weights(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, body = await _read(tenant, request, LoadWeights)
        if asked.base_model not in (None, self._served.name):
            raise UserError(
                f"base_model = {str(asked.base_model)[:100]}: this server has {self._served.name}"
            )
        if asked.path not in tenant.ledger.saves():
            raise NotThere(f"{asked.path[:200]}: not found")
        if asked.model_id is not None and asked.seq_id is not None:
            return await self._of_model(tenant, asked.model_id, asked.seq_id, "load_weights", body)
        if asked.session_id is None or asked.model_seq_id is None:
            raise UserError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        tenant.check_session(asked.session_id)
        model = model_id(asked.session_id, asked.model_seq_id)
        await self._service.new_model(tenant, model)
        return await self._accepted(tenant, model, 0, "load_weights", body)

    async def _of_model(self, tenant: Tenant, model: str, seq: int, kind: str, body: bytes) -> web.Response:
        return await self._accepted(tenant, tenant.model(model).id, seq, kind, body)

    async def _accepted(
        self, tenant: Tenant, series: str, seq: int, kind: str, body: bytes, **more: Any
    ) -> web.Response:
        request_id = await self._service.submit(tenant, series, seq, kind, body)
        return web.json_response({"request_id": request_id, **more})

    async def _checkpoints(self, tenant: Tenant, request: web.Request) -> web.Response:
        model = tenant.model(request.match_info["model"])
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        found = []
        for path, (of, _, _, created) in tenant.ledger.saves().items():
            kind, name = path.removeprefix("tinker://").split("/")[1:]
            if of == model.id:
                at = datetime.fromtimestamp(created, UTC).isoformat()
                what = {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": kinds[kind], "time": at}
                found.append({**what, "tinker_path": path})
        return web.json_response({"checkpoints": found})

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, _ = await _read(tenant, request, CreateSamplingSession)
        tenant.check_session(asked.session_id)
        if asked.base_model not in (None, self._served.name):
            raise UserError(
                f"base_model = {str(asked.base_model)[:100]}: this server has {self._served.name}"
            )
        if asked.base_model is None and asked.model_path is None:
            raise UserError("create_sampling_session: expected base_model or model_path")
        sampler = sampler_id(asked.session_id, asked.sampling_session_seq_id)
        await self._service.new_sampler(tenant, sampler, asked.model_path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _sampler(self, tenant: Tenant, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler"]
        path = tenant.sampled_path(sampler)
        told = {"sampler_id": sampler, "base_model": self._served.name, "model_path": path}
        return web.json_response(told)

    async def _sample(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, _ = await _read(tenant, request, Sample)
        tenant.sampled_path(asked.sampling_session_id)
        asked = await asyncio.to_thread(check_sample, asked, self._served.vocab_size, self._served.room)
        series, body = asked.sampling_session_id, asked.model_dump_json().encode()
        ids = [f"{series}:{asked.seq_id}:{i}" for i in range(asked.num_samples)]
        return await self._accepted(tenant, series, asked.seq_id, "sample", body, sample_sequence_ids=ids)

    async def _retrieve(self, tenant: Tenant, request: web.Request) -> web.Response:
        asked, _ = await _read(tenant, request, Retrieve)
        request_id = asked.request_id
        found = await self._service.result(tenant, request_id, WAIT_SECONDS)
        if found is None:
            told = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(told)
        kind, failed, result = found
        in_protobuf = kind in _IN_PROTOBUF and not failed
        return web.Response(body=result, content_type=_PROTOBUF if in_protobuf else "application/json")


async def _read(tenant: Tenant, request: web.Request, kind: type[T]) -> tuple[T, bytes]:
    """A body in JSON, read and as it came. What takes time for it is done outside of the event loop."""
    if 0 <= (request.content_length or -1) < SMALL_BYTES:
        body = await request.read()
        return read(kind, body), body
    async with tenant.reading:
        body = await request.read()
    if len(body) > JSON_BYTES:
        raise Refusal(413, f"the body is larger than {JSON_BYTES} bytes")
    return await asyncio.to_thread(read, kind, body), body


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})
