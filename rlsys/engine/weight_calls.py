"""Requests by which a trainer sends weights to an engine: path and body of each POST.

The engine responds when it has loaded the weights. All other requests to SGLang are in client.py. This module sends
nothing and does not import torch.
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
    """Make the engine load one flattened bucket from shared memory.

    Args:
        handles: The bucket for each tensor-parallel rank of the engine, in SGLang's own serialization.
    """
    tensors = [base64.b64encode(handle).decode() for handle in handles]
    body = {"serialized_named_tensors": tensors, "load_format": "flattened_bucket"}
    # The router flushes the cache once, after the last bucket.
    return Call("/update_weights_from_tensor", {**body, "flush_cache": False})


def load_from_group(group: str, tensors: Sequence[tuple[str, str, list[int]]]) -> Call:
    """Make the engine load a flattened bucket that rank 0 of a process group broadcasts.

    Args:
        group: Name of the process group.
        tensors: Name, dtype and shape of each tensor.
    """
    names, dtypes, shapes = map(list, zip(*tensors, strict=True))
    body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
    load = {"load_format": "flattened_bucket", "flush_cache": False}
    return Call("/update_weights_from_distributed", {**body, **load})


def load_from_senders(group: str, buckets: Buckets) -> Call:
    """Make the engine load all buckets of a sharded push (bucket_hooks.py).

    Args:
        group: Name of the process group. Its senders send concurrently.
        buckets: Sizes and order of the buckets.
    """
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
    """Declare sizes and digests of files.

    Args:
        first: Index of the first file.
        files: Fields of each file's rlsys.weights_relay.pieces.FileSpec.
    """
    return Call("/relay/declare", {"first": first, "files": list(files)})


def renew_relay(token: str) -> Call:
    """Replace the token that authorizes sending pieces to a host."""
    return Call("/relay/renew", {"token": token})


def relay_state(files: int) -> Call:
    """Query whether a host has all pieces of the first `files` files, and in which folder."""
    return Call("/relay/state", {"files": files})


def feed_from_relay(chain: RelayChain, seconds: float) -> Call:
    """Make a host send all its pieces to a host that lost its predecessor.

    Args:
        chain: The receiving host, then its substitutes.
        seconds: Maximum silence of a host.
    """
    return Call("/relay/feed", {"line": [list(hop) for hop in chain], "seconds": seconds})


def load_relayed(folder: str) -> Call:
    """Make the engine load the safetensors files in the folder of a relay, regardless of the engine's load format."""
    call = load_from_disk(folder)
    return Call(call.path, {**call.body, "load_format": "safetensors"})


def load_from_disk(folder: str, label: str | None = None) -> Call:
    """Make the engine load a safetensors folder.

    Args:
        folder: Path of the folder on the engine's host.
        label: New label of the weights; None to keep the label.
    """
    body: dict[str, Any] = {"model_path": folder, "flush_cache": False}
    return Call("/update_weights_from_disk", body if label is None else {**body, "weight_version": label})


ADAPTER = "policy"
"""Name of a run's adapter in an engine."""


def load_adapter(config: Mapping[str, Any], handles: Sequence[bytes], sums: Mapping[str, str]) -> Call:
    """Make the engine load the run's adapter from shared memory.

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
    """Make the engine unload the run's adapter. An engine without it refuses."""
    return Call("/unload_lora_adapter", {"lora_name": ADAPTER})


def run_loader(loader: str, ranks: int) -> Call:
    """Make the engine run one of the loaders of its argument `--custom-weight-loader`, without tensors.

    Args:
        loader: Import path of the loader.
        ranks: Tensor-parallel size of the engine.
    """
    empty = base64.b64encode(pickle.dumps([])).decode()
    body = {"serialized_named_tensors": [empty] * ranks, "load_format": loader, "flush_cache": False}
    return Call("/update_weights_from_tensor", body)


def join_group(group: str, host: str, port: int, rank: int, world_size: int, backend: str) -> Call:
    """Make the engine join a process group with the trainer.

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
    """Make the engine leave a process group with the trainer."""
    return Call("/destroy_weights_update_group", {"group_name": group})
