"""Prompt choosers: plug-ins that choose the prompt of a new group and its wording.

A choice depends only on the chooser's state and the group's id, so that a resumed run uses the same prompts. Imports
no torch, because it runs in the rollout process.
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
    """Wording of a question, and the expected form of the response.

    Attributes:
        system: System message; "" for none.
        user: User message, in which `{question}` stands for the question.
        opening: Text with which the response starts.
        form: Form of the final answer (rlsys.rewards.answer).
        marks: Texts that the response must contain exactly once.
    """

    system: str = ""
    user: str = "{question}"
    opening: str = ""
    form: str = "tags"
    marks: tuple[str, ...] = ()

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the chat messages that ask the question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user.replace("{question}", question)}]


class PromptChooser(Plugin):
    """Base of prompt choosers: map a group id to a prompt index and a template."""

    def index(self, group_id: int) -> int:
        """Return the index of the group's prompt in the source."""
        return group_id

    def template(self, group_id: int) -> Template:
        """Return the template of a group, always the same one, so that resumed samples keep it."""
        return Template()

    def on_rewards(self, group: SampleGroup) -> None:
        """Receive a group whose samples have their rewards."""

    def forget(self, group_id: int) -> None:
        """Delete the state of a group that was dropped before it had rewards."""


class InOrder(PromptChooser):
    """The prompts in the order of their source, with the default template."""

    evidence: ClassVar[str] = "own"


class Pool(PromptChooser):
    """The first `size` prompts of the source, in rounds; each round has all of them in a new random order.

    Use this for an endless source if a plug-in has state for each prompt (mssr).
    """

    evidence: ClassVar[str] = "own"
    size: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Number of prompts in the pool."""
    seed: int = 0
    """Seed of the random orders."""
    _order: tuple[int, list[int]] = PrivateAttr(default=(-1, []))
    """Number and order of the round that was last requested."""

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
