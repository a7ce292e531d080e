"""File descriptors of this process: every request in flight needs one, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource

from rlsys.core.errors import UserError

RESERVE = 256
"""Descriptors for other purposes: files, pipes of reward processes, control connections, clients."""


def raise_descriptors(requests: int, fields: str) -> None:
    """Raise the soft limit to the hard limit.

    Args:
        requests: maximum number of concurrent requests.
        fields: config fields that determine it, for the message.

    Raises:
        UserError: the hard limit is too small.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    total = requests + RESERVE
    if hard != resource.RLIM_INFINITY and hard < total:
        raise UserError(
            f"{fields}: up to {requests} requests in flight need {total} file descriptors; the hard limit is "
            f"{hard} (ulimit -Hn): raise it, or reduce these fields"
        )
