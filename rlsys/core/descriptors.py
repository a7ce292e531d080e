"""File descriptors of this process: every request in flight needs one, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource

from rlsys.core.errors import UserError

RESERVE = 256
"""Descriptors for other purposes: files, pipes of reward processes, control connections, clients."""


def raise_soft_limit() -> int:
    """Raise the soft limit to the hard limit.

    Returns:
        The hard limit, or RLIM_INFINITY.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def raise_descriptors(requests: int, fields: str) -> None:
    """Raise the soft limit to the hard limit.

    Args:
        requests: maximum number of concurrent requests.
        fields: config fields that determine it, for the message.

    Raises:
        UserError: the hard limit is too small.
    """
    hard = raise_soft_limit()
    total = requests + RESERVE
    if hard != resource.RLIM_INFINITY and hard < total:
        remedy = f", or reduce these fields to at most {hard - RESERVE}" if hard > RESERVE else ""
        raise UserError(
            f"{fields}: up to {requests} requests in flight need {total} file descriptors; the hard limit is "
            f"{hard} (ulimit -Hn): raise it{remedy}"
        )


def descriptors_left(newest: int) -> bool:
    """Return whether the process has enough free descriptors for purposes other than connections.

    The kernel assigns the lowest free number, so the number of a new descriptor bounds the number of open ones.

    Args:
        newest: the descriptor that was opened last.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or newest < soft - min(RESERVE, soft // 4)
