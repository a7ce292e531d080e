"""Limits of the file descriptors of this process: each request in flight needs one, and the usual limit is 1,024."""

from __future__ import annotations

import resource

from rlsys.core.errors import UserError

RESERVE = 256
"""Number of descriptors for other purposes: files, pipes of reward processes, control connections, clients."""


def raise_soft_limit() -> int:
    """Raise the soft limit of file descriptors to the hard limit, and return it, possibly RLIM_INFINITY."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def raise_descriptors(requests: int, fields: str) -> None:
    """Raise the soft limit to the hard limit, and check that it suffices.

    Args:
        requests: maximum number of requests in flight.
        fields: names of the config fields that determine `requests`, for the message.

    Raises:
        UserError: the hard limit is too low.
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

    Args:
        newest: the descriptor that was opened last.
    """
    # The kernel assigns the lowest free number, so all numbers below `newest` are in use.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or newest < soft - min(RESERVE, soft // 4)
