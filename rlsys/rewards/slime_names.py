"""Modules with slime's names, for functions of slime that generate or score one response.

`install` registers the modules in `sys.modules`. They replace slime's modules even if slime is installed, because
slime sends requests to a server that rlsys does not have. Here `post` sends requests to the generator of the sample
(rlsys/generators/slime_generator.py).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from rlsys.core.errors import GeneratorError
from rlsys.data.tokenizer import Tokenizer

PENDING = "pending"
Answer = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""(path, body) of a request -> the engine's answer."""

conversations: dict[str, Answer] = {}
"""Host name of a sample's requests -> function that answers them. The generator adds and removes the entry."""


@dataclass
class Sample:
    """A response with the attributes of slime's Sample."""

    class Status(Enum):
        PENDING = PENDING
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    session_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    weight_versions: list[str] = field(default_factory=list)
    reward: Any = None
    remove_sample: bool = False
    multimodal_inputs: dict[str, Any] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0
    status: Status = Status.PENDING

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response. Same interface as slime.

        Args:
            args: ignored.
            tokens: token ids.
            log_probs: log-probs of the tokens; required for tokens of the model.
            trainable: whether the tokens are from the model, and not from a tool.
            meta_info: meta_info of SGLang's answer; its finish reason sets the status.
            text: text of the tokens.
            update_terminal_info: whether `meta_info` sets the status.

        Raises:
            ValueError: the numbers of tokens and log-probs differ.
        """
        ids = [int(t) for t in tokens or ()]
        if ids and trainable and log_probs is None:
            raise ValueError(
                f"log_probs = None for {len(ids)} tokens of the model: expected one log-prob per token"
            )
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(
                f"{len(log_probs)} log-probs for {len(ids)} tokens: expected one log-prob per token"
            )
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.response += text or ""
        self.tokens = [*self.tokens, *ids]
        self.response_length += len(ids)
        self.loss_mask += [int(trainable)] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids) if log_probs is None else map(float, log_probs)
        if meta_info and update_terminal_info and "finish_reason" in meta_info:
            self.status = STATUSES[meta_info["finish_reason"]["type"]]

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward


STATUSES = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}
"""SGLang's finish reason -> slime's status."""


class Options(SimpleNamespace):
    """The options of slime that have a counterpart in rlsys, and those that the config's parameters add."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args.{name}: this option of slime has no value in rlsys; set it by rollout.generator_params = "
            f"{{{name}: VALUE}}, or for a reward by its params"
        )


class HFTokenizer:
    """Tokenizer of a model folder, with the interface of transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_id

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        ids = self.encode(text, **options)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        text = self._tokenizer.decode([ids] if isinstance(ids, int) else ids)
        return self._tokenizer.without_special(text) if skip_special_tokens else text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:
        text = self._tokenizer.apply_chat(conversation, generate=add_generation_prompt, tools=tools)
        return self.encode(text) if tokenize else text


class GenerateState:
    """Replacement of slime's class of this name, which is a singleton there; here each instance is independent."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = None
        self.aborted = False  # functions do not see interruptions
        self.sampling_params = sampling_params(args)


_tokenizers: dict[str, HFTokenizer] = {}


def provide(tokenizer: Tokenizer) -> None:
    """Register a tokenizer, so that `load_tokenizer` of its folder returns it."""
    _tokenizers.setdefault(str(tokenizer.path), HFTokenizer(tokenizer))


def load_tokenizer(folder: str, **_: Any) -> HFTokenizer:
    """Return the tokenizer of a model folder, loaded once in a process."""
    if folder not in _tokenizers:
        _tokenizers[folder] = HFTokenizer(Tokenizer(folder))
    return _tokenizers[folder]


def sampling_params(args: Any) -> dict[str, Any]:
    """Return the sampling parameters that slime passes to a function with the options `args`."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Send a request to the run's engines, through the generator of the sample.

    Raises:
        GeneratorError: the URL has another host.
    """
    parts = urlsplit(url)
    answer = conversations.get(parts.hostname or "")
    if answer is None:
        raise GeneratorError(
            f"slime.utils.http_utils.post to {url}: expected "
            "http://{args.sglang_router_ip}:{args.sglang_router_port}/generate, the run's engines; for other "
            "servers, use another HTTP client"
        )
    return await answer(parts.path, payload)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


_MODULES: dict[str, dict[str, Any]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post},
    "slime.utils.processing_utils": {"load_tokenizer": load_tokenizer},
    "slime.rollout": {},
    "slime.rollout.sglang_rollout": {
        "GenerateState": GenerateState, "Sample": Sample, "post": post, "get_model_url": get_model_url,
    },
}  # fmt: skip


def install() -> None:
    """Register the modules, unless they are registered. Must be called before a plug-in is imported."""
    for name, members in _MODULES.items():
        if getattr(sys.modules.get(name), "stands_in_for_slime", False):
            continue
        module = ModuleType(name)
        vars(module).update(members, stands_in_for_slime=True, __path__=[])
        sys.modules[name] = module
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, module)
