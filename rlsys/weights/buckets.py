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

    Without CUDA these are two buffers that alternate and are reused: the kernel zeroes fresh memory page by
    page, which takes as long as a copy. On a GPU each bucket has its own memory: an engine responds before
    its copy of a bucket is done, and torch knows when the last reader has finished.
    """

    def __init__(self, *, shared: bool) -> None:
        """Create empty buffers. `shared`: other processes of this machine open handles of them."""
        self._shared = shared
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def flatten(self, bucket: Bucket) -> FlatBucket:
        """Copy a bucket into one buffer. Without CUDA the copy is valid until the next but one."""
        parts = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        return FlatBucket(self.flatten_bytes([as_bytes(tensor) for _, tensor in bucket]), parts)

    def flatten_bytes(self, parts: list[Tensor]) -> Tensor:
        """Concatenate byte tensors into one buffer, with the same lifetime."""
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
    """Allocate `[size]` uint8 of shared memory, by file name.

    A file descriptor could be passed only over a socket, with a secret that another server does not have.
    """
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def send_in_buckets(
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int,
    buffers: StagingBuffers,
    send: Callable[[FlatBucket], None],
) -> int:
    """Send the tensors in buckets, and return their bytes.

    At most three buckets are in memory: one being sent, and the next one twice, as gathered and flattened.
    """
    return send_pipelined(split_into_buckets(tensors, max_bytes), buffers.flatten, send)


def send_pipelined(
    buckets: Iterable[Bucket], flatten: Callable[[Bucket], FlatBucket], send: Callable[[FlatBucket], None]
) -> int:
    """Send each bucket while the next one is gathered and flattened, and return their bytes."""
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


_FIRST, _SECOND = ".q_a_proj.", ".kv_a_proj_with_mqa."


def _load_units(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Group tensors that an engine must receive in one call.

    SGLang fuses the two first projections of latent attention as it loads them, and silently drops one whose
    partner is not in the same call. The first of them waits for the other.
    """
    waiting: Bucket = []
    for name, tensor in tensors:
        if _FIRST in name:
            waiting.append((name, tensor.detach()))
        elif waiting and name == waiting[0][0].replace(_FIRST, _SECOND):
            yield [waiting.pop(0), (name, tensor.detach())]
        else:
            yield [(name, tensor.detach())]
    for tensor_pair in waiting:
        yield [tensor_pair]
