"""Choice and wording of the prompt of a new group.

Imports no torch, because it runs in the rollout process.

A chooser depends only on its state and the group's id, so that a resumed run uses the same prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from rlsys.algo.plugin import Plugin
from rlsys.core.types import SampleGroup


@dataclass(frozen=True)
class Template:
    """Wording of a question: a system message ("" for none), the question with `{question}`, the start of the answer.

    It also defines the expected response: the `form` of its final answer (rlsys.rewards.answer), and `marks`, texts
    that the response must contain exactly once.
    """

    system: str = ""
    user: str = "{question}"
    opening: str = ""
    form: str = "tags"
    marks: tuple[str, ...] = ()

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the chat up to the answer; `opening` is the forced start of the answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user.replace("{question}", question)}]


class PromptChooser(Plugin):
    """Map a group id to a prompt index and a template."""

    def index(self, group_id: int) -> int:
        """Return the index of the prompt in its source."""
        return group_id

    def template(self, group_id: int) -> Template:
        """Return the template of the group. It depends on the group only, so that a resumed sample keeps it."""
        return Template()

    def on_rewards(self, group: SampleGroup) -> None:
        """Record the rewards of a group."""

    def forget(self, group_id: int) -> None:
        """Delete the state of a group that was dropped before it had rewards."""


class InOrder(PromptChooser):
    """Prompts in the order of their source, each with the source's own template."""

    evidence: ClassVar[str] = "own"


class Pool(PromptChooser):
    """The first `size` prompts of the source, in rounds; each round has all of them in a new random order.

    For plug-ins with state per prompt (mssr) and an endless source.
    """

    evidence: ClassVar[str] = "own"
    size: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Prompts in the pool."""
    seed: int = 0
    """Seed of the order."""
    _order: tuple[int, list[int]] = PrivateAttr(default=(-1, []))
    """The last requested round."""

    def index(self, group_id: int) -> int:
        round_number, position = divmod(group_id, self.size)
        if self._order[0] != round_number:
            self._order = (
                round_number,
                stream("pool", self.seed, round_number).permutation(self.size).tolist(),
            )
        return self._order[1][position]


def stream(*parts: object) -> np.random.Generator:
    """Return a random generator whose numbers depend only on `parts`, in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
