"""The config sections `data` and `eval`: prompts, their rewards, and held-out evaluations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rlsys.config.rollout import Truncation
from rlsys.config.section import Gigabytes, NonNegative, Positive, Seconds, Section


class KeysConfig(Section):
    prompt: str | None = None
    """Key of a row's prompt, a text or a chat. Unset: prompt or messages."""
    answer: str | None = None
    """Key of a row's right answer; `a.b` is key b of key a. Unset: answer, label, ground_truth or
    reward_model.ground_truth, whichever comes first."""
    tools: str | None = None
    """Key of the schemas of a row's tools. Unset: tools."""


class RewardSpec(Section):
    """One reward of several, or one with parameters: a name, or `{name: ..., weight: ..., params: ...}`."""

    name: Annotated[str, Field(min_length=1)]
    """Short name of a reward function, an import path `package.module:function`, `path/to/file.py:function`, or the
    URL of a service that scores."""
    weight: float = 1.0
    """Factor of its value in the sum of all rewards."""
    signature: Literal["auto", "rlsys", "verl", "slime", "trl", "verifiers"] = "auto"
    """Calling convention of the function: that of rlsys, verl, slime, TRL or verifiers. auto infers it from the
    function's parameters."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _long(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Write a name without other fields as a plain string."""
        return self.name if self == RewardSpec(name=self.name) else serialize(self)


class DataConfig(Section):
    source: str = "chain_sum_tail"
    """Short name of a prompt source, or an import path `package.module:function`, or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the prompt source."""
    keys: KeysConfig = KeysConfig()
    """Keys of the rows of jsonl, parquet and dataset, if they differ from the usual ones."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the model's chat template, for example enable_thinking: false, or tools: [...].
    The tools of a row take precedence."""
    seed: NonNegative = 0
    """Seed of the training prompts; run.seed is added to it."""
    reward: Annotated[
        list[RewardSpec],
        BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value),
    ] = Field(default=[RewardSpec(name="reasoning_gym")], min_length=1)
    """Short name of a reward function, an import path `package.module:function`, `path/to/file.py:function`, or the
    URL of a service that scores; or a list of rewards, `{name: ..., weight: ..., params: ...}`, which are added."""
    reward_env: list[str] = Field(default_factory=list)
    """Environment variables that a plain (not async) reward function may read, for example an API key. It sees
    no other variables of the rollout process."""
    reward_memory_gb: Gigabytes = 16.0
    """Address space of one reward process, in GiB. A plain reward function that needs more gets a
    MemoryError."""
    judge: str | None = None
    """Judge of group rewards that need verdicts: the URL of an OpenAI-compatible server, engines
    (the run's own), chain_sum (a rule), or an import path."""
    process_judge: str | None = None
    """Judge that finds the first wrong step of a failed response, and the right one, for planners that repair
    (scope): chain_sum (a rule), or an import path."""
    judge_timeout: Seconds = 120.0
    """Seconds to wait for a verdict; a later one is ignored. Time in which the engines are paused does not count."""

    @property
    def reward_name(self) -> str:
        """Name of the reward in messages."""
        return " + ".join(spec.name for spec in self.reward)


class EvalSet(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    """Prefix of its metrics: NAME/accuracy, NAME/pass_4."""
    data: DataConfig | None = None
    """Prompts and reward of this set, with the fields and defaults of the section data. Unset: those of the run."""
    prompts: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Number of prompts, out of the held-out ones of its source (all of data.params.heldout_path). Unset: 128, or all
    of them if a file has fewer."""
    samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Responses to each prompt. More than one give pass@k for k = 1, 2, 4 and so on up to their number."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=2, le=2048)] | None = None
    """Sample from this number of most probable ids only. Unset: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of these, sample from the most probable ids that together have this probability. Needs top_k."""
    max_response_tokens: Positive | None = None
    """Maximum response length in tokens. Unset: rollout.max_response_tokens."""

    @property
    def truncation(self) -> Truncation | None:
        """Truncation of the sampling distribution; None for none."""
        return None if self.top_k is None else Truncation(self.top_k, self.top_p)

    @model_validator(mode="after")
    def _spread(self) -> Self:
        if self.top_p != 1 and self.top_k is None:
            raise ValueError(f"top_p = {self.top_p:g} needs top_k; top_k = 1024 changes hardly anything")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0 are {self.samples} equal responses; use a "
                "temperature above 0, or samples = 1"
            )
        return self


class EvalConfig(Section):
    interval: Positive = 10
    """Train steps between two held-out evaluations. Two more run before the first step and after the last one.
    The next step waits for an evaluation, unless it runs in the background."""
    prompts: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Number of held-out prompts. They are never trained, unless a data set is too small for a split. More prompts
    make the accuracy more exact and the evaluation longer. Unset: 128, or all of them if a file has fewer. 0: no
    evaluations; held-out prompts are still not trained."""
    seed: NonNegative = 999
    """Seed of the held-out prompts."""
    background: bool = False
    """Evaluate while training continues: one engine keeps its weights, and gets no push and no samples until the
    evaluation ends. Needs launch.placement = disaggregated and two engines. The run waits for the last evaluation."""
    sets: list[EvalSet] = Field(default_factory=list)
    """Additional named sets, each with its own prompts, reward and sampling. They are evaluated after the held-out
    prompts, with the same weights."""

    def due(self, step: int, last: bool) -> bool:
        """Return whether an evaluation follows train step `step`. `last`: whether it is the run's last step."""
        return self.prompts != 0 and (last or step % self.interval == 0)

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [s.name for s in self.sets]
        if duplicate := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(
                f"sets: name = {duplicate!r} of {names.count(duplicate)} sets; expected different names"
            )
        if self.prompts == 0 and (self.sets or self.background):
            raise ValueError(
                "prompts = 0: no evaluations, so sets and background have no effect; leave them out"
            )
        return self
