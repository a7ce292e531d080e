"""Between coordinator and worker: messages keep their order, and many of them leave before the last is there."""

from __future__ import annotations

import asyncio
import socket

from rlsys.worker.link import MAX_BATCH_MESSAGES, CancelSamples, Link, ToWorker


async def test_the_first_of_many_messages_leave_before_the_last_is_there() -> None:
    heard: list[int] = []
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    here = Link(ToWorker, lambda messages: None, lambda: None)
    there = Link(ToWorker, lambda messages: heard.extend(m.sample_ids[0] for m in messages), lost.set)
    await here.open(ours)
    await there.open(theirs)
    for i in range(MAX_BATCH_MESSAGES + 1):
        here.send(CancelSamples([i]))
    assert theirs.recv(1, socket.MSG_PEEK), "without a turn of the loop"
    here.close()
    await lost.wait()
    assert heard == list(range(MAX_BATCH_MESSAGES + 1))
