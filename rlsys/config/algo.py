"""The config section `algo`: names and parameters of the plug-ins of a run's algorithm, which rlsys.algo builds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlsys.config.section import FilePath, NonNegative, Positive, Section

Anchor = Literal["mu", "old", "behaviour", "interpolated", "ewma"]


class Spec(Section):
    """One plug-in. A config has it as `NAME`, or as `{name: NAME, parameter: value, ...}`."""

    name: str
    """Short name, or import path `package.module:attribute`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the plug-in."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        """Expand the short forms `clip` and `{name: clip, clip_low: 0.1}` to name and params."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" in value and not set(value) <= {"name", "params"}:
            return {"name": value["name"], "params": {k: v for k, v in value.items() if k != "name"}}
        return value


class CriticSection(Section):
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the critic's AdamW, with the warm-up and schedule of the trainer. Unset: trainer.lr."""
    warmup_steps: NonNegative = 0
    """Number of train steps at the start that train only the critic."""


class TeacherSection(Section):
    path: FilePath
    """Folder of the teacher, or owner/name[@REVISION] of a hub: any model that rlsys can train, with the policy's
    vocabulary. Unless an engine serves it, each trainer rank also holds a shard of the teacher in `model.dtype`."""
    engine: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """URL of a server with the teacher's weights, which scores each response before its reward is computed. own: the
    run starts one more engine. With a server, the trainer holds no teacher, and SGLang must support the teacher's
    model family. If the server does not respond, samples are censored and the run continues. null: the trainer holds
    the teacher."""
    by_source: dict[str, FilePath] = Field(default_factory=dict)
    """Folders of additional teachers, by the `data_source` of a prompt's entry (a mixture sets it); prompts of other
    sources use the teacher of `path`. A name that no prompt has is an error. Each teacher costs its memory and one
    forward pass over the whole step."""
    top_k: Annotated[int, Field(ge=0, le=65536)] | None = 64
    """Number of the teacher's most probable ids that are compared at each token; the others are compared together.
    null: the whole vocabulary, which costs 12 bytes per id at each token of a step. 0: only the sampled token, for
    the loss term distill_pg."""
    tail_bucket: bool = True
    """Compare the ids beyond top_k together, as one more id. false: they are ignored, and a negative sum over the
    other ids counts as 0, as in verl's forward_kl_topk."""
    least_logprob: Annotated[float, Field(lt=0)] | None = None
    """Lower bound of the compared log-probs of teacher and policy. A token below it has no gradient. Unset: no
    bound."""
    direction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Divergence of policy and teacher. 1: KL(policy || teacher), which seeks a mode. 0: KL(teacher || policy), which
    covers all modes. Between 0 and 1: the generalised Jensen-Shannon divergence (GKD, eq. 1), with this weight of the
    teacher."""

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 0 and (
            self.direction != 1 or not self.tail_bucket or self.least_logprob is not None
        ):
            raise ValueError(
                f"top_k = 0 compares only the sampled token, with direction = {self.direction:g}, tail_bucket = "
                f"{str(self.tail_bucket).lower()} and least_logprob = {self.least_logprob}; expected direction = 1, "
                "tail_bucket = true and least_logprob = null, or a top_k of 1 or more"
            )
        return self

    @property
    def folders(self) -> dict[str, Path]:
        """Folder of each teacher, by the config field below algo.teacher."""
        return {"path": self.path, **{f"by_source.{name}": path for name, path in self.by_source.items()}}


class AlgoSection(Section):
    advantage: Spec = Spec(name="grpo")
    """Estimator of the advantages from the rewards of a group."""
    loss: list[Spec] = Field(default=[Spec(name="clip")], min_length=1)
    """Terms of the loss, which is their sum."""
    reducer: Spec = Spec(name="token_mean")
    """Weight of each token in the mean loss, and its denominator."""
    anchor: Anchor = "mu"
    """Log-probs in the denominator of the policy ratios.

    mu: the engine's. old: the trainer's at the start of the step. behaviour: the trainer's under the weights that
    sampled the token. interpolated: an interpolation of mu and the current log-probs by the token's age. ewma: those
    of averaged weights. All but mu may cost forward passes; `rlsys explain` prints their number.

    Only `behaviour` is exact for interrupted samples: `old` comes from later weights than those that sampled. Use mu
    in float32, where attestation limits the mean difference between mu and the trainer's log-probs to 1e-6, so that a
    scoring pass would change nothing. In bfloat16 use behaviour (colocated), or interpolated or ewma (disaggregated).

    `interpolated` estimates the trainer one weight version ago, as AReaL does: mu + alpha (current - mu), where
    alpha = (age - 1) / age for a token that is `age` weight versions old, and 0 up to an age of 1."""
    corrections: list[Spec] = Field(default_factory=list)
    """Importance weights and rejections for tokens that other weights or an inexact engine sampled. All are
    applied."""
    shaping: list[Spec] = Field(default_factory=list)
    """Changes of the rewards before the advantages are computed, applied in this order."""
    selectors: list[Spec] = Field(default_factory=list)
    """Selectors of the samples and tokens to train, applied in this order."""
    hooks: list[Spec] = Field(default_factory=list)
    """Changes of an optimizer update, such as factors of the learning rate or averages of the weights."""
    prompt: Spec = Spec(name="in_order")
    """Choice and wording of the prompt of a new group."""
    planners: list[Spec] = Field(default_factory=list)
    """Policies that set the size of a group and decide whether it is trained. They are consulted in this order; the
    first one that does not accept a group decides."""
    group_reward: Spec | None = None
    """A reward that is computed from all samples of a group, and replaces the reward function's values. Unset:
    none."""
    critic: CriticSection | None = None
    """A separate value model for advantages that need values. It has the policy's architecture and initial weights
    and a separate optimizer, and takes as much memory as the policy. Unset: a linear head on the policy's trunk
    predicts the values, and its loss also trains the trunk."""
    teacher: TeacherSection | None = None
    """A frozen model with which the loss term `distill` compares the policy at each token. Unset: none."""
    minibatches: Positive = 1
    """Number of optimizer updates in one pass over a train step's samples. More updates learn more from the same
    samples, and move further away from the weights that sampled them."""
    epochs: Annotated[int, Field(gt=0, le=64)] = 1
    """Number of passes over a train step's samples. Each has the same mini-batches in the same order, so a step has
    epochs * minibatches updates. All use the denominators of the ratios from the start of the step."""
