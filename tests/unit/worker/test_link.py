"""Between coordinator and worker: messages keep their order, and many of them leave before the last is there."""

from __future__ import annotations

import asyncio
import socket

from rlsys.worker.link import MAX_BATCH_MESSAGES, CancelSamples, Link, ToWorker


async def test_the_first_of_many_messages_are_sent_before_the_last_is_queued() -> None:
    received_ids: list[int] = []
    sender_socket, receiver_socket = socket.socketpair()
    lost = asyncio.Event()
    sender_link = Link(ToWorker, lambda messages: None, lambda: None)
    receiver_link = Link(
        ToWorker, lambda messages: received_ids.extend(m.sample_ids[0] for m in messages), lost.set
    )
    await sender_link.open(sender_socket)
    await receiver_link.open(receiver_socket)
    for i in range(MAX_BATCH_MESSAGES + 1):
        sender_link.send(CancelSamples([i]))
    assert receiver_socket.recv(1, socket.MSG_PEEK), "without a turn of the loop"
    sender_link.close()
    await lost.wait()
    assert received_ids == list(range(MAX_BATCH_MESSAGES + 1))
