"""Process group of a sharded push: all trainer ranks, and all ranks of some engines."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Collection, Sequence
from concurrent.futures import wait

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.hooks.bucket_order import receiver_rank
from rlsys.engine.weight_calls import leave_group
from rlsys.trainer.control import Control
from rlsys.weights.receivers import EngineUnreachable, Receivers
from rlsys.weights.transports import GroupRendezvous, abort, begin_first, offsets

_POLL_SECONDS = 0.002


class SendersGroup:
    """Process group of all trainer ranks and the engines `members`.

    Every trainer rank has an instance; all methods but `send` are collective.
    """

    def __init__(
        self, control: Control, rank: int, trainers: int, seconds: float, join_seconds: float
    ) -> None:
        """Create an instance without a group.

        Args:
            control: collective operations of the trainer ranks.
            rank: this trainer rank.
            trainers: number of trainer ranks.
            seconds: time in which an engine must receive a bucket.
            join_seconds: time limit for joining the group. An engine that dies while it joins delays the others
                by this time.
        """
        self._control, self._rank, self._trainers = control, rank, trainers
        self._seconds, self._join_seconds = seconds, join_seconds
        self._group: dist.ProcessGroup | None = None
        self.members: list[EngineAddress] = []
        self.name = ""

    def open(self, receivers: Receivers) -> None:
        """Create the group with all present engines; exclude those that fail to join, and try again without them.

        Args:
            receivers: the engines. On return all trainer ranks have rank 0's lists of present and excluded engines.
        """
        while receivers.present and not self._join(receivers):
            pass
        self.members = list(receivers.present)

    def connect(self) -> dict[str, str]:
        """Create NCCL's communicator. Call this after all members have received the load request.

        Returns:
            URL -> reason for the engines that failed: all or none, because NCCL does not report which rank hangs.
                With gloo always none.
        """
        if (group := self._group) is None or dist.get_backend(group) != "nccl":
            return {}
        end = time.monotonic() + self._seconds
        token = torch.zeros(1, device="cuda")
        work = begin_first(
            lambda: dist.all_reduce(token, group=group, async_op=True), token, lambda: False, self._seconds
        )
        while work is not None and not work.is_completed() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if work is not None and work.is_completed() and work.exception() is None:
            return {}
        reason = f"NCCL could not create a communicator within {self._seconds:g} s"
        return {engine.url: reason for engine in self.members}

    def send(self, memory: Tensor, sender_index: int, failed: dict[str, str]) -> None:
        """Send this rank's next bucket to all members that have not failed; return when they have received it.

        Args:
            memory: the bucket.
            sender_index: this rank's index among the senders.
            failed: URL -> reason; members that do not receive the bucket are added.
        """
        assert self._group is not None
        first_ranks, count = offsets(self.members, self._trainers), len(self.members)
        works: list[tuple[str, dist.Work]] = []
        for i in range(count):
            # Senders start at different engines, so that an engine does not receive all buckets at once.
            index = (sender_index + i) % count
            engine = self.members[index]
            if engine.url in failed:
                continue
            target = first_ranks[index] + receiver_rank(sender_index, engine.tp)
            try:
                operation = dist.P2POp(dist.isend, memory, group=self._group, group_peer=target)
                (work,) = dist.batch_isend_irecv([operation])
            except RuntimeError as e:  # gloo: the engine has closed the connection
                failed[engine.url] = str(e)
            else:
                works.append((engine.url, work))
        if dist.get_backend(self._group) == "nccl":
            self._wait_all(works, failed)
        else:
            self._wait_each(works, failed)

    def close(self, failed: Collection[str] = ()) -> None:
        """Leave the group in this process and on the engines.

        Args:
            failed: URLs of members that have failed. They get no request, and the group is aborted.
        """
        if self._group is None:
            return
        group, self._group = self._group, None
        remaining = [engine for engine in self.members if engine.url not in failed]
        if failed:
            abort(group)
        with Receivers(remaining if self._rank == 0 else [], self._seconds) as members:
            # Both sides at the same time: in NCCL each waits for the other.
            answers = members.post_all([leave_group(self.name)] * len(members.present))
            if not failed:
                dist.destroy_process_group(group)
            for answer in answers.values():
                with contextlib.suppress(EngineUnreachable, RunError):  # unreachable, or has never joined
                    answer.result()
        self.members = []

    def _join(self, receivers: Receivers) -> bool:
        """Return whether every engine has joined the new group; if not, close it and exclude the engines at fault."""
        rendezvous = self._control.on_main(lambda: GroupRendezvous.create(receivers.present, self._trainers))
        self.name = rendezvous.name
        answers = receivers.post_all(rendezvous.calls(receivers.present)) if self._rank == 0 else {}
        failure = RunError(
            f"cannot create a process group with {len(receivers.present)} engines; its store is {rendezvous}"
        )
        try:
            self._group = rendezvous.join(self._rank, self._join_seconds)
        except (RuntimeError, TimeoutError) as e:
            failure = RunError(f"{failure}: {e}")
        wait(answers.values())
        succeeded = self._group is not None and not any(answer.exception() for answer in answers.values())
        if all(self._control.gather(succeeded)):
            return True
        if self._group is not None:
            abort(self._group)
            self._group = None
        if self._rank == 0:
            receivers.exclude_failed(answers, {}, failure)  # the others have timed out, and refuse as well
        receivers.present, receivers.excluded = self._control.on_main(
            lambda: (receivers.present, receivers.excluded)
        )
        return False

    def _wait_each(self, works: Sequence[tuple[str, dist.Work]], failed: dict[str, str]) -> None:
        """Wait for each engine's transfer; add engines that do not receive it within the time limit to `failed`."""
        limit = datetime.timedelta(seconds=self._seconds)
        for url, work in works:
            try:
                work.wait(limit)
            except RuntimeError as e:  # the engine has died, or hangs
                failed[url] = str(e)

    def _wait_all(self, works: Sequence[tuple[str, dist.Work]], failed: dict[str, str]) -> None:
        """Wait for all transfers.

        After the time limit add all engines to `failed`, because NCCL does not report which of them hangs.
        """
        end = time.monotonic() + self._seconds
        while not all(work.is_completed() for _, work in works):
            if time.monotonic() > end:
                reason = f"NCCL did not finish sending a bucket within {self._seconds:g} s"
                failed.update(dict.fromkeys((url for url, _ in works), reason))
                return
            time.sleep(_POLL_SECONDS)


class SendersGroupCache:
    """Groups of sharded pushes: one for each set of engines that receive together, as in a round of a rolling push.

    The cache closes a group when one of its engines joins another group. Every trainer rank has an instance; all
    methods are collective.
    """

    def __init__(
        self, control: Control, rank: int, trainers: int, seconds: float, join_seconds: float
    ) -> None:
        """Create an empty cache. The arguments are those of SendersGroup."""
        self._arguments = (control, rank, trainers, seconds, join_seconds)
        self._groups: list[SendersGroup] = []

    def get(self, receivers: Receivers) -> SendersGroup:
        """Return the group of the present engines; create it if necessary.

        Engines that fail to join are excluded. Groups with a restarted engine, which holds no weights, are closed,
        because only the engine's earlier process is a member.
        """
        members = [(engine.url, engine.tp) for engine in receivers.present]
        restarted = {engine.url for engine in receivers.present if engine.holds < 0}
        urls = {url for url, _ in members}
        for cached in list(self._groups):
            cached_urls = {engine.url for engine in cached.members}
            has_same_members = [(engine.url, engine.tp) for engine in cached.members] == members
            if cached_urls & restarted or (cached_urls & urls and not has_same_members):
                self.leave(cached)
        group = next((g for g in self._groups if {e.url for e in g.members} == urls), None)
        if group is None:
            group = SendersGroup(*self._arguments)
            group.open(receivers)
            self._groups.append(group)
        return group

    def leave(self, group: SendersGroup, failed: Collection[str] = ()) -> None:
        """Remove `group` from the cache, and close it (SendersGroup.close)."""
        self._groups.remove(group)
        group.close(failed)

    def close(self) -> None:
        """Leave all groups."""
        while self._groups:
            self._groups.pop().close()
