"""World of any size with only this rank: torch's fake process group, for every group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def enter(rank: int, size: int) -> None:
    """Create a fake default group of `size` ranks; all later groups of this process are fake, for any backend.

    Objects are not exchanged: every rank is assumed to have this rank's object.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    make = dist.new_group

    def new_group(ranks: list[int] | None = None, *args: Any, **settings: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        options = {name: value for name, value in settings.items() if name == "group_desc"}
        return make(ranks, backend="fake", **options)

    def all_gather_object(out: list[Any], value: Any, group: Any = None) -> None:
        out[:] = [value] * len(out)

    def broadcast_object_list(*args: Any, **settings: Any) -> None:
        """Leave the list unchanged."""

    dist.new_group = new_group
    dist.all_gather_object = all_gather_object  # type: ignore[assignment]
    dist.broadcast_object_list = broadcast_object_list


@contextmanager
def of_rank(rank: int, size: int) -> Iterator[None]:
    """Make this process rank `rank` of a world of `size` ranks within the context."""
    real = dist.new_group, dist.all_gather_object, dist.broadcast_object_list
    enter(rank, size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.new_group, dist.all_gather_object, dist.broadcast_object_list = real
