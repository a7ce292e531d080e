"""File descriptors of this process: every request in flight holds one, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource

from rlsys.core.errors import UserError

RESERVE = 256
"""For what is open beside requests: files, pipes of reward processes, control connections, clients."""


def raise_soft_limit() -> int:
    """Raise the soft limit to the hard one.

    Returns: the hard limit, or RLIM_INFINITY.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def raise_descriptors(requests: int, asked_by: str) -> None:
    """Raise the soft limit to the hard one. Raises UserError when not even that is enough for `requests` at once.

    `asked_by`: the fields that ask for so many.
    """
    hard = raise_soft_limit()
    needed = requests + RESERVE
    if hard != resource.RLIM_INFINITY and hard < needed:
        less = f", or ask for at most {hard - RESERVE}" if hard > RESERVE else ""
        raise UserError(
            f"{asked_by}: up to {requests} requests in flight need {needed} file descriptors; the hard limit is "
            f"{hard} (ulimit -Hn): raise it{less}"
        )


def descriptors_left(newest: int) -> bool:
    """Whether enough descriptors are free for what is no connection. The kernel gives the lowest free number, so the
    number of a new descriptor tells how many are open.

    Args:
        newest: the descriptor that was opened last.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or newest < soft - min(RESERVE, soft // 4)
