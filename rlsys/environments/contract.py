"""What an environment is: it opens on a task, hears what the model says, and answers with messages and a reward.

    environment = make(**params)          once a process
    episode = environment.open(task, seed)
    episode.opening                       what the model reads first
    episode.step(action)                  a turn of the model -> what follows it
    episode.close()

The same task, seed and actions must give the same answers: an episode whose process was killed is played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""Of a chat: `role`, `content`, and what goes with tools."""


@dataclass(frozen=True)
class Action:
    """A turn of the model. `calls`: of tools, each with `id`, `name` and `arguments` (a JSON text); empty where the
    run reads none."""

    text: str
    calls: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Opening:
    """`messages`: empty where the prompt of the data's row is all that the model reads. `tools`: their schemas."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """What follows a turn. `done`: it was the last one, and `messages` are not read any more. `right`: whether the
    episode has succeeded; None: the environment does not say it."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    right: bool | None = None


class Episode(Protocol):
    """One run of an environment. It is called from several threads, but never by two at once."""

    @property
    def opening(self) -> Opening: ...

    def step(self, action: Action) -> Step: ...

    def close(self) -> None: ...


class Environment(Protocol):
    """Shared by all episodes of a process, which open and step at the same time."""

    def open(self, task: Mapping[str, Any], seed: int) -> Episode: ...


def says(content: object, role: str = "user") -> tuple[Message, ...]:
    """One message."""
    return ({"role": role, "content": str(content)},)


@dataclass
class Refused(Exception):
    """What was asked can never be answered. `status`: of HTTP."""

    status: int
    reason: str
    wait: float = field(default=0.0)
    """Seconds after which it could, where the status says "not now"."""

    def __str__(self) -> str:
        return self.reason
