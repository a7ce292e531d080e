"""Sends a trainer's weights to engines. Runs on every trainer rank: gathering is collective, rank 0 sends.

tensor  flattened buckets in shared memory (CUDA IPC on a GPU): SGLang's own `update_weights_from_tensor`
disk    a safetensors folder on a path that trainer and engines share: `update_weights_from_disk`
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.hf import write_hf
from rlsys.errors import RunError
from rlsys.types import EngineAddress, PushTicket

SEND_TIMEOUT = 300.0


log = logging.getLogger("rlsys.weights")
# Engines are on this machine or its network: never through a proxy that the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class WeightSync:
    """`push` between `begin_push` and `end_push` of the rollout process."""

    def __init__(self, config: Config, is_main: bool) -> None:
        self._config = config
        self._is_main = is_main

    def push(self, tensors: Iterable[tuple[str, Tensor]], ticket: PushTicket) -> None:
        """Consume `tensors` (collective) and load them into every engine of the ticket.

        An engine that dies meanwhile is left out: end_push finds it dead, and its restart brings the next push.
        Raises RunError when an engine refuses the tensors.
        """
        receivers = list(ticket.engines)
        if self._config.weights.method == "disk":
            folder = self._config.run.dir.resolve() / "weights" / f"version-{ticket.weight_version:06d}"
            self._push_disk(tensors, folder, receivers)
            return
        for bucket in buckets(tensors, int(self._config.weights.bucket_mb * 2**20)):
            if self._is_main and receivers:
                self._send_bucket(bucket, receivers)

    def _send_bucket(self, bucket: list[tuple[str, Tensor]], receivers: list[EngineAddress]) -> None:
        serialize, flattened = _sglang()
        flat = flattened(named_tensors=bucket)
        tensors = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        for engine in list(receivers):
            # One handle of the shared memory for each of the engine's ranks: opening uses it up.
            handles = [base64.b64encode(serialize(tensors)).decode() for _ in range(engine.tp)]
            body = {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                "flush_cache": False,  # once, after the last bucket, by the router
            }
            _send(engine, "/update_weights_from_tensor", body, receivers)

    def _push_disk(
        self, tensors: Iterable[tuple[str, Tensor]], folder: Path, receivers: list[EngineAddress]
    ) -> None:
        if not self._is_main:
            for _ in tensors:
                pass
            return
        write_hf(folder, self._config.model.path, tensors)
        for engine in list(receivers):
            body = {"model_path": str(folder), "flush_cache": False}
            _send(engine, "/update_weights_from_disk", body, receivers)
        for old in folder.parent.iterdir():
            if old != folder:
                shutil.rmtree(old)


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbouring tensors of one dtype, together at most `max_bytes`; a larger tensor has a bucket for itself."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        n = tensor.numel() * tensor.element_size()
        if bucket and (size + n > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += n
    if bucket:
        yield bucket


def _sglang() -> tuple[Callable[[Any], bytes], Any]:
    """SGLang's serializer and bucket class; imported here because it takes seconds."""
    from rlsys.engine.cpu_platform import declare_torchvision_ops

    if not torch.cuda.is_available():
        declare_torchvision_ops()
        # The default strategy passes file descriptors over a socket with a secret that another server lacks.
        torch.multiprocessing.set_sharing_strategy("file_system")
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return MultiprocessingSerializer.serialize, FlattenedTensorBucket


def _send(engine: EngineAddress, path: str, body: dict[str, Any], receivers: list[EngineAddress]) -> None:
    """POST JSON; an engine that is gone is taken from `receivers`. Raises RunError when it refuses."""
    request = urllib.request.Request(
        engine.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with _opener.open(request, timeout=SEND_TIMEOUT) as answer:
            result = json.loads(answer.read())
    except urllib.error.HTTPError as e:
        raise RunError(f"{engine.url}{path}: {e.code} {e.read().decode(errors='replace')[:300]}") from None
    except (OSError, http.client.HTTPException) as e:
        log.warning("%s: gone in the middle of a push: %s", engine.url, e)
        receivers.remove(engine)
        return
    if not result.get("success"):
        raise RunError(f"{engine.url}{path}: {result.get('message')}")
