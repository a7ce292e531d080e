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
    """Key of a row's tool schemas. Unset: tools."""


class RewardSpec(Section):
    """One reward. A config has it as `NAME`, or as `{name: NAME, weight: ..., params: ...}`."""

    name: Annotated[str, Field(min_length=1)]
    """Short name of a reward function, an import path `package.module:function`, `path/to/file.py:function`, or the
    URL of a service that scores responses."""
    weight: float = 1.0
    """Factor of the reward in the sum of all rewards."""
    signature: Literal["auto", "rlsys", "verl", "slime", "trl", "verifiers"] = "auto"
    """Calling convention of the function: that of rlsys, verl, slime, TRL or verifiers. auto infers it from the
    function's parameters."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _shorten(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Serialize a reward without other fields than its name as a plain string."""
        return self.name if self == RewardSpec(name=self.name) else serialize(self)


class DataConfig(Section):
    source: str = "chain_sum_tail"
    """Short name of a prompt source, or an import path `package.module:function`, or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the prompt source."""
    keys: KeysConfig = KeysConfig()
    """Keys of the rows of the sources jsonl, parquet and dataset, if they differ from the defaults."""
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
    URL of a service that scores responses; or a list of rewards, `{name: ..., weight: ..., params: ...}`, which are
    added."""
    reward_env: list[str] = Field(default_factory=list)
    """Environment variables that a plain (not async) reward function may read, for example an API key. It can read no
    other variables of the rollout process."""
    reward_memory_gb: Gigabytes = 16.0
    """Maximum address space of one reward process in GiB. A plain reward function that needs more gets a
    MemoryError."""
    judge: str | None = None
    """Judge of group rewards that need verdicts: the URL of an OpenAI-compatible server, engines (those of the run),
    chain_sum (a rule), or an import path. Unset: none."""
    process_judge: str | None = None
    """Judge that finds the first wrong step of a failed response and its correction, for planners that repair
    responses (scope): chain_sum (a rule), or an import path. Unset: none."""
    judge_timeout: Seconds = 120.0
    """Time limit of a verdict in seconds; a later verdict is ignored. Time in which the engines pause does not
    count."""

    @property
    def reward_name(self) -> str:
        """Name of the reward in messages."""
        return " + ".join(spec.name for spec in self.reward)


class EvalSet(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    """Name of the set, which is the prefix of its metrics: NAME/accuracy, NAME/pass_4."""
    data: DataConfig | None = None
    """Prompts and reward of this set, with the fields and defaults of the section data. Unset: those of the run."""
    prompts: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Number of held-out prompts of the set's source (with data.params.heldout_path, prompts of that file). Unset:
    128, or all held-out prompts if there are fewer."""
    samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Number of responses to each prompt. More than one give pass@k for k = 1, 2, 4 and so on up to this number."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=2, le=2048)] | None = None
    """Sample from this number of most probable ids only. Unset: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most probable of the top_k ids that together have this probability. Needs top_k."""
    max_response_tokens: Positive | None = None
    """Maximum response length in tokens. Unset: rollout.max_response_tokens."""

    @property
    def truncation(self) -> Truncation | None:
        """Truncation of the sampling distribution; None: none."""
        return None if self.top_k is None else Truncation(self.top_k, self.top_p)

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
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
    """Number of train steps between two held-out evaluations. Two more run before the first step and after the last
    one. The next step waits for an evaluation, unless it runs in the background."""
    prompts: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Number of held-out prompts. They are not trained, unless a data set is too small for a split. More prompts
    make the accuracy more exact and the evaluation longer. Unset: 128, or all held-out prompts if there are fewer. 0:
    no evaluations; held-out prompts are still not trained."""
    seed: NonNegative = 999
    """Seed of the held-out prompts."""
    background: bool = False
    """Evaluate while training continues. One engine keeps its weights, and gets no push and no samples until the
    evaluation ends; the run waits for the last evaluation. Needs launch.placement = disaggregated and two engines."""
    sets: list[EvalSet] = Field(default_factory=list)
    """Additional named sets, each with its own prompts, reward and sampling. They are evaluated after the held-out
    prompts, with the same weights."""

    def due(self, step: int, last: bool) -> bool:
        """Return whether an evaluation follows train step `step`.

        Args:
            last: whether it is the last step of the run.
        """
        return self.prompts != 0 and (last or step % self.interval == 0)

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        names = [s.name for s in self.sets]
        if duplicate := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(
                f"sets: name = {duplicate!r} of {names.count(duplicate)} sets; expected different names"
            )
        if self.prompts == 0 and (self.sets or self.background):
            unused = "sets" if self.sets else "background"
            raise ValueError(f"prompts = 0: no evaluations; expected no {unused}")
        return self
