"""A world of any size of which only this rank exists: torch's fake process group, for every group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def enter(rank: int, size: int) -> None:
    """The default group of `size` ranks, and all groups that are made from now on, by whatever backend they ask for.

    Objects do not travel: every rank is taken to hold what this one holds. For the rest of the process.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    make = dist.new_group

    def new_group(ranks: list[int] | None = None, *args: Any, **settings: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        kept = {name: value for name, value in settings.items() if name == "group_desc"}
        return make(ranks, backend="fake", **kept)

    def all_gather_object(out: list[Any], mine: Any, group: Any = None) -> None:
        out[:] = [mine] * len(out)

    def broadcast_object_list(*args: Any, **settings: Any) -> None:
        """The list is as it is."""

    dist.new_group = new_group
    dist.all_gather_object = all_gather_object  # type: ignore[assignment]
    dist.broadcast_object_list = broadcast_object_list


@contextmanager
def of_rank(rank: int, size: int) -> Iterator[None]:
    """The same while it lasts."""
    real = dist.new_group, dist.all_gather_object, dist.broadcast_object_list
    enter(rank, size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.new_group, dist.all_gather_object, dist.broadcast_object_list = real
