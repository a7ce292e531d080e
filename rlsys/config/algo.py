"""Config section `algo`: the plug-ins of a run's algorithm. Names only: rlsys.algo builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlsys.config.section import FilePath, NonNegative, Positive, Section

Anchor = Literal["mu", "old", "behaviour", "interpolated", "ewma"]


class Spec(Section):
    """One plug-in: `name`, or `{name: ..., parameter: value, ...}`."""

    name: str
    """Short name or import path `package.module:attribute`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its parameters."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """Expand the short forms `clip` and `{name: clip, clip_low: 0.1}` into name and params."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" in value and not set(value) <= {"name", "params"}:
            return {"name": value["name"], "params": {k: v for k, v in value.items() if k != "name"}}
        return value


class CriticSection(Section):
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the critic's AdamW. Unset: trainer.lr. Warm-up and schedule are those of the trainer."""
    warmup_steps: NonNegative = 0
    """Train steps at the start that train only the critic."""


class TeacherSection(Section):
    path: FilePath
    """Folder of the teacher, or owner/name[@REVISION] of a hub: any model that rlsys can train, with the policy's
    vocabulary. Unless an engine serves it, each trainer rank also holds a shard of the teacher in `model.dtype`."""
    engine: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """URL of a server with the teacher's weights, which scores each response before its reward is computed. own
    starts one more engine. The trainer then holds no teacher, and SGLang must support the teacher's model family. If
    the server does not answer, samples are censored and the run continues. null: the trainer holds the teacher."""
    by_source: dict[str, FilePath] = Field(default_factory=dict)
    """Folders of additional teachers, by the `data_source` of a prompt's entry (a mixture sets it); prompts of other
    sources use the teacher of `path`. A name that no prompt has is an error. Each teacher costs its memory and one
    forward pass over the whole step."""
    top_k: Annotated[int, Field(ge=0, le=65536)] | None = 64
    """Number of the teacher's most probable ids that are compared at each token; the others are compared together.
    null: the whole vocabulary, which costs 12 bytes per id at each token of a step. 0: only the sampled token, for
    the loss term distill_pg."""
    tail_bucket: bool = True
    """Compare the ids beyond top_k together, as one more id. false: they are left out, and a negative sum over the
    others counts as 0, as in verl's forward_kl_topk."""
    least_logprob: Annotated[float, Field(lt=0)] | None = None
    """Lower bound of the compared log-probs, of teacher and policy; a token below it has no gradient. Unset: none."""
    direction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """1: KL(policy || teacher), which seeks a mode. 0: KL(teacher || policy), which covers all. Between them: the
    generalised Jensen-Shannon divergence (GKD, eq. 1), with this weight of the teacher."""

    @model_validator(mode="after")
    def _sampled_token(self) -> Self:
        if self.top_k == 0 and (
            self.direction != 1 or not self.tail_bucket or self.least_logprob is not None
        ):
            raise ValueError(
                f"top_k = 0 compares the sampled token alone; direction = {self.direction:g}, tail_bucket = "
                f"{str(self.tail_bucket).lower()} and least_logprob = {self.least_logprob} need most probable "
                "tokens: expected 1, true and null, or a top_k of 1 or more"
            )
        return self

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the teachers, by config field."""
        return {"path": self.path, **{f"by_source.{name}": path for name, path in self.by_source.items()}}


class AlgoSection(Section):
    advantage: Spec = Spec(name="grpo")
    """Estimator of the advantages from the rewards of a group."""
    loss: list[Spec] = Field(default=[Spec(name="clip")], min_length=1)
    """Terms of the loss; they are added."""
    reducer: Spec = Spec(name="token_mean")
    """Weight of each token in the mean loss, and its denominator."""
    anchor: Anchor = "mu"
    """Log-probs in the denominator of the policy ratios.

    mu: the engine's. old: the trainer's at the start of the step. behaviour: the trainer's under the weights that
    sampled the token. interpolated: between mu and the current ones, by the token's age. ewma: those of averaged
    weights. All but mu may cost forward passes; `rlsys explain` prints them.

    Only `behaviour` is exact for interrupted samples: `old` comes from later weights than those that sampled. Use mu
    in float32: every push is checked to a mean difference of 1e-6 between mu and the trainer's log-probs, so a
    scoring pass would change nothing. In bfloat16 use behaviour (colocated), or interpolated or ewma (disaggregated).

    `interpolated` estimates the trainer one weight version ago, as AReaL does: mu + alpha (current - mu), where
    alpha = (age - 1) / age for a token that is `age` weight versions old, and 0 up to an age of 1."""
    corrections: list[Spec] = Field(default_factory=list)
    """Weights and rejections for tokens that other weights or an inexact engine sampled. All are applied."""
    shaping: list[Spec] = Field(default_factory=list)
    """Changes of the rewards before the advantages are computed, applied in this order."""
    selectors: list[Spec] = Field(default_factory=list)
    """Selection of the samples and tokens to train, applied in this order."""
    hooks: list[Spec] = Field(default_factory=list)
    """Changes around an optimizer update: factors of the learning rate, averages of the weights."""
    prompt: Spec = Spec(name="in_order")
    """Choice of the prompt of a new group, and its wording."""
    planners: list[Spec] = Field(default_factory=list)
    """Policies that set the size of a group and decide whether it is trained. They are consulted in this order; the
    first that does not accept a group determines what happens to it."""
    group_reward: Spec | None = None
    """A reward that is computed from all samples of a group. It replaces the reward function's value."""
    critic: CriticSection | None = None
    """A separate value model for advantages that need values: the policy's architecture and initial weights, with
    its own optimizer. It takes as much memory as the policy. Unset: a linear head on the policy's trunk predicts the
    values, and its loss also trains the trunk."""
    teacher: TeacherSection | None = None
    """A frozen model that the loss term `distill` compares the policy with, token by token."""
    minibatches: Positive = 1
    """Optimizer updates in one pass over a train step's samples. More updates learn more from the same samples
    and move further away from the weights that sampled them."""
    epochs: Annotated[int, Field(gt=0, le=64)] = 1
    """Passes over a train step's samples, each over the same mini-batches in the same order: epochs *
    minibatches updates in total. The denominator of the ratios stays that of the start of the step."""
