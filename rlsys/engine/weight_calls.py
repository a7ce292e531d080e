"""SGLang's endpoints by which a trainer brings weights: path and body of each POST. No I/O, no torch.

The engine answers when it has taken them; everything else that SGLang is asked for is in client.py.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlsys.engine.hooks.bucket_order import Buckets

FORMAT = "rlsys_buckets"
"""What a call of a sharded push has in the place of SGLang's load formats."""


class Call(NamedTuple):
    path: str
    body: dict[str, Any]


def load_from_memory(handles: Sequence[bytes]) -> Call:
    """`handles`: of one flattened bucket, for each tensor-parallel rank of the engine (SGLang's own serializer)."""
    tensors = [base64.b64encode(handle).decode() for handle in handles]
    body = {"serialized_named_tensors": tensors, "load_format": "flattened_bucket"}
    # The cache is emptied once, after the last bucket, by the router.
    return Call("/update_weights_from_tensor", {**body, "flush_cache": False})


def load_from_group(group: str, tensors: Sequence[tuple[str, str, list[int]]]) -> Call:
    """A flattened bucket that rank 0 of the group broadcasts now. `tensors`: name, dtype and shape of each."""
    names, dtypes, shapes = map(list, zip(*tensors, strict=True))
    body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
    load = {"load_format": "flattened_bucket", "flush_cache": False}
    return Call("/update_weights_from_distributed", {**body, **load})


def load_from_senders(group: str, buckets: Buckets) -> Call:
    """All buckets of a sharded push, which the senders in the group send from now on (bucket_hooks.py)."""
    body = {"names": [buckets.encoded()], "dtypes": [], "shapes": [], "group_name": group}
    return Call("/update_weights_from_distributed", {**body, "load_format": FORMAT, "flush_cache": False})


Line = Sequence[tuple[str, str]]
"""Hosts of a chain, in order: URL, and the token by which one may bring it pieces."""


def open_relay(token: str, line: Line, seconds: float) -> Call:
    """A push through a chain begins; see rlsys/weights_relay/relay.py."""
    return Call("/relay/open", {"token": token, "line": [list(hop) for hop in line], "seconds": seconds})


def declare_to_relay(first: int, files: Sequence[list[Any]]) -> Call:
    """Declare sizes and digests of files (rlsys.weights_relay.pieces.FileSpec). `first`: number of the first one."""
    return Call("/relay/declare", {"first": first, "files": list(files)})


def renew_relay(token: str) -> Call:
    return Call("/relay/renew", {"token": token})


def relay_state(files: int) -> Call:
    return Call("/relay/state", {"files": files})


def feed_from_relay(line: Line, seconds: float) -> Call:
    return Call("/relay/feed", {"line": [list(hop) for hop in line], "seconds": seconds})


def load_relayed(folder: str) -> Call:
    """What a relay has named in `folder`, whatever format the engine read its first weights from."""
    call = load_from_disk(folder)
    return Call(call.path, {**call.body, "load_format": "safetensors"})


def load_from_disk(folder: str, label: str | None = None) -> Call:
    """A safetensors folder that the engine can read. `label`: what it then calls its weights; none: as before."""
    body: dict[str, Any] = {"model_path": folder, "flush_cache": False}
    return Call("/update_weights_from_disk", body if label is None else {**body, "weight_version": label})


ADAPTER = "policy"
"""What an engine calls the adapter of a run."""


def load_adapter(told: Mapping[str, Any], handles: Sequence[bytes], sums: Mapping[str, str]) -> Call:
    """From memory. `told`: adapter_config.json. `handles`: of a flattened bucket, for each tensor-parallel rank of
    the engine. `sums`: SHA-256 of each tensor, by name."""
    tensors = [base64.b64encode(handle).decode() for handle in handles]
    body = {"lora_name": ADAPTER, "config_dict": dict(told), "serialized_named_tensors": tensors}
    check = {"load_format": "flattened_bucket", "expected_checksums": dict(sums)}
    return Call("/load_lora_adapter_from_tensors", {**body, **check})


def forget_adapter() -> Call:
    """The engine refuses when it knows none."""
    return Call("/unload_lora_adapter", {"lora_name": ADAPTER})


def load_by(loader: str, ranks: int) -> Call:
    """No tensors: a loader that the engine was started with (`--custom-weight-loader`) gets them itself."""
    nothing = base64.b64encode(pickle.dumps([])).decode()
    body = {"serialized_named_tensors": [nothing] * ranks, "load_format": loader, "flush_cache": False}
    return Call("/update_weights_from_tensor", body)


def join_group(group: str, host: str, port: int, rank: int, world_size: int, backend: str) -> Call:
    """`rank`: of the engine's first tensor-parallel rank; `host` and `port`: where the group meets."""
    body = {"master_address": host, "master_port": port, "rank_offset": rank, "world_size": world_size}
    return Call("/init_weights_update_group", {**body, "group_name": group, "backend": backend})


def leave_group(group: str) -> Call:
    return Call("/destroy_weights_update_group", {"group_name": group})
