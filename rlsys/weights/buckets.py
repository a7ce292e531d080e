"""Tensors on their way to engines: neighbours fill a bucket, and a bucket lies in one piece of memory.

Laying out a bucket while the one before it is on its way makes a push take as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Flat:
    """A bucket in one piece. `memory` [bytes] uint8; `parts`: name, dtype and shape of each tensor, in order."""

    memory: Tensor
    parts: list[tuple[str, torch.dtype, torch.Size]]


class Areas:
    """Where buckets are laid out. Without CUDA these are two areas that take turns, and stay: the kernel clears fresh
    memory page by page, which takes as long as a copy. On a GPU each bucket has memory of its own: an engine answers
    before its copy of a bucket is done, and torch knows when its last reader is.
    """

    def __init__(self, *, shared: bool) -> None:
        """`shared`: other processes of this machine open handles of them."""
        self._shared = shared
        self._areas = [torch.empty(0, dtype=torch.uint8)] * 2

    def lay(self, bucket: Bucket) -> Flat:
        """A copy of the bucket. Without CUDA it lasts until the next but one."""
        parts = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        return Flat(self.lay_bytes([as_bytes(tensor) for _, tensor in bucket]), parts)

    def lay_bytes(self, flat: list[Tensor]) -> Tensor:
        """The same of bytes, one behind the other."""
        if flat[0].is_cuda:
            return torch.cat(flat)
        size = sum(len(tensor) for tensor in flat)
        area, used = self._areas
        if len(area) < size:
            area = _shared_memory(size) if self._shared else torch.empty(size, dtype=torch.uint8)
        self._areas = [used, area]
        return torch.cat(flat, out=area[:size])


def as_bytes(tensor: Tensor) -> Tensor:
    """`[bytes]`, uint8: a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _shared_memory(size: int) -> Tensor:
    """`[size]`, uint8. By a file's name: its descriptor could only be passed on over a socket, with a secret that
    another server lacks."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def stream(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int, areas: Areas, send: Callable[[Flat], None]
) -> int:
    """Send the tensors in buckets; their bytes. At most three buckets are held: one on its way, and the next one
    twice, as it was gathered and in one piece."""
    return overlapped(buckets(tensors, max_bytes), areas.lay, send)


def overlapped(
    gathered: Iterable[Bucket], lay: Callable[[Bucket], Flat], send: Callable[[Flat], None]
) -> int:
    """Send each bucket while the next one is gathered and laid out; their bytes."""
    sent, under_way = 0, None
    with ThreadPoolExecutor(1, thread_name_prefix="push") as sender:
        for bucket in gathered:
            flat = lay(bucket)
            bucket.clear()
            if under_way is not None:
                under_way.result()
            under_way = sender.submit(send, flat)
            sent += len(flat.memory)
        if under_way is not None:
            under_way.result()
    return sent


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Neighbouring tensors of one dtype, together at most `max_bytes`; what is larger has a bucket for itself."""
    bucket: Bucket = []
    size = 0
    for unit in _units(tensors):
        more = sum(tensor.nbytes for _, tensor in unit)
        if bucket and (size + more > max_bytes or unit[0][1].dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += more
    if bucket:
        yield bucket


_FIRST, _SECOND = ".q_a_proj.", ".kv_a_proj_with_mqa."


def _units(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """What an engine must get in one call. SGLang joins latent attention's two first projections as it loads them,
    and forgets one whose partner is not in the same call, without a word. The first of them waits for the other.
    """
    waiting: Bucket = []
    for name, tensor in tensors:
        if _FIRST in name:
            waiting.append((name, tensor.detach()))
        elif waiting and name == waiting[0][0].replace(_FIRST, _SECOND):
            yield [waiting.pop(0), (name, tensor.detach())]
        else:
            yield [(name, tensor.detach())]
    for left in waiting:
        yield [left]
