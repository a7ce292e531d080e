"""Parse HTTP requests: the prompt ids, the seed and the sampling parameters of each requested response.

The router refuses parameters with which a response cannot continue from its tokens after an interruption: penalties,
which count the tokens of the response, and grammars, which have a state. It also refuses log-probs of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.agents.chat import read_conversation
from rlsys.engine_requests import ALIASES, Limits, RefusedPrompt, check_request
from rlsys.engine_requests.fields import Rule, not_served
from rlsys.engine_requests.requests import prompt_count
from rlsys.engine_requests.sampling import MAX_CHOICES, check_stop
from rlsys.gateway.served_model import ServedModel

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
GENERATE_TOKENS, COMPLETION_TOKENS = 128, 16
"""Default limits of a response, in tokens, as in SGLang. In a chat, the rest of the context is the default."""
KEY_IDS = 512
"""Number of ids at the start of a prompt by which requests with a common prefix are recognized."""
_SEED_BITS = 31
_LARGEST_SEED = 2**63 - 1
_FORWARDED = ("top_p", "top_k", "min_p", "logit_bias", "ignore_eos")
_PENALTIES = "after an interruption the engine would count the tokens of the response as part of the prompt"
_NOT_CONTINUED: Mapping[str, Rule] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), not_served(_PENALTIES, 0, 0.0)),
    "repetition_penalty": not_served(_PENALTIES, 1, 1.0),
    **dict.fromkeys(("min_new_tokens", "min_tokens"), not_served(_PENALTIES, 0)),
}
"""Rules of the parameters with which a response cannot continue after an interruption."""


@dataclass(frozen=True)
class GenerationRequest:
    """The request for one response.

    Attributes:
        prompt_ids: token ids of the prompt.
        seed: sampling seed.
        max_new_tokens: largest number of tokens of the response.
        temperature: sampling temperature.
        sampling: additional sampling parameters for the engine, by SGLang's names.
        stop_texts: texts that end the response.
        stop_ids: token ids that end the response.
        keep_stop: whether the text includes the stop text or the stop token.
        skip_special: whether the text omits special tokens.
        logprobs: whether the answer contains the log-prob of each token.
        top_logprobs: number of most probable tokens in the answer for each position.
        routes: whether the answer contains the routed experts.
        prompt: index of the prompt in the HTTP request.
        group: key that is equal for requests that should share an engine's cache.
    """

    prompt_ids: list[int]
    seed: int
    max_new_tokens: int
    temperature: float
    sampling: Mapping[str, Any]
    stop_texts: tuple[str, ...]
    stop_ids: frozenset[int]
    keep_stop: bool
    skip_special: bool
    logprobs: bool
    top_logprobs: int
    routes: bool
    prompt: int
    group: str


@dataclass(frozen=True)
class ApiRequest:
    """An HTTP request for responses.

    Attributes:
        path: GENERATE, COMPLETIONS or CHAT.
        body: the decoded body.
        generations: the requested responses.
        batch: whether the answer of /generate is a list.
        tools: schemas of the functions that the model may call in a chat.
    """

    path: str
    body: Mapping[str, Any]
    generations: list[GenerationRequest]
    batch: bool = False
    tools: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def stream(self) -> bool:
        """Whether the client requests a stream of events."""
        return self.body.get("stream") is True


def sample_count(body: Mapping[str, Any]) -> int:
    """Return the number of requested responses: prompts times `n`. An invalid `n` counts as 1."""
    prompts = prompt_count(body) or 1
    sampling = body.get("sampling_params")
    params = [body, *(sampling if isinstance(sampling, list) else [sampling])]
    choices = [p.get(name) for p in params if isinstance(p, Mapping) for name in ("n", "best_of")]
    return prompts * max((c for c in choices if type(c) is int and 0 < c <= MAX_CHOICES), default=1)


def read_request(path: str, body: Mapping[str, Any], limits: Limits, model: ServedModel) -> ApiRequest:
    """Parse and validate a request.

    Raises:
        RefusedPrompt: a field is unknown, out of range or not supported, or the prompt is too long.
        BadRequest: a message of a chat is malformed.
    """
    check_request(limits, path, body)
    if path == GENERATE:
        return _read_generate(body, limits, model)
    sampling = {ALIASES.get(name, name): value for name, value in body.items() if value is not None}
    sampling = {**model.sampling_defaults, **sampling}
    if limits.deterministic and body.get("min_p") is None:
        sampling["min_p"] = 0
    tools: list[Mapping[str, Any]] = []
    if path == CHAT:
        prompt, tools = _read_chat(body, model)
        prompts = [prompt]
        logprobs = body.get("logprobs") is True
        top_logprobs = body.get("top_logprobs") or 0 if logprobs else 0
        default_tokens = limits.max_tokens
    else:
        prompts = _read_completion_prompts(body, model)
        logprobs = body.get("logprobs") is not None
        top_logprobs = body.get("logprobs") or 0
        default_tokens = COMPLETION_TOKENS
    generations = []
    seeds = _seeds(body.get("seed"))
    for number, ids in enumerate(prompts):
        limits.check_prompt(ids)
        for _ in range(int(body.get("n") or 1)):
            row = {"max_new_tokens": default_tokens, **sampling, "sampling_seed": next(seeds)}
            generations.append(_generation(row, ids, number, body, model, logprobs, top_logprobs))
    return ApiRequest(path, body, generations, tools=tools)


def _read_chat(body: Mapping[str, Any], model: ServedModel) -> tuple[list[int], list[Mapping[str, Any]]]:
    """Return the prompt ids of a chat, and the schemas of the functions that the model may call.

    Raises:
        RefusedPrompt: the router has no tokenizer, or the chat template refuses the messages.
        BadRequest: a message is malformed.
    """
    messages, tools = read_conversation(body)
    if body.get("tool_choice") == "none":
        tools = []
    model.require_tokenizer("messages")
    chat_args = dict(body.get("chat_template_kwargs") or {})
    if body.get("reasoning_effort") is not None:
        chat_args["reasoning_effort"] = body["reasoning_effort"]
    try:
        return model.rendering.prompt(messages, tools, chat_args), tools
    except ValueError as e:
        raise RefusedPrompt(f"messages: {e}", "messages") from None


def _read_completion_prompts(body: Mapping[str, Any], model: ServedModel) -> list[list[int]]:
    """Return the ids of each prompt of a request for completions.

    Raises:
        RefusedPrompt: there is no prompt, it cannot be encoded, or best_of differs from n.
    """
    if body.get("prompt") is None:
        raise RefusedPrompt("prompt: expected text or token ids", "prompt")
    prompts = [_prompt_ids(prompt, "prompt", model) for prompt in _prompts(body, "prompt")]
    n = body.get("n") or 1
    if body.get("best_of") not in (None, n):
        raise RefusedPrompt(
            f"best_of = {body['best_of']}: not served: expected {n}, the value of n", "best_of"
        )
    return prompts


def _read_generate(body: Mapping[str, Any], limits: Limits, model: ServedModel) -> ApiRequest:
    """Parse a validated request of /generate, SGLang's own API, in which each prompt may have its own parameters.

    Raises:
        RefusedPrompt: a prompt is too long, or the log-probs of its tokens are requested.
    """
    name = "text" if body.get("input_ids") is None else "input_ids"
    prompts = [_prompt_ids(prompt, name, model) for prompt in _prompts(body, name)]
    rows = body.get("sampling_params") or {}
    rows = [dict(row) for row in rows] if isinstance(rows, list) else [dict(rows)] * len(prompts)
    generations = []
    for number, (ids, row) in enumerate(zip(prompts, rows, strict=True)):
        limits.check_prompt(ids)
        start = _value_of_prompt(body, "logprob_start_len", number)
        logprobs = bool(_value_of_prompt(body, "return_logprob", number))
        if logprobs and start is not None and 0 <= start < len(ids):
            raise RefusedPrompt(
                f"logprob_start_len = {start}: log-probs of prompts are not served; expected -1",
                "logprob_start_len",
            )
        top_logprobs = (_value_of_prompt(body, "top_logprobs_num", number) or 0) if logprobs else 0
        seeds = _seeds(row.get("sampling_seed"))
        for _ in range(int(row.get("n") or 1)):
            seeded_row = {**row, "sampling_seed": next(seeds)}
            generations.append(_generation(seeded_row, ids, number, body, model, logprobs, top_logprobs))
    return ApiRequest(
        GENERATE, body, generations, batch=prompt_count(body) is not None or len(generations) > 1
    )


def _generation(
    sampling: Mapping[str, Any],
    ids: list[int],
    prompt: int,
    body: Mapping[str, Any],
    model: ServedModel,
    logprobs: bool,
    top_logprobs: int,
) -> GenerationRequest:
    """Create the request for one response.

    Args:
        sampling: sampling parameters of the response, by SGLang's names.
        ids: token ids of the prompt.
        prompt: index of the prompt in the HTTP request.
        body: body of the HTTP request.
        model: the engines' model.
        logprobs: whether the answer contains the log-prob of each token.
        top_logprobs: number of most probable tokens in the answer for each position.

    Raises:
        RefusedPrompt: the response could not continue after an interruption, or the model lacks something it needs.
    """
    params = {name: value for name, value in sampling.items() if value is not None}
    for name, rule in _NOT_CONTINUED.items():
        if name in params:
            rule(Limits(1, 1), name, params[name])
    stop_texts = check_stop(params.get("stop"))
    if stop_texts:
        model.require_tokenizer("stop")
    if body.get("return_routed_experts") is True and not model.experts_per_token:
        raise RefusedPrompt(
            "return_routed_experts = True: not supported, because the router cannot read num_hidden_layers and "
            "num_experts_per_tok in the model's config.json",
            "return_routed_experts",
        )
    ignores_ends = params.get("ignore_eos") is True
    limit = params.get("max_new_tokens")
    return GenerationRequest(
        prompt_ids=ids,
        seed=params["sampling_seed"],
        max_new_tokens=GENERATE_TOKENS if limit is None else limit,
        temperature=float(params.get("temperature", 1.0)),
        sampling={name: params[name] for name in _FORWARDED if name in params},
        stop_texts=stop_texts,
        stop_ids=frozenset() if ignores_ends else model.stop_ids | {*params.get("stop_token_ids", ())},
        keep_stop=params.get("no_stop_trim") is True,
        skip_special=params.get("skip_special_tokens") is not False,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        routes=body.get("return_routed_experts") is True,
        prompt=prompt,
        group=_group(body, ids),
    )


def _group(body: Mapping[str, Any], ids: list[int]) -> str:
    """Return a key that is equal for requests of one session, or with the same first KEY_IDS ids of the prompt."""
    for name in ("session_id", "routing_key", "conversation_id"):
        if isinstance(body.get(name), str):
            return str(body[name])
    return str(ids[:KEY_IDS])


def _prompts(body: Mapping[str, Any], name: str) -> list[Any]:
    return [body[name]] if prompt_count(body) is None else list(body[name])


def _prompt_ids(prompt: Any, name: str, model: ServedModel) -> list[int]:
    return model.encode(prompt, name) if isinstance(prompt, str) else prompt


def _value_of_prompt(body: Mapping[str, Any], name: str, number: int) -> Any:
    """Return the value of a field, which may be a list with one value per prompt, for the prompt `number`."""
    value = body.get(name)
    return value[number] if isinstance(value, list) else value


def _seeds(seed: int | None) -> Iterator[int]:
    """Yield a seed for each response: `seed` and the following integers, or random numbers if `seed` is None.

    The seeds differ, because a deterministic engine generates equal responses from equal seeds.
    """
    if seed is None:
        while True:
            yield random.getrandbits(_SEED_BITS)
    while True:
        yield seed
        seed = seed + 1 if seed < _LARGEST_SEED else -_LARGEST_SEED
