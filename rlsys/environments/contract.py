"""Interface of an environment, which opens an episode for a task, and answers each turn with messages and a reward.

    environment = make(**params)          once per process
    episode = environment.open(task, seed)
    episode.opening                       the first messages for the model
    episode.step(action)                  a turn of the model -> its result
    episode.close()

Responses must be determined by task, seed and actions: after a crash of the process the episode is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""A chat message: `role`, `content`, and the fields of tool calls and results."""


@dataclass(frozen=True)
class Action:
    """A turn of the model."""

    text: str
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls, each with `id`, `name` and `arguments` (JSON text); empty if the run does not parse tool calls."""


@dataclass(frozen=True)
class Opening:
    """The start of an episode."""

    messages: Sequence[Message] = ()
    """The first messages for the model; empty if the prompt of the data's row is enough."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools."""


@dataclass(frozen=True)
class Step:
    """The result of a turn."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    """Whether this was the last turn; the model does not read its `messages`."""
    right: bool | None = None
    """Whether the episode has succeeded; None: unknown."""


class Episode(Protocol):
    """One run of an environment. Called from several threads, but never concurrently."""

    @property
    def opening(self) -> Opening: ...

    def step(self, action: Action) -> Step: ...

    def close(self) -> None: ...


class Environment(Protocol):
    """An environment. All episodes of a process share it, and open and step concurrently."""

    def open(self, task: Mapping[str, Any], seed: int) -> Episode: ...


def as_messages(content: object, role: str = "user") -> tuple[Message, ...]:
    """Return a list of one chat message, for Opening or Step.

    Args:
        content: text of the message; other objects are converted by `str`.
        role: role of the message.
    """
    return ({"role": role, "content": str(content)},)


@dataclass
class RequestRefused(Exception):
    """Raised for a request that the service refuses."""

    status: int
    """HTTP status."""
    reason: str
    wait: float = field(default=0.0)
    """With status 503: seconds after which the client may retry."""

    def __str__(self) -> str:
        return self.reason
