"""World of any size in which only this rank exists: every process group is torch's fake one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def enter(rank: int, size: int) -> None:
    """Create a fake default group of `size` ranks, and make all later groups of this process fake.

    Collectives of objects return this rank's object in place of the other ranks' objects.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    real_new_group = dist.new_group

    def new_group(ranks: list[int] | None = None, *args: Any, **settings: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        options = {name: value for name, value in settings.items() if name == "group_desc"}
        return real_new_group(ranks, backend="fake", **options)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(*args: Any, **settings: Any) -> None:
        """Leave the list unchanged."""

    dist.new_group = new_group
    dist.all_gather_object = all_gather_object
    dist.broadcast_object_list = broadcast_object_list


@contextmanager
def of_rank(rank: int, size: int) -> Iterator[None]:
    """Make this process rank `rank` of a fake world of `size` ranks within the context."""
    real = dist.new_group, dist.all_gather_object, dist.broadcast_object_list
    enter(rank, size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.new_group, dist.all_gather_object, dist.broadcast_object_list = real
