"""Interface of an environment, which opens an episode for a task, and answers each turn with messages and a reward.

    environment = make(**params)          once per process
    episode = environment.open(task, seed)
    episode.opening                       the first messages for the model
    episode.step(action)                  a turn of the model -> its result
    episode.close()

Task, seed and actions must determine all results, because the episode is replayed after a crash of the process.
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
    """Text of the turn, without its tool calls."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls, each with `id`, `name` and `arguments` (JSON text); empty if the run does not parse tool calls."""


@dataclass(frozen=True)
class Opening:
    """The start of an episode."""

    messages: Sequence[Message] = ()
    """The first messages for the model; empty: the model reads only the prompt of the data row."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools."""


@dataclass(frozen=True)
class Step:
    """The result of a turn."""

    messages: Sequence[Message] = ()
    """Messages for the model's next turn; ignored if this was the last turn."""
    reward: float = 0.0
    done: bool = False
    """Whether this was the last turn."""
    right: bool | None = None
    """Whether the episode has succeeded; None: unknown."""


class Episode(Protocol):
    """One episode of an environment. Called from several threads, but never concurrently."""

    @property
    def opening(self) -> Opening: ...

    def step(self, action: Action) -> Step: ...

    def close(self) -> None: ...


class Environment(Protocol):
    """An environment, shared by all episodes of a process. `open` and the episodes' steps run concurrently."""

    def open(self, task: Mapping[str, Any], seed: int) -> Episode: ...


def as_messages(content: object, role: str = "user") -> tuple[Message, ...]:
    """Return one chat message as the messages of an Opening or a Step.

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
    """Seconds after which the client may retry, with status 503."""

    def __str__(self) -> str:
        return self.reason
