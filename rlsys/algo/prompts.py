"""Which prompt a new group gets, and how it is worded. For the rollout process: no torch.

A chooser is deterministic in (its state, the group's id), so a resumed run asks for the same prompts.
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
    """How a question is put: a system message ("" for none), the question with `{question}`, how the answer opens.

    And what it asks a response to look like: the `form` of its final answer (rlsys.rewards.answer), and `marks` that
    it has exactly once.
    """

    system: str = ""
    user: str = "{question}"
    opening: str = ""
    form: str = "tags"
    marks: tuple[str, ...] = ()

    def messages(self, question: str) -> list[dict[str, str]]:
        """The chat up to the answer; `opening` is what the answer is forced to start with."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user.replace("{question}", question)}]


class PromptChooser(Plugin):
    """Group id -> prompt index and template."""

    def index(self, group_id: int) -> int:
        """Index of the prompt in its source."""
        return group_id

    def template(self, group_id: int) -> Template:
        """Chosen once per group: a resumed sample keeps it."""
        return Template()

    def hear(self, group: SampleGroup) -> None:
        """A group has its rewards."""

    def forget(self, group_id: int) -> None:
        """A group was dropped before it had them."""


class InOrder(PromptChooser):
    """Prompts in the order of their source, each with the source's own template."""

    evidence: ClassVar[str] = "own"


class Pool(PromptChooser):
    """The first `size` prompts of the source, in an order drawn anew for each round: all of them before one comes
    again. For what keeps a record of each prompt (mssr), where the source has no end."""

    evidence: ClassVar[str] = "own"
    size: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Prompts in the pool."""
    seed: int = 0
    """Of the order."""
    _order: tuple[int, list[int]] = PrivateAttr(default=(-1, []))
    """The last round that was asked for."""

    def index(self, group_id: int) -> int:
        number, place = divmod(group_id, self.size)
        if self._order[0] != number:
            self._order = number, stream("pool", self.seed, number).permutation(self.size).tolist()
        return self._order[1][place]


def stream(*parts: object) -> np.random.Generator:
    """Random numbers that depend on these parts alone, in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
