"""The process group of a sharded push: all trainer ranks, and all ranks of some engines."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Collection, Sequence
from concurrent.futures import wait

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.engine.bucket_order import taker
from rlsys.engine.weight_calls import leave_group
from rlsys.errors import RunError
from rlsys.tickets import EngineAddress
from rlsys.trainer.control import Control
from rlsys.weights.receivers import Gone, Receivers
from rlsys.weights.transports import Meeting, abort, begin_first, offsets

_LOOK_SECONDS = 0.002


class SendersGroup:
    """Every trainer rank has one, and calls all but `send` together with the others. `members` take part."""

    def __init__(self, control: Control, rank: int, trainers: int, seconds: float, joining: float) -> None:
        """`seconds`: what an engine may take for a bucket; `joining`: to join. Who dies while it joins holds the
        others up so long."""
        self._control, self._rank, self._trainers = control, rank, trainers
        self._seconds, self._joining = seconds, joining
        self._group: dist.ProcessGroup | None = None
        self.members: list[EngineAddress] = []
        self.name = ""

    def open(self, receivers: Receivers) -> None:
        """With all engines who are there; who goes while it joins is left out, and the others join another one.
        `receivers`: rank 0's are asked; every rank's end as its are."""
        while receivers.present and not self._joined(receivers):
            pass
        self.members = list(receivers.present)

    def meet(self) -> dict[str, str]:
        """Once all members have been asked to load: NCCL makes its communicator when all come, gloo has done so.

        Returns:
            URL -> why of the engines that have gone. NCCL says of a group that it hangs, not who: all have gone then,
            and each gets a push of its own.
        """
        if (group := self._group) is None or dist.get_backend(group) != "nccl":
            return {}
        end = time.monotonic() + self._seconds
        token = torch.zeros(1, device="cuda")
        work = begin_first(
            lambda: dist.all_reduce(token, group=group, async_op=True), token, lambda: False, self._seconds
        )
        while work is not None and not work.is_completed() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        if work is not None and work.is_completed() and work.exception() is None:
            return {}
        why = f"NCCL made no communicator within {self._seconds:g} s"
        return {engine.url: why for engine in self.members}

    def send(self, memory: Tensor, place: int, gone: dict[str, str]) -> None:
        """This rank's next bucket to all members but the `gone`; `place` is this rank's among the senders. Returns
        when they have it. Who does not take it is then gone, too: URL -> why."""
        assert self._group is not None
        first, count = offsets(self.members, self._trainers), len(self.members)
        works: list[tuple[str, dist.Work]] = []
        for step in range(count):
            engine = self.members[number := (place + step) % count]
            if engine.url in gone:
                continue
            to = first[number] + taker(place, engine.tp)
            try:
                given = dist.P2POp(dist.isend, memory, group=self._group, group_peer=to)
                (work,) = dist.batch_isend_irecv([given])
            except RuntimeError as e:  # gloo: it has closed the connection
                gone[engine.url] = str(e)
            else:
                works.append((engine.url, work))
        if dist.get_backend(self._group) == "nccl":
            self._settle_all(works, gone)
        else:
            self._settle_each(works, gone)

    def close(self, lost: Collection[str] = ()) -> None:
        """Leave the group, here and at its engines. `lost`: URLs of those that have gone from it, and break it."""
        if self._group is None:
            return
        group, self._group = self._group, None
        left = [engine for engine in self.members if engine.url not in lost]
        if lost:
            abort(group)
        with Receivers(left if self._rank == 0 else [], self._seconds) as members:
            # Both sides at once: NCCL's end waits for the other's.
            answers = members.ask([leave_group(self.name)] * len(members.present))
            if not lost:
                dist.destroy_process_group(group)
            for answer in answers.values():
                with contextlib.suppress(Gone, RunError):  # it has gone, or has never joined
                    answer.result()
        self.members = []

    def _joined(self, receivers: Receivers) -> bool:
        """Whether every engine is in the new group; when not, there is none, and who is to blame is left out."""
        meeting = self._control.on_main(lambda: Meeting.towards(receivers.present, self._trainers))
        self.name = meeting.name
        asked = receivers.ask(meeting.calls(receivers.present)) if self._rank == 0 else {}
        failure = RunError(f"no process group with {len(receivers.present)} engines at {meeting}")
        try:
            self._group = meeting.join(self._rank, self._joining)
        except (RuntimeError, TimeoutError) as e:
            failure = RunError(f"{failure}: {e}")
        wait(asked.values())
        fine = self._group is not None and not any(answer.exception() for answer in asked.values())
        if all(self._control.gather(fine)):
            return True
        if self._group is not None:
            abort(self._group)
            self._group = None
        if self._rank == 0:
            receivers.blame(asked, {}, failure)  # the others waited in vain, and refuse, too
        self._agree(receivers)
        return False

    def _agree(self, receivers: Receivers) -> None:
        """Every rank's receivers are rank 0's."""
        receivers.present, receivers.left_out = self._control.on_main(
            lambda: (receivers.present, receivers.left_out)
        )

    def _settle_each(self, works: Sequence[tuple[str, dist.Work]], gone: dict[str, str]) -> None:
        limit = datetime.timedelta(seconds=self._seconds)
        for url, work in works:
            try:
                work.wait(limit)
            except RuntimeError as e:  # it has died, or hangs
                gone[url] = str(e)

    def _settle_all(self, works: Sequence[tuple[str, dist.Work]], gone: dict[str, str]) -> None:
        """NCCL says of a group that it hangs, not who: all have gone then, and each gets a push of its own."""
        end = time.monotonic() + self._seconds
        while not all(work.is_completed() for _, work in works):
            if time.monotonic() > end:
                gone.update(dict.fromkeys((url for url, _ in works), "NCCL did not finish sending in time"))
                return
            time.sleep(_LOOK_SECONDS)


class SendersGroups:
    """Owns one group for each set of engines that take part together: all of them, or those of a round of a rolling
    push. One that an engine leaves for another is closed. Every trainer rank has one and calls it with the others.
    """

    def __init__(self, control: Control, rank: int, trainers: int, seconds: float, joining: float) -> None:
        """See SendersGroup."""
        self._made = (control, rank, trainers, seconds, joining)
        self._kept: list[SendersGroup] = []

    def of(self, receivers: Receivers) -> SendersGroup:
        """The group of those who are present, who have joined it; with fewer of them, when some go meanwhile. An
        engine that was started anew does not know the group of its predecessor; it holds no weights."""
        wanted = [(engine.url, engine.tp) for engine in receivers.present]
        anew = {engine.url for engine in receivers.present if engine.holds < 0}
        urls = {url for url, _ in wanted}
        for group in list(self._kept):
            inside = {e.url for e in group.members}
            if (inside & urls and [(e.url, e.tp) for e in group.members] != wanted) or inside & anew:
                self.leave(group)
        found = next((g for g in self._kept if {e.url for e in g.members} == urls), None)
        if found is None:
            found = SendersGroup(*self._made)
            found.open(receivers)
            self._kept.append(found)
        return found

    def leave(self, group: SendersGroup, lost: Collection[str] = ()) -> None:
        """See SendersGroup.close."""
        self._kept.remove(group)
        group.close(lost)

    def close(self) -> None:
        """Leave them all."""
        while self._kept:
            self._kept.pop().close()
