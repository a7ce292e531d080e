"""Requests by which a trainer sends weights to an engine: path and body of each POST. No I/O, no torch.

The engine responds when it has loaded the weights. All other requests to SGLang are in client.py.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlsys.engine.hooks.bucket_order import Buckets

FORMAT = "rlsys_buckets"
"""Load format of a sharded push, in place of SGLang's own formats."""


class Call(NamedTuple):
    """A POST to an engine."""

    path: str
    body: dict[str, Any]


def load_from_memory(handles: Sequence[bytes]) -> Call:
    """Load one flattened bucket from shared memory.

    Args:
        handles: The bucket for each tensor-parallel rank of the engine, in SGLang's own serialization.
    """
    tensors = [base64.b64encode(handle).decode() for handle in handles]
    body = {"serialized_named_tensors": tensors, "load_format": "flattened_bucket"}
    # The router flushes the cache once, after the last bucket.
    return Call("/update_weights_from_tensor", {**body, "flush_cache": False})


def load_from_group(group: str, tensors: Sequence[tuple[str, str, list[int]]]) -> Call:
    """Load a flattened bucket that rank 0 of the group broadcasts. `tensors`: name, dtype and shape of each."""
    names, dtypes, shapes = map(list, zip(*tensors, strict=True))
    body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
    load = {"load_format": "flattened_bucket", "flush_cache": False}
    return Call("/update_weights_from_distributed", {**body, **load})


def load_from_senders(group: str, buckets: Buckets) -> Call:
    """Load all buckets of a sharded push, which the senders of the group send concurrently (bucket_hooks.py)."""
    body = {"names": [buckets.encode()], "dtypes": [], "shapes": [], "group_name": group}
    return Call("/update_weights_from_distributed", {**body, "load_format": FORMAT, "flush_cache": False})


RelayChain = Sequence[tuple[str, str]]
"""Hosts of a chain, in order: URL, and the token that authorizes sending pieces to the host."""


def open_relay(token: str, chain: RelayChain, seconds: float) -> Call:
    """Start a push through a chain of hosts (rlsys/weights_relay/relay.py).

    Args:
        token: Authorizes sending pieces to the called host.
        chain: The next host, then its substitutes.
        seconds: Maximum silence of a host.
    """
    return Call("/relay/open", {"token": token, "line": [list(hop) for hop in chain], "seconds": seconds})


def declare_to_relay(first: int, files: Sequence[list[Any]]) -> Call:
    """Declare sizes and digests of files (rlsys.weights_relay.pieces.FileSpec). `first`: index of the first file."""
    return Call("/relay/declare", {"first": first, "files": list(files)})


def renew_relay(token: str) -> Call:
    """Replace the token that authorizes sending pieces to a host."""
    return Call("/relay/renew", {"token": token})


def relay_state(files: int) -> Call:
    """Query whether a host has all pieces of `files` files, and their folder."""
    return Call("/relay/state", {"files": files})


def feed_from_relay(chain: RelayChain, seconds: float) -> Call:
    """Make a host send all its pieces to a host that lost its predecessor.

    Args:
        chain: The receiving host, then its substitutes.
        seconds: Maximum silence of a host.
    """
    return Call("/relay/feed", {"line": [list(hop) for hop in chain], "seconds": seconds})


def load_relayed(folder: str) -> Call:
    """Load the safetensors files that a relay has written to `folder`, regardless of the engine's load format."""
    call = load_from_disk(folder)
    return Call(call.path, {**call.body, "load_format": "safetensors"})


def load_from_disk(folder: str, label: str | None = None) -> Call:
    """Load a safetensors folder. `label`: new label of the weights; None keeps the label."""
    body: dict[str, Any] = {"model_path": folder, "flush_cache": False}
    return Call("/update_weights_from_disk", body if label is None else {**body, "weight_version": label})


ADAPTER = "policy"
"""Name of a run's adapter in an engine."""


def load_adapter(config: Mapping[str, Any], handles: Sequence[bytes], sums: Mapping[str, str]) -> Call:
    """Load an adapter from shared memory.

    Args:
        config: Contents of adapter_config.json.
        handles: A flattened bucket for each tensor-parallel rank of the engine.
        sums: Tensor name -> SHA-256.
    """
    tensors = [base64.b64encode(handle).decode() for handle in handles]
    body = {"lora_name": ADAPTER, "config_dict": dict(config), "serialized_named_tensors": tensors}
    check = {"load_format": "flattened_bucket", "expected_checksums": dict(sums)}
    return Call("/load_lora_adapter_from_tensors", {**body, **check})


def unload_adapter() -> Call:
    """Unload the adapter. An engine without an adapter refuses."""
    return Call("/unload_lora_adapter", {"lora_name": ADAPTER})


def run_loader(loader: str, ranks: int) -> Call:
    """Run a loader that the engine was started with (`--custom-weight-loader`); the request contains no tensors."""
    empty = base64.b64encode(pickle.dumps([])).decode()
    body = {"serialized_named_tensors": [empty] * ranks, "load_format": loader, "flush_cache": False}
    return Call("/update_weights_from_tensor", body)


def join_group(group: str, host: str, port: int, rank: int, world_size: int, backend: str) -> Call:
    """Join a process group with the trainer.

    Args:
        group: Name of the group.
        host: Address of the rendezvous.
        port: Port of the rendezvous.
        rank: Rank of the engine's first tensor-parallel rank in the group.
        world_size: Number of ranks in the group.
        backend: Backend of torch.distributed.
    """
    body = {"master_address": host, "master_port": port, "rank_offset": rank, "world_size": world_size}
    return Call("/init_weights_update_group", {**body, "group_name": group, "backend": backend})


def leave_group(group: str) -> Call:
    """Leave a process group with the trainer."""
    return Call("/destroy_weights_update_group", {"group_name": group})
