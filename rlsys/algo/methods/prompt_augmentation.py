"""Prompt augmentation for RL with verifiable rewards. No torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsys.algo.prompts import PromptChooser, Template, stream
from rlsys.config.section import Section


class TemplateParams(Section):
    system: str = ""
    """System message; none when empty."""
    user: Annotated[str, Field(pattern=r"\{question\}")] = "{question}"
    """The user's message; `{question}` is replaced."""
    opening: str = ""
    """Forced beginning of the response."""
    form: Literal["tags", "boxed", "line"] = "tags"
    """Requested form of the final answer: <answer>...</answer>, \\boxed{...}, or a last line `Answer: ...`."""
    marks: list[str] = Field(default_factory=list)
    """Further texts that a response contains exactly once, for a reward of the format (`data.reward:
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
    """Each group puts its question in one of several templates, drawn evenly: a prompt seen again looks new.

    A template is a system text, the words around the question, how the answer is forced to open, and the format that
    it asks for: verifiers read the final answer in that form. The paper has 13 templates, of which five ask for a
    structure and are marked for it; rlsys wrote these eight. A prompt source that states the form of the answer
    itself (`data.params.instruction` of reasoning_gym) has to leave that to the templates.
    """

    paper: ClassVar[str] = "Prompt augmentation for RL with verifiable rewards"
    evidence: ClassVar[str] = "R"
    templates: Annotated[list[TemplateParams], Field(min_length=1)] = DEFAULT_TEMPLATES
    """Templates; one is drawn for each prompt."""
    seed: int = 0
    """Seed of the draws."""

    def template(self, group_id: int) -> Template:
        params = self.templates[int(stream("template", self.seed, group_id).integers(len(self.templates)))]
        return Template(params.system, params.user, params.opening, params.form, tuple(params.marks))
