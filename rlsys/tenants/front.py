"""HTTP API of Tinker's protocol, for Tinker's client 0.38.0. Requests have the tenant's key in `X-API-Key`.

    GET  /api/v1/healthz                                            liveness; needs no key
    GET  /api/v1/get_server_capabilities
    POST /api/v1/client/config  client/dynamic_config               settings of the client
         /api/v1/create_session  session_heartbeat  sessions/ID/finish  telemetry
         /api/v1/create_model  get_info
         /api/v1/forward_backward                                   Protocol Buffers, also for `forward`
         /api/v1/optim_step  save_weights  save_weights_for_sampler  load_weights
         /api/v1/create_sampling_session  asample
         /api/v1/retrieve_future                                    waits up to WAIT_SECONDS for a result
    GET  /api/v1/samplers/ID  training_runs/ID/checkpoints

Objects of other tenants are reported as not found. Every error is JSON: {"error": ...}.
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
from rlsys.http_server.server import AUTHORIZED, Handler, Refusal, api_key, guarded_app
from rlsys.tenants.keys import Keys
from rlsys.tenants.ledger import Conflict, LimitExceeded
from rlsys.tenants.messages import UnsupportedRequest, read_request
from rlsys.tenants.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    ModelRequest,
    OptimStep,
    Retrieve,
    Sample,
    SaveForSampler,
    SaveWeights,
    SessionRequest,
    read,
)
from rlsys.tenants.sampler import check_sample
from rlsys.tenants.service import NotFound, Service, Tenant
from rlsys.tenants.wire import BadMessage
from rlsys.tenants.work import model_id, sampler_id

LIMITS = ServerLimits(connections=512, body_bytes=32 * 2**20)
JSON_BYTES, SMALL_BYTES = 4 * 2**20, 2**14
"""Largest size of a JSON body, and the size below which a body is parsed in the event loop."""
STATUSES = {NotFound: 404, LimitExceeded: 429, Conflict: 422, BadMessage: 400, UnsupportedRequest: 400}
"""HTTP statuses of errors."""
CHUNK_BYTES = 4_000_000
"""Approximate size, in bytes, of the requests into which the client splits a forward pass."""
WAIT_SECONDS = 20.0
"""Longest wait for a result, which is shorter than the client's timeout."""
_PROTOBUF = "application/x-protobuf"
_PROTOBUF_KINDS = ("forward", "forward_backward", "sample")
"""Kinds of requests whose results are Protocol Buffers."""
_API = "/api/v1"
_HEALTH = f"{_API}/healthz"
_TENANT = web.RequestKey("tenant", str)

T = TypeVar("T", bound=BaseModel)
Answer = Callable[[Tenant, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerInfo:
    """Base model and adapters of the server.

    Attributes:
        name: name of the base model.
        tokenizer: folder of the tokenizer.
        context: context length of the model, in tokens.
        max_tokens: largest number of tokens of a sequence in the engine.
        rank: rank of the adapters.
        targets: names of the matrices with adapters, separated by commas.
    """

    name: str
    tokenizer: str
    vocab_size: int
    context: int
    max_tokens: int
    rank: int
    targets: str


class Front:
    """Handlers of the protocol's requests."""

    def __init__(self, service: Service, keys: Keys, info: ServerInfo) -> None:
        self._service, self._keys, self._server_info = service, keys, info

    def app(self) -> web.Application:
        """Create the application."""
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
            raise Refusal(401, "X-API-Key: unknown key; expected the key of a tenant")
        request[_TENANT] = tenant or ""
        request[AUTHORIZED] = tenant is not None

    def _for_tenant(self, answer: Answer) -> Handler:
        """Return the handler that calls `answer` with the tenant of the request's key."""

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
        info = self._server_info
        model = {
            "model_name": info.name,
            "max_context_length": info.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, tenant: Tenant, request: web.Request) -> web.Response:
        session = await self._service.new_session(tenant)
        info = self._server_info
        message = f"adapters of rank {info.rank} on {info.targets}; the output layer has none"
        return web.json_response({"type": "create_session", "session_id": session, "info_message": message})

    async def _heartbeat(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, _ = await _read(tenant, request, SessionRequest)
        tenant.check_session(message.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, tenant: Tenant, request: web.Request) -> web.Response:
        """Finish a session. Its models remain, because other sessions may train and sample them."""
        tenant.check_session(request.match_info["session"])
        return web.json_response({})

    async def _telemetry(self, tenant: Tenant, request: web.Request) -> web.Response:
        """Discard telemetry."""
        return web.json_response({"status": "accepted"})

    # -- training -------------------------------------------------------------------------------------------------

    async def _create_model(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, body = await _read(tenant, request, CreateModel)
        tenant.check_session(message.session_id)
        self._check_model(message)
        model = model_id(message.session_id, message.model_seq_id)
        await self._service.new_model(tenant, model)
        return await self._submit(tenant, model, 0, "create_model", body)

    def _check_model(self, message: CreateModel) -> None:
        """Check that the server can create the requested model.

        Raises:
            UserError: base model, optimizer or adapters differ from those of the server.
        """
        info, lora = self._server_info, message.lora_config
        if message.base_model != info.name:
            raise UserError(
                f"base_model = {message.base_model[:100]}: expected {info.name}, the model of this server"
            )
        if message.optimizer_config.type != "adamw":
            raise UserError(f"optimizer_config.type = {message.optimizer_config.type[:50]}: expected adamw")
        if lora is None:
            raise UserError("lora_config is missing; expected one, because this server trains only adapters")
        if lora.rank != info.rank:
            raise UserError(
                f"lora_config.rank = {lora.rank}: expected {info.rank}, the rank of this server's adapters"
            )
        if not (lora.train_mlp and lora.train_attn):
            raise UserError(
                f"lora_config: train_mlp = {lora.train_mlp}, train_attn = {lora.train_attn}: expected true for both, "
                f"because this server's adapters are on {info.targets}"
            )

    async def _info(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, _ = await _read(tenant, request, ModelRequest)
        model = tenant.model(message.model_id)
        info = self._server_info
        data = {"arch": info.name, "model_name": info.name, "tokenizer_id": info.tokenizer}
        reply = {"type": "get_info", "model_data": data, "model_id": model.id, "is_lora": True}
        return web.json_response({**reply, "lora_rank": info.rank, "model_name": info.name})

    async def _forward_backward(self, tenant: Tenant, request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            raise Refusal(415, f"Content-Type: {request.content_type}: expected {_PROTOBUF}")
        async with tenant.body_slots:
            body = await request.read()
        message = await asyncio.to_thread(read_request, body)
        model = tenant.model(message.model_id)
        if message.seq_id < 1:
            raise UserError(f"seq_id = {message.seq_id}: expected 1 or more")
        kind = "forward" if message.forward_only else "forward_backward"
        return await self._submit(tenant, model.id, message.seq_id, kind, body)

    async def _optim_step(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, body = await _read(tenant, request, OptimStep)
        return await self._submit_for_model(tenant, message.model_id, message.seq_id, "optim_step", body)

    async def _save_weights(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, body = await _read(tenant, request, SaveWeights)
        return await self._submit_for_model(tenant, message.model_id, message.seq_id, "save_weights", body)

    async def _save_for_sampler(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, body = await _read(tenant, request, SaveForSampler)
        return await self._submit_for_model(
            tenant, message.model_id, message.seq_id, "save_weights_for_sampler", body
        )

    async def _load_weights(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, body = await _read(tenant, request, LoadWeights)
        if message.base_model not in (None, self._server_info.name):
            raise UserError(
                f"base_model = {str(message.base_model)[:100]}: expected {self._server_info.name}, the model of this "
                "server"
            )
        if message.path not in tenant.ledger.saves():
            raise NotFound(f"path = {message.path[:200]}: not found; expected saved weights")
        if message.model_id is not None and message.seq_id is not None:
            return await self._submit_for_model(
                tenant, message.model_id, message.seq_id, "load_weights", body
            )
        if message.session_id is None or message.model_seq_id is None:
            raise UserError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        tenant.check_session(message.session_id)
        model = model_id(message.session_id, message.model_seq_id)
        await self._service.new_model(tenant, model)
        return await self._submit(tenant, model, 0, "load_weights", body)

    async def _submit_for_model(
        self, tenant: Tenant, model: str, seq: int, kind: str, body: bytes
    ) -> web.Response:
        return await self._submit(tenant, tenant.model(model).id, seq, kind, body)

    async def _submit(
        self, tenant: Tenant, series: str, seq: int, kind: str, body: bytes, **extra: Any
    ) -> web.Response:
        """Submit a request, and respond with its id and the fields `extra`."""
        request_id = await self._service.submit(tenant, series, seq, kind, body)
        return web.json_response({"request_id": request_id, **extra})

    async def _checkpoints(self, tenant: Tenant, request: web.Request) -> web.Response:
        model = tenant.model(request.match_info["model"])
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        checkpoints = []
        for path, (owner, _, _, created) in tenant.ledger.saves().items():
            kind, name = path.removeprefix("tinker://").split("/")[1:]
            if owner == model.id:
                time = datetime.fromtimestamp(created, UTC).isoformat()
                checkpoint = {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": kinds[kind], "time": time}
                checkpoints.append({**checkpoint, "tinker_path": path})
        return web.json_response({"checkpoints": checkpoints})

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, _ = await _read(tenant, request, CreateSamplingSession)
        tenant.check_session(message.session_id)
        if message.base_model not in (None, self._server_info.name):
            raise UserError(
                f"base_model = {str(message.base_model)[:100]}: expected {self._server_info.name}, the model of this "
                "server"
            )
        if message.base_model is None and message.model_path is None:
            raise UserError("create_sampling_session: expected base_model or model_path")
        sampler = sampler_id(message.session_id, message.sampling_session_seq_id)
        await self._service.new_sampler(tenant, sampler, message.model_path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _sampler(self, tenant: Tenant, request: web.Request) -> web.Response:
        sampler = request.match_info["sampler"]
        path = tenant.sampler_path(sampler)
        reply = {"sampler_id": sampler, "base_model": self._server_info.name, "model_path": path}
        return web.json_response(reply)

    async def _sample(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, _ = await _read(tenant, request, Sample)
        tenant.sampler_path(message.sampling_session_id)
        message = await asyncio.to_thread(
            check_sample, message, self._server_info.vocab_size, self._server_info.max_tokens
        )
        series, body = message.sampling_session_id, message.model_dump_json().encode()
        ids = [f"{series}:{message.seq_id}:{i}" for i in range(message.num_samples)]
        return await self._submit(tenant, series, message.seq_id, "sample", body, sample_sequence_ids=ids)

    async def _retrieve(self, tenant: Tenant, request: web.Request) -> web.Response:
        message, _ = await _read(tenant, request, Retrieve)
        request_id = message.request_id
        outcome = await self._service.result(tenant, request_id, WAIT_SECONDS)
        if outcome is None:
            reply = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(reply)
        kind, failed, result = outcome
        is_protobuf = kind in _PROTOBUF_KINDS and not failed
        return web.Response(body=result, content_type=_PROTOBUF if is_protobuf else "application/json")


async def _read(tenant: Tenant, request: web.Request, kind: type[T]) -> tuple[T, bytes]:
    """Return the JSON body of a request, parsed and as bytes. Large bodies are parsed in a thread.

    Raises:
        UserError: a field is invalid.
        Refusal: the body is larger than JSON_BYTES.
    """
    if 0 <= (request.content_length or -1) < SMALL_BYTES:
        body = await request.read()
        return read(kind, body), body
    async with tenant.body_slots:
        body = await request.read()
    if len(body) > JSON_BYTES:
        raise Refusal(413, f"the body has {len(body)} bytes; expected at most {JSON_BYTES}")
    return await asyncio.to_thread(read, kind, body), body


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})
