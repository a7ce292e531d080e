"""JSON bodies of the requests of tinker 0.38.0.

Unknown fields are refused, because the server would ignore them (Strict). Bodies without an effect on training or
sampling may have other fields (Loose).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
)

from rlsys.core.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

T = TypeVar("T", bound=BaseModel)

Seq = Annotated[int, Field(ge=0, lt=2**62)]
Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""Learning rate or weight decay. Values above 1 take the weights out of float32's range within a few steps."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class Loose(BaseModel):
    """A body that may have unknown fields."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class Strict(BaseModel):
    """A body that must not have unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    type: str = ""


class LoraConfig(Strict):
    rank: int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Loose):
    type: str = "adamw"


class CreateModel(Strict):
    session_id: str
    model_seq_id: Seq
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: Optimizer = Optimizer()


class AdamParams(Strict):
    """Parameters of AdamW, with the protocol's defaults. `grad_clip_norm`: largest gradient norm; 0: no limit."""

    learning_rate: Rate = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Field(ge=1e-30, le=1, allow_inf_nan=False)] = 1e-12
    """Values below 1e-38 would be 0 in float32."""
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class OptimStep(Strict):
    adam_params: AdamParams
    model_id: str
    seq_id: Annotated[Seq, Field(ge=1)]


class SaveWeights(Strict):
    model_id: str
    path: str
    seq_id: Annotated[Seq, Field(ge=1)]
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    @field_validator("path")
    @classmethod
    def _name(cls, value: str) -> str:
        return checked_name(value)


class SaveForSampler(Strict):
    model_id: str
    seq_id: Annotated[Seq, Field(ge=1)]
    path: str | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None

    @field_validator("path")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        return None if value is None else checked_name(value)


class LoadWeights(Strict):
    """Load saved weights into a model (`model_id`, `seq_id`), or into a new model (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Annotated[Seq, Field(ge=1)] | None = None
    session_id: str | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None


class CreateSamplingSession(Strict):
    session_id: str
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Strict):
    tokens: Annotated[list[StrictInt], Field(max_length=2**22)]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Strict):
    chunks: Annotated[list[Chunk], Field(max_length=1024)]


class SamplingParams(Strict):
    """Sampling parameters, whose ranges check_sample validates."""

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | list[StrictInt] | None = None
    temperature: StrictFloat | StrictInt = 1.0
    top_k: StrictInt = -1
    top_p: StrictFloat | StrictInt = 1.0


class Sample(Strict):
    sampling_session_id: str
    seq_id: Seq
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_logprobs_last_n: None = None
    record_stability_info: Literal[False] | None = None
    base_model: None = None
    model_path: None = None

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class Retrieve(Loose):
    request_id: str


class ModelRequest(Loose):
    model_id: str


class SessionRequest(Loose):
    session_id: str


def checked_name(value: str) -> str:
    """Return a name of saved weights, after checking it.

    Raises:
        ValueError: the name is invalid.
    """
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:100]!r}: expected at most 100 letters, digits, '_', '-' and '.', beginning with a letter, a "
            "digit or '_'"
        )
    return value


def read(kind: type[T], body: bytes) -> T:
    """Parse a body as `kind`.

    Raises:
        UserError: a field is invalid. The message names the first one.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        error = e.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in error["loc"]) or "the body"
        raise UserError(f"{location[:100]}: {error['msg'][:200]}") from None
