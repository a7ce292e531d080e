"""Rules for the requests of SGLang's /generate and of OpenAI's two APIs, as SGLang 0.5.23 parses them.

Fields without a rule are refused, such as those of disaggregated serving, of sessions in an engine, of images and of
embeddings: engines of rlsys do not support them, and some of them end SGLang's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.engine_requests.fields import (
    Rule,
    any_of,
    check_fields,
    flag,
    inert,
    json_value,
    most_probable,
    not_served,
    number,
    refuse,
    short,
    text,
    unknown,
)
from rlsys.engine_requests.limits import Limits, RefusedPrompt
from rlsys.engine_requests.sampling import (
    ALIASES,
    MAX_CHOICES,
    NO_GRAMMAR,
    SAMPLING,
    check_sampling,
    check_together,
)

_INT32 = 2**31 - 1
_NO_MEDIA = "the model reads text only"
_NO_SESSION = "each request must contain its whole prompt"
_NO_PROCESSOR = "a logit processor is code, which clients must not send"
_NO_ADAPTER = "the engines' model is served, without adapters"


def _model(limits: Limits, name: str, value: Any) -> None:
    """Check the name of a model. A colon is refused, because SGLang's `model:adapter` selects an adapter."""
    text(limits, name, value)
    if ":" in value:
        raise refuse(name, value, f"a name without ':': {_NO_ADAPTER}")


def _start(limits: Limits, name: str, value: Any) -> None:
    """Check the first position with log-probs; -1: the first position of the response."""
    number(-1, limits.context_length, integer=True)(limits, name, value)


def _ids(limits: Limits, name: str, value: Any) -> None:
    """Accept any value: `check_request` checks prompts and sampling parameters."""


_TEMPLATE_SWITCHES: Mapping[str, Rule] = dict.fromkeys(
    (
        "enable_thinking", "thinking", "thinking_mode", "reasoning_effort", "preserve_thinking", "clear_thinking",
        "keep_all_reasoning", "date_string", "model_identity", "xml_tools",
    ),
    any_of(flag, text, number(-_INT32, _INT32)),
)  # fmt: skip
"""Rules for variables of published chat templates. Other names could replace arguments of the tokenizer."""


def _template_switches(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    check_fields(limits, value, _TEMPLATE_SWITCHES, f"{name}.")


def _stream_options(limits: Limits, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    check_fields(limits, value, {"include_usage": flag, "continuous_usage_stats": flag}, f"{name}.")


_FOR_ROUTING: Mapping[str, Rule] = dict.fromkeys(("session_id", "routing_key", "conversation_id"), text)
"""Rules for fields that assign a request to a group, for routing."""

INERT = frozenset(
    {
        "rid", "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "no_logs", "log_metrics", "custom_labels", "priority",
    }
)  # fmt: skip
"""Fields without effect on sampling. Engines do not get them."""

_NOT_SERVED: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("input_embeds", "image_data", "audio_data", "video_data"), not_served(_NO_MEDIA, [], "")
    ),
    "modalities": not_served(_NO_MEDIA, [], ["text"]),
    "session_params": not_served(_NO_SESSION, {}),
    "custom_logit_processor": not_served(_NO_PROCESSOR, ""),
    "return_hidden_states": not_served("engines return no hidden states", False),
    "return_sampling_mask": not_served("only samples of a run have sampling masks", False),
    "sampling_logprobs_mode": not_served("only samples of a run have sampling masks"),
    "lora_path": not_served(_NO_ADAPTER, ""),
    **dict.fromkeys(("extra_key", "cache_salt"), not_served("all requests share the engines' caches", "")),
    "custom_params": SAMPLING["custom_params"],
    "watermark": SAMPLING["watermark"],
}
"""Rules for fields of SGLang that are not supported."""

_PER_PROMPT: Mapping[str, Rule] = {
    "return_logprob": flag,
    "logprob_start_len": _start,
    "top_logprobs_num": most_probable,
}
"""Rules for fields of /generate with one value for all prompts, or a list of one value per prompt."""

GENERATE: Mapping[str, Rule] = {
    **_FOR_ROUTING,
    **_NOT_SERVED,
    **_PER_PROMPT,
    **dict.fromkeys(INERT, inert),
    "input_ids": _ids,
    "text": _ids,
    "sampling_params": _ids,
    "stream": flag,
    "return_routed_experts": flag,
    "routed_experts_start_len": not_served("the routes of the whole sequence are returned", 0),
    "return_text_in_logprobs": flag,
    "return_prompt_token_ids": flag,
    "return_entropy": not_served("engines return no entropy", False),
    "token_ids_logprob": not_served("log-probs are those of the sampled and the most probable tokens", []),
}

_OPENAI: Mapping[str, Rule] = {
    **_FOR_ROUTING,
    **_NOT_SERVED,
    **dict.fromkeys(INERT, inert),
    **{
        name: SAMPLING[ALIASES.get(name, name)]
        for name in (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "n", "seed", "stop", "stop_token_ids", "stop_regex", "regex", "ebnf", "logit_bias", "ignore_eos",
            "skip_special_tokens", "no_stop_trim", "min_tokens",
        )
    },
    "max_tokens": number(1, _INT32, integer=True),
    "model": _model,
    "stream": flag,
    "stream_options": _stream_options,
    "response_format": not_served(NO_GRAMMAR, {"type": "text"}),
    **dict.fromkeys(
        ("return_cached_tokens_details", "return_token_ids", "return_routed_experts"),
        not_served("/generate returns token ids, routed experts and the number of cached tokens", False),
    ),
}  # fmt: skip

COMPLETIONS: Mapping[str, Rule] = {
    **_OPENAI,
    "prompt": _ids,
    "best_of": number(1, MAX_CHOICES, integer=True),
    "echo": not_served("the prompt is not returned", False),
    "logprobs": most_probable,
    "suffix": not_served("a response is not inserted before a text", ""),
    "json_schema": SAMPLING["json_schema"],
}

CHAT: Mapping[str, Rule] = {
    **_OPENAI,
    "messages": json_value(list, "a list of messages"),
    "tools": json_value(list, "a list of functions"),
    "tool_choice": not_served(NO_GRAMMAR, "auto", "none"),
    "parallel_tool_calls": not_served(NO_GRAMMAR, True),
    "max_completion_tokens": number(1, _INT32, integer=True),
    "logprobs": flag,
    "top_logprobs": most_probable,
    "reasoning_effort": any_of(text, number(0, 0.99)),
    "chat_template_kwargs": _template_switches,
    "continue_final_message": not_served("a response begins a new turn", False),
    "separate_reasoning": flag,
    "stream_reasoning": flag,
    **dict.fromkeys(
        ("return_prompt_token_ids", "return_meta_info"), not_served("/generate returns them", False)
    ),
    "verbosity": inert,
    "functions": not_served("use tools", []),
    "function_call": not_served("use tool_choice"),
    "audio": not_served(_NO_MEDIA),
    "prediction": not_served("predicted outputs are not used"),
    "web_search_options": not_served("there is no web search"),
}

API_FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "/generate": GENERATE,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
}
"""Path -> rules for the fields of a request to it."""

_ANY_API: Mapping[str, Rule] = {**CHAT, **COMPLETIONS, **GENERATE}


def check_request(limits: Limits, path: str, body: Mapping[str, Any]) -> None:
    """Check a request. The engine itself checks the length of prompts that are texts, and also responds with 400.

    Args:
        limits: limits of the model and the engines.
        path: a key of API_FIELDS.
        body: the decoded body.

    Raises:
        RefusedPrompt: the request must not reach an engine.
    """
    for ids in _prompts_of_ids(body):
        limits.check_prompt(ids)
    for name in ("text", "prompt"):
        _check_texts(name, body.get(name))
    fields = API_FIELDS[path]
    _check_values(limits, body, {**_ANY_API, **fields}, prompt_count(body))
    if path == "/generate" and (body.get("text") is None) == (body.get("input_ids") is None):
        raise RefusedPrompt("text, input_ids: expected one of them", "input_ids")
    for name, value in body.items():
        if name not in fields:
            raise unknown(name, fields)
        if isinstance(value, list) and path != "/generate" and name in _PER_PROMPT:
            raise refuse(name, value, "one value")


def _check_values(
    limits: Limits, body: Mapping[str, Any], rules: Mapping[str, Rule], prompts: int | None
) -> None:
    """Check the values of all known fields, also of fields that belong to another API.

    Call it before the check of field names, because the message about a wrong value is more helpful.

    Args:
        rules: field -> rule.
        prompts: see prompt_count.
    """
    for name, value in body.items():
        if value is None or name not in rules or name == "sampling_params":
            continue
        is_per_prompt = isinstance(value, list) and name in _PER_PROMPT
        if not is_per_prompt:
            rules[name](limits, name, value)
            continue
        for item in value:
            if item is not None:
                rules[name](limits, name, item)
        _check_length(name, value, prompts)
    if body.get("sampling_params") is not None:
        _check_sampling_params(limits, body["sampling_params"], prompts)
    check_together({ALIASES.get(name, name): value for name, value in body.items()})


def _check_sampling_params(limits: Limits, value: Any, prompts: int | None) -> None:
    """Check sampling_params: one object for all prompts, or a list of one object per prompt."""
    choices = set()
    for params in value if isinstance(value, list) else [value]:
        if not isinstance(params, Mapping):
            raise RefusedPrompt(
                f"sampling_params = {str(params)[:80]!r}: expected an object", "sampling_params"
            )
        check_sampling(limits, params)
        choices.add(params.get("n") or 1)
    if isinstance(value, list):
        _check_length("sampling_params", value, prompts)
    if len(choices) > 1:
        raise RefusedPrompt(
            f"sampling_params: n = {', '.join(map(str, sorted(choices)))}; expected the same n for all prompts",
            "sampling_params",
        )


def _check_length(name: str, values: list[Any], prompts: int | None) -> None:
    """Check that a list has one value for each prompt. `prompts`: see prompt_count."""
    if prompts is None:
        raise RefusedPrompt(
            f"{name}: a list; expected one value, because the request has a single prompt", name
        )
    if len(values) != prompts:
        raise RefusedPrompt(f"{name}: {len(values)} values; expected {prompts}, one for each prompt", name)


def prompt_count(body: Mapping[str, Any]) -> int | None:
    """Return the number of prompts of a request with a list of prompts; None for a single prompt."""
    for name in ("input_ids", "text", "prompt"):
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            return len(value)
    return None


def _check_texts(name: str, value: Any) -> None:
    """Check the value of field `text` or `prompt`, except for token ids."""
    if value == "" or (isinstance(value, list) and (not value or "" in value)):
        raise RefusedPrompt("the prompt is empty", name)  # a prompt without tokens kills SGLang's scheduler
    if name == "text" and value is not None:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise refuse(name, value, "text, or a list of texts")
    if name == "prompt" and value is not None and not isinstance(value, str | list):
        raise refuse(name, value, "text, token ids, or a list of either")


def _prompts_of_ids(body: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield every prompt that a request has as token ids."""
    for name in ("input_ids", "prompt"):
        value = body.get(name)
        if not isinstance(value, list):
            if name == "input_ids" and value is not None:
                raise refuse(name, value, "whole numbers")
            continue
        if name == "prompt" and value and all(isinstance(item, str) for item in value):
            continue  # a list of texts
        rows = value if any(isinstance(row, list) for row in value) else [value]
        for row in rows:
            if not isinstance(row, list):
                raise RefusedPrompt(
                    f"{name} has {short(row)} among lists; expected lists of whole numbers", name
                )
            invalid = [item for item in row if type(item) is not int]
            if invalid:
                raise RefusedPrompt(f"{name} has {short(invalid[0])}; expected whole numbers", name)
            yield row
