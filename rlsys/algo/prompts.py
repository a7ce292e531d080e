"""Which prompt a new group gets, and how it is worded. For the rollout process: no torch.

A chooser is deterministic in (its state, the group's id), so a resumed run asks for the same prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from rlsys.algo.plugin import Plugin
from rlsys.config.section import Section
from rlsys.core.types import SampleGroup

Decay = Annotated[float, Field(gt=0, le=1)]


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


class Vade(PromptChooser):
    """Prompts of medium difficulty first: a Beta posterior of each prompt's success rate, drawn by Thompson.

    Each group draws p ~ Beta(alpha, beta) for all prompts of the pool and takes the one with the largest
    p (1 - p)^2 that is not under way. A finished group adds its successes and failures after its prompt's record was
    decayed by `visited`; all records decay by `all_decay` per finished group, towards the prior 1, 1. The posterior
    and the score are those of the authors' project page; the decays are ours.
    """

    paper: ClassVar[str] = "VADE: variance-aware dynamic sampling"
    evidence: ClassVar[str] = "P"
    pool: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Prompts to choose from: the first of the source."""
    visited: Decay = 0.9
    """Decay of a prompt's record when it is visited."""
    all_decay: Decay = 0.999
    """Decay of every record per finished group."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    seed: int = 0
    """Of the draws."""
    _record: dict[int, list[float]] = PrivateAttr(default_factory=dict)
    _time: int = PrivateAttr(default=0)
    _under_way: dict[int, int] = PrivateAttr(default_factory=dict)

    def posterior(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """alpha and beta of every prompt of the pool."""
        alpha, beta = np.ones(self.pool), np.ones(self.pool)
        for prompt, (won, lost, time) in self._record.items():
            fade = self.all_decay ** (self._time - time)
            alpha[prompt] += won * fade
            beta[prompt] += lost * fade
        return alpha, beta

    def index(self, group_id: int) -> int:
        if group_id in self._under_way:
            return self._under_way[group_id]
        p = stream("vade", self.seed, group_id).beta(*self.posterior())
        score = p * (1 - p) ** 2
        if len(set(self._under_way.values())) < self.pool:
            score[list(self._under_way.values())] = -1.0
        self._under_way[group_id] = int(score.argmax())
        return self._under_way[group_id]

    def forget(self, group_id: int) -> None:
        self._under_way.pop(group_id, None)

    def hear(self, group: SampleGroup) -> None:
        self._under_way.pop(group.group_id, None)
        if not 0 <= group.prompt_index < self.pool:
            return
        rewards = [s.reward for s in group.samples if s.reward is not None]
        won = sum(r > self.correct for r in rewards)
        before = self._record.get(group.prompt_index, [0.0, 0.0, float(self._time)])
        fade = self.visited * self.all_decay ** (self._time - before[2])
        self._time += 1
        self._record[group.prompt_index] = [
            before[0] * fade + won,
            before[1] * fade + len(rewards) - won,
            float(self._time),
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "record": {str(k): v for k, v in self._record.items()},
            "time": self._time,
            "under_way": {str(k): v for k, v in self._under_way.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record = {int(k): [float(x) for x in v] for k, v in state["record"].items()}
        self._time = int(state["time"])
        self._under_way = {int(k): int(v) for k, v in state["under_way"].items()}


class TemplateParams(Section):
    system: str = ""
    """System message; none when empty."""
    user: Annotated[str, Field(pattern=r"\{question\}")] = "{question}"
    """The user's message; `{question}` is replaced."""
    opening: str = ""
    """What the answer is forced to start with."""
    form: Literal["tags", "boxed", "line"] = "tags"
    """How the final answer is asked for: <answer>...</answer>, \\boxed{...}, or a last line `Answer: ...`."""
    marks: list[str] = Field(default_factory=list)
    """What else a response has exactly once, for a reward of the format (`data.reward: answer_and_format`)."""


TAGGED = "Write the final answer between <answer> and </answer>."
DEFAULT_TEMPLATES = [
    TemplateParams(),
    TemplateParams(system=f"You solve problems one small step at a time. {TAGGED}"),
    TemplateParams(system="You are a patient teacher.", user=f"{{question}}\nShow every step. {TAGGED}"),
    TemplateParams(
        system=f"Plan how to solve the problem, then carry the plan out. {TAGGED}", opening="First I "
    ),
    TemplateParams(
        system=f"Close your thoughts with </think> before you answer. {TAGGED}",
        marks=["</think>", "<answer>", "</answer>"],
    ),
    TemplateParams(
        system="Derive the result with care. Your last words are the result in \\boxed{}.", form="boxed"
    ),
    TemplateParams(
        user="{question}\nEnd with one line that begins with `Answer:`.", form="line", marks=["Answer:"]
    ),
    TemplateParams(
        system="Solve the problem between <solution> and </solution>, then go over your solution between <check> "
        f"and </check>, and mend it if it is wrong. {TAGGED}",
        opening="<solution>\n",
        marks=["</solution>", "<check>", "</check>"],
    ),
]


class PromptAugmentation(PromptChooser):
    """Each group puts its question in one of several templates, drawn evenly: a prompt seen again looks new.

    A template is a system text, the words around the question, how the answer is forced to open, and the format that
    it asks for: verifiers read the final answer in that form. The paper has 13 templates, of which five ask for a
    structure and are marked for it; these eight are ours. A prompt source that tells the form of the answer itself
    (`data.params.instruction` of reasoning_gym) has to leave that to the templates.
    """

    paper: ClassVar[str] = "Prompt augmentation for RL with verifiable rewards"
    evidence: ClassVar[str] = "R"
    templates: Annotated[list[TemplateParams], Field(min_length=1)] = DEFAULT_TEMPLATES
    """What is drawn from."""
    seed: int = 0
    """Of the draws."""

    def template(self, group_id: int) -> Template:
        drawn = self.templates[int(stream("template", self.seed, group_id).integers(len(self.templates)))]
        return Template(drawn.system, drawn.user, drawn.opening, drawn.form, tuple(drawn.marks))
