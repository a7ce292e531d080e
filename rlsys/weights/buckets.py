"""Buckets of tensors for engines: consecutive tensors, copied into one contiguous buffer.

A bucket is flattened while the previous one is sent, so a push takes as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class FlatBucket:
    """A bucket in one buffer.

    Attributes:
        memory: `[bytes]` uint8.
        parts: name, dtype and shape of each tensor, in order.
    """

    memory: Tensor
    parts: list[tuple[str, torch.dtype, torch.Size]]


class StagingBuffers:
    """Buffers into which buckets are flattened.

    Without CUDA, two buffers alternate: they are reused because Linux zeroes fresh memory page by page, which takes
    as long as a copy. On a GPU each bucket has its own memory: an engine responds before it has finished copying, and
    torch frees the memory after the last reader.
    """

    def __init__(self, *, shared: bool) -> None:
        """Create empty buffers. `shared`: whether other processes of this machine open them by handles."""
        self._shared = shared
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def flatten(self, bucket: Bucket) -> FlatBucket:
        """Copy a bucket into one buffer. Without CUDA, the second call after this one overwrites the copy."""
        parts = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        return FlatBucket(self.flatten_bytes([as_bytes(tensor) for _, tensor in bucket]), parts)

    def flatten_bytes(self, parts: list[Tensor]) -> Tensor:
        """Concatenate `[bytes]` uint8 tensors into one buffer, which is valid as long as a copy by `flatten`."""
        if parts[0].is_cuda:
            return torch.cat(parts)
        size = sum(len(tensor) for tensor in parts)
        buffer, other_buffer = self._buffers
        if len(buffer) < size:
            buffer = _shared_memory(size) if self._shared else torch.empty(size, dtype=torch.uint8)
        self._buffers = [other_buffer, buffer]
        return torch.cat(parts, out=buffer[:size])


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as `[bytes]` uint8: a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _shared_memory(size: int) -> Tensor:
    """Allocate `[size]` uint8 of shared memory that other processes open by its file name.

    Opening it by a file descriptor would need a socket and a secret that engines do not have.
    """
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def send_in_buckets(
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int,
    buffers: StagingBuffers,
    send: Callable[[FlatBucket], None],
) -> int:
    """Send the tensors in buckets of at most `max_bytes`, and return the number of bytes.

    At most three buckets are in memory: the one in transfer, and the gathered and the flattened form of the next.
    """
    return send_pipelined(split_into_buckets(tensors, max_bytes), buffers.flatten, send)


def send_pipelined(
    buckets: Iterable[Bucket], flatten: Callable[[Bucket], FlatBucket], send: Callable[[FlatBucket], None]
) -> int:
    """Send each bucket while the next one is gathered and flattened, and return the number of bytes.

    Args:
        buckets: iterator that gathers the buckets. Each list is emptied once it is flattened, to free its tensors.
        flatten: copies a bucket into one buffer.
        send: sends a buffer; runs in a thread.
    """
    sent_bytes, in_flight = 0, None
    with ThreadPoolExecutor(1, thread_name_prefix="push") as sender:
        for bucket in buckets:
            flat = flatten(bucket)
            bucket.clear()
            if in_flight is not None:
                in_flight.result()
            in_flight = sender.submit(send, flat)
            sent_bytes += len(flat.memory)
        if in_flight is not None:
            in_flight.result()
    return sent_bytes


def split_into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Group consecutive tensors of one dtype into buckets of at most `max_bytes`.

    A larger tensor is a bucket by itself.
    """
    bucket: Bucket = []
    size = 0
    for unit in _load_units(tensors):
        unit_size = sum(tensor.nbytes for _, tensor in unit)
        if bucket and (size + unit_size > max_bytes or unit[0][1].dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += unit_size
    if bucket:
        yield bucket


_Q_A, _KV_A = ".q_a_proj.", ".kv_a_proj_with_mqa."


def _load_units(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Yield the tensors; those that an engine must receive in one call form one group.

    SGLang fuses the two first projections of latent attention as it loads them, and silently drops a projection if
    the same call does not contain the other one. So the query projection waits for the key-value projection.
    """
    waiting: Bucket = []
    for name, tensor in tensors:
        if _Q_A in name:
            waiting.append((name, tensor.detach()))
        elif waiting and name == waiting[0][0].replace(_Q_A, _KV_A):
            yield [waiting.pop(0), (name, tensor.detach())]
        else:
            yield [(name, tensor.detach())]
    for named_tensor in waiting:
        yield [named_tensor]
