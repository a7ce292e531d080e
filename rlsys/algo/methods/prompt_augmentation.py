"""Prompt augmentation: random wordings of prompts. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.algo.prompts import PromptChooser, Template, stream
from rlsys.config.section import Section


class TemplateParams(Section):
    """Parameters of a rlsys.algo.prompts.Template."""

    system: str = ""
    """System message; empty for none."""
    user: Annotated[str, Field(pattern=r"\{question\}")] = "{question}"
    """User message, in which `{question}` stands for the question."""
    opening: str = ""
    """Text with which the response starts."""
    form: Literal["tags", "boxed", "line"] = "tags"
    """Requested form of the final answer: <answer>...</answer>, \\boxed{...}, or a last line `Answer: ...`."""
    marks: list[str] = Field(default_factory=list)
    """Texts that a response must contain exactly once to get the reward of the format (`data.reward:
    answer_and_format`)."""


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
    """Draw a template for the question of each group, so that repeated prompts have different wordings.

    A template sets the system message, the text around the question, the start of the response, and the form of the
    final answer, which verifiers use. The paper has 13 templates, five of which request a structure that is rewarded;
    the eight default templates are rlsys's own. The prompt source must not state the form of the answer
    (`data.params.instruction` of reasoning_gym).
    """

    paper: ClassVar[str] = "Prompt augmentation for RL with verifiable rewards"
    evidence: ClassVar[str] = "R"
    templates: Annotated[list[TemplateParams], Field(min_length=1)] = DEFAULT_TEMPLATES
    """Templates, of which one is drawn for each group."""
    seed: int = 0
    """Seed of the draws."""

    def template(self, group_id: int) -> Template:
        params = self.templates[int(stream("template", self.seed, group_id).integers(len(self.templates)))]
        return Template(params.system, params.user, params.opening, params.form, tuple(params.marks))
