"""The config section `algo`: which plug-ins make a run's algorithm. Names only: rlsys.algo builds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlsys.section import NonNegative, Positive, Section

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
        """`clip` and `{name: clip, clip_low: 0.1}` are how a person writes it; the dump has `params` apart."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" in value and not set(value) <= {"name", "params"}:
            return {"name": value["name"], "params": {k: v for k, v in value.items() if k != "name"}}
        return value


class CriticSection(Section):
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the critic's AdamW; trainer.lr when not given. Warm-up and schedule are the trainer's."""
    warmup_steps: NonNegative = 0
    """First train steps in which the critic alone learns; the policy's weights rest."""


class AlgoSection(Section):
    advantage: Spec = Spec(name="grpo")
    """Rewards of groups -> advantages."""
    loss: list[Spec] = Field(default=[Spec(name="clip")], min_length=1)
    """Terms of the objective; they are added."""
    reducer: Spec = Spec(name="token_mean")
    """What each token counts in the mean."""
    anchor: Anchor = "mu"
    """What ratios are taken against: mu (engine), old (trainer at the start of the step), behaviour (trainer at the
    version that sampled the token), interpolated (between mu and current, by version), ewma (averaged weights).

    `interpolated` stands for the trainer one version ago, as AReaL's does: mu + alpha (current - mu), where
    alpha = (age - 1) / age for a token that is `age` versions old, and 0 up to an age of 1.

    With interrupted samples `behaviour` is the exact one; `old` is then of later weights than those that sampled. The
    default serves float32: there a push is attested to a mean difference of 1e-6 between mu and the trainer's
    log-probs, so mu is the exact `old`, and a scoring pass would buy nothing. In bfloat16, or with engines of
    another precision, take behaviour (colocated), interpolated or ewma (disaggregated)."""
    corrections: list[Spec] = Field(default_factory=list)
    """Weights and rejections for tokens that another policy sampled; all are applied."""
    shaping: list[Spec] = Field(default_factory=list)
    """Changes of the rewards before the advantages, in this order."""
    selectors: list[Spec] = Field(default_factory=list)
    """Which samples and tokens are trained, in this order."""
    hooks: list[Spec] = Field(default_factory=list)
    """What happens around an optimizer update."""
    prompt: Spec = Spec(name="in_order")
    """Which prompt a new group gets, and how it is put."""
    planners: list[Spec] = Field(default_factory=list)
    """How many samples a group gets, and whether it is kept; the first that does not accept decides."""
    group_reward: Spec | None = None
    """Rewards that are computed from all samples of a group."""
    critic: CriticSection | None = None
    """A value model of its own for advantages that need values: the policy's architecture and first weights, with its
    own optimizer. Without one, a linear head on the policy's trunk gives the values, and its loss moves the trunk."""
    minibatches: Positive = 1
    """Optimizer updates of one pass over a train step's samples."""
    epochs: Annotated[int, Field(gt=0, le=64)] = 1
    """Passes over a train step's samples, each over the same mini-batches in the same order; epochs * minibatches
    optimizer updates per train step. What ratios are taken against stays that of the start of the step."""
