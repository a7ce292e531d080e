"""Invalid requests to the three APIs of an engine: each field with each invalid value. Every request must be refused.

Tests send the table to the request validation alone, to the gateway with small servers, to the Tinker server, and to
a real engine behind the router. `edge_requests` are valid for the validation and have values at the limits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 100
PROMPT = [4, 12, 13, 14, 5]
QUESTION = [{"role": "user", "content": "3+4="}]
FEW = 3
"""Number of tokens that a request asks for."""


@dataclass(frozen=True)
class OddRequest:
    """A request whose `field` has the invalid `value`. `raw`: the request body."""

    path: str
    field: str
    value: Any
    raw: bytes

    @property
    def name(self) -> str:
        return f"{self.path} {self.field} = {str(self.value)[:40]}"


class Raw(str):
    """JSON text of a value that json.dumps cannot write: NaN, 1e999, thousands of digits."""


NO_NUMBERS: Sequence[Any] = ("1", [], {}, True)
NO_JSON: Sequence[Any] = (Raw("NaN"), Raw("-Infinity"), Raw("1e999"))
TOO_LARGE: Sequence[Any] = (2**31, 2**63, 2**64, Raw("9" * 400), Raw("9" * 5000))
NO_WHOLE: Sequence[Any] = (0.5, 1e308)
NO_FLAGS: Sequence[Any] = (1, "true", [True], {})
NO_TEXTS: Sequence[Any] = (5, True, {"a": 1}, [1], ["a", None])
NO_OBJECTS: Sequence[Any] = (5, "x", [1], True)
NO_IDS: Sequence[Any] = (
    5,
    "5",
    [-1],
    [VOCABULARY + 40],
    [2**40],
    [2**70],
    ["5"],
    [1.5],
    [True],
    {"5": 1},
    [5] * 5000,
)
DEEP = Raw('{"a":' * 500 + "1" + "}" * 500)

SAMPLING: Mapping[str, Sequence[Any]] = {
    "temperature": (*NO_NUMBERS, *NO_JSON, -1, -1e-9, 1e308, 2**64),
    "top_p": (*NO_NUMBERS, *NO_JSON, 0, -0.1, 1.0001, 2**64),
    "top_k": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, 0, -2, 2**62),
    "min_p": (*NO_NUMBERS, *NO_JSON, 0.1, 1, -0.1, 2),
    "frequency_penalty": (*NO_NUMBERS, *NO_JSON, 2.1, -2.1, 0.5),
    "presence_penalty": (*NO_NUMBERS, *NO_JSON, 1e39, -1e39, -2),
    "repetition_penalty": (*NO_NUMBERS, *NO_JSON, 0, 1e-300, -1, 2.1, 1.1),
    "max_new_tokens": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, -1),
    "min_new_tokens": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, -1, FEW, FEW + 1),
    "n": (*NO_NUMBERS, *NO_WHOLE, 0, -1, 129, 2**31, 2**63),
    "sampling_seed": (*NO_NUMBERS, *NO_WHOLE, 2**63, -(2**63) - 1, Raw("9" * 5000)),
    "stop": (*NO_TEXTS, "", [""], ["a", ""], ["a"] * 33, "x" * 1025),
    "stop_token_ids": NO_IDS,
    "stop_regex": ("a", "(a+)+b", ["a"], "(", 5, {"a": 1}),
    "regex": ("a", "(a|b)+", "(", 5, ["a"]),
    "ebnf": ('root ::= root "a" | "b"', "root ::= root", 5),
    "structural_tag": ("{}", '{"format": 5}', 5),
    "json_schema": (
        5, {"type": "object"}, "{", "{}", '{"type": "object"}', '{"items":' * 500 + "{}" + "}" * 500, "x" * 100_000,
    ),
    "logit_bias": (
        5, "x", [1], True, {"-1": 1}, {str(VOCABULARY + 40): 1}, {"9" * 5000: 1}, {"x": 1}, {"5": "1"}, {"5": True},
        {"5": 1e308}, {"5": 100.5}, {"5": None}, Raw('{"5": NaN}'), Raw('{"5": 1e999}'),
    ),
    "ignore_eos": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "no_stop_trim": NO_FLAGS,
    "spaces_between_special_tokens": NO_FLAGS,
    "stream_interval": (*NO_NUMBERS, 0, -1, 1.5, 2**63),
    "beam_width": (2, 0, -1, "x", 2**40),
    "custom_params": (5, "x", [1], {"thinking_budget": -1}, {"a": {"b": 1}}, DEEP),
    "watermark": (True, {"enabled": True}, 5),
    "is_normalized": (True, 5),
    "stop_strs": (5, ["a"]),
    "no_such_parameter": (1, None, {}),
}  # fmt: skip
"""Invalid sampling parameters, by SGLang's names."""

GENERATE: Mapping[str, Sequence[Any]] = {
    "input_ids": (
        5, "abc", {"a": 1}, [], [[]], [1.5], [True], [-1], [VOCABULARY + 40], [2**40], [2**70], [[1], 2], [[1], None],
        [[1], [-1]], [[[1]]], [5] * 5000,
    ),
    "text": ("", [""], ["a", ""], [], 5, [1], {"a": 1}, "a"),
    "sampling_params": (3, "x", [], [{}], [3], [None], True, DEEP),
    "return_logprob": (*NO_FLAGS, [True, False]),
    "logprob_start_len": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, -9, -2, [0], [0, 0], [-9]),
    "top_logprobs_num": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, -1, VOCABULARY + 40, [2], [2, 2]),
    "token_ids_logprob": (*NO_IDS, [1], [[1], [2]]),
    "stream": NO_FLAGS,
    "return_routed_experts": NO_FLAGS,
    "routed_experts_start_len": (*NO_NUMBERS, -1, 2**63, 1.5, 2),
    "return_hidden_states": (True, "last", "full", [True], 5),
    "return_sampling_mask": (1, "x", [True], True),
    "sampling_logprobs_mode": ("x", 5, True, "support"),
    "lora_path": (5, ["a"], [None], {"a": 1}, True),
    "session_params": ({"id": "x"}, {"foo": 1}, 5, "x"),
    "custom_logit_processor": ("x", "gASVAAAA", ["x"], 5),
    "image_data": ("http://127.0.0.1:1/x.png", ["x"], [[5]], {"a": 1}),
    "audio_data": ("x", ["x"]),
    "video_data": ("x", [5]),
    "input_embeds": ([[0.1]], [[]], 5),
    "bootstrap_host": ("127.0.0.1", 5),
    "bootstrap_port": (1, -1, 2**40),
    "bootstrap_room": (1, -1, 2**63),
    "data_parallel_rank": (0, -1, 2**40),
    "routed_dp_rank": (0, -1),
    "positional_embed_overrides": (5, {"a": 1}),
    "kv_hints": ({"a": 1}, 5),
    "multi_item_delimiter_indices": ([1], [[1]], [2**40]),
    "token_indices_to_pool": ([1], [-1]),
    "max_thinking_tokens": (5, -1),
    "background": (True,),
    "http_worker_ipc": ("ipc:///nowhere",),
    "external_trace_header": ({"a": "b"},),
    "extra_key": (5, ["a"], {"a": 1}, "x"),
    "cache_salt": (5, ["a"], "a"),
    "session_id": (5, [1]),
    "no_such_field": (1, None),
}  # fmt: skip

CHAT: Mapping[str, Sequence[Any]] = {
    **{
        {"sampling_seed": "seed", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}.get(name, name): odd
        for name, odd in SAMPLING.items()
        if name not in ("json_schema", "structural_tag", "stream_interval", "spaces_between_special_tokens")
    },
    "max_completion_tokens": (*NO_NUMBERS, *NO_WHOLE, *TOO_LARGE, -1, 0),
    "messages": (
        5, "x", {"a": 1}, True, [], [5], [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1"}}]}],
    ),
    "logprobs": (5, "x", [True]),
    "top_logprobs": (*NO_NUMBERS, -1, VOCABULARY + 40, 2**63),
    "response_format": (
        "x", [1], 5, {"type": "x"}, {"type": 5}, {}, {"type": "json_schema", "schema": 5},
        {"type": "json_schema", "json_schema": "x"}, {"type": "structural_tag", "format": 5},
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
    ),
    "tools": (5, "x", {"a": 1}, [DEEP], [5]),
    "tool_choice": (5, "x", [1], True, "required", {"type": "function", "function": {"name": "x"}}),
    "chat_template_kwargs": (
        5, "x", [1], {"chat_template": "{{ 1 }}"}, {"tokenize": False}, {"add_generation_prompt": False},
        {"enable_thinking": {"a": 1}}, {"conversation": 5},
    ),
    "model": (5, [1], {"a": 1}, "a:b"),
    "lora_path": (5, ["a"], [None]),
    "session_params": ({"id": "x"}, 5),
    "custom_logit_processor": ("x", ["x"]),
    "return_hidden_states": (True, "last"),
    "stream_options": (5, "x", [1], {"include_usage": "x"}, {"x": True}),
    "bootstrap_room": (1, 2**63),
    "data_parallel_rank": (0, -1),
    "input_ids": ([-1], [2**40], 5, []),
    "no_such_field": (1, None),
}  # fmt: skip

COMPLETIONS: Mapping[str, Sequence[Any]] = {
    **{name: odd for name, odd in CHAT.items() if name in ("top_k", "min_p", "seed", "max_tokens", "stop", "n")},
    "prompt": ("", [""], [], [[]], 5, {"a": 1}, ["a", [1]], [1, "a"], [-1], [VOCABULARY + 40], [2**40], [5] * 5000),
    "logprobs": (*NO_NUMBERS, -1, VOCABULARY + 40, 2**63),
    "echo": (*NO_FLAGS, True),
    "best_of": (*NO_NUMBERS, 0, 129, 2),
    "suffix": ("x", 5),
    "stop_regex": ("a", "(a+)+b"),
    "json_schema": ("{", 5),
    "response_format": ("x", {"type": "x"}),
    "no_such_field": (1,),
}  # fmt: skip


EDGES: Mapping[str, Sequence[Any]] = {
    "temperature": (0, 1e-300, 1e-7, 1.1e-6, 100),
    "top_p": (1e-300, 1),
    "top_k": (-1, 1, 2**31 - 1, 2**30),
    "min_p": (0, 0.0, None),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "max_new_tokens": (0, 2**31 - 1, None),
    "min_new_tokens": (0,),
    "n": (1, 5, None),
    "sampling_seed": (0, -1, 2**63 - 1, -(2**63), 2**32, None),
    "stop": ([], ["x" * 1024] * 32, "\u0000", "\U0001f600", " ", None),
    "stop_token_ids": ([], [5] * 1024, [0, VOCABULARY - 1]),
    "json_schema": ("",),
    "stop_regex": ("", []),
    "logit_bias": ({}, {str(i): -100 for i in range(VOCABULARY)}, {str(i): 100 for i in range(VOCABULARY)}),
    "ignore_eos": (True, False),
    "skip_special_tokens": (False,),
    "no_stop_trim": (True,),
    "stream_interval": (1, 2**31 - 1),
    "custom_params": ({}, None),
}  # fmt: skip
"""Sampling parameters at the limits of their ranges, which the validation passes to the engine."""

GENERATE_EDGES: Sequence[Mapping[str, Any]] = (
    {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": VOCABULARY, "token_ids_logprob": []},
    {"return_logprob": True, "logprob_start_len": len(PROMPT)},
    {"return_logprob": True, "logprob_start_len": len(PROMPT) + 1},
    {"return_logprob": False, "logprob_start_len": 3, "top_logprobs_num": 5},
    {"token_ids_logprob": [], "return_logprob": True},
    {"return_sampling_mask": False, "sampling_params": {"top_k": 5, "max_new_tokens": FEW}},
    {"return_routed_experts": True, "routed_experts_start_len": 0}, {"return_logprob": True, "stream": True},
    {"lora_path": ""}, {"extra_key": "", "cache_salt": None}, {"rid": ["a"]}, {"rid": 5},
    {"priority": 2**70}, {"session_id": "a", "routing_key": "b"}, {"return_hidden_states": False},
    {"return_text_in_logprobs": True, "return_prompt_token_ids": True, "return_entropy": False},
    {"image_data": [], "session_params": {}, "custom_logit_processor": ""},
    {"input_ids": [PROMPT, [1]], "return_logprob": [True, False], "logprob_start_len": [-1, 0]},
    {"input_ids": [PROMPT, [1]], "top_logprobs_num": [1, 2], "return_logprob": True},
    {"input_ids": [PROMPT, [1]], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]},
    {"input_ids": [PROMPT, [1]], "sampling_params": {"n": 3, "max_new_tokens": 2}},
    {"input_ids": [[1]] * 64, "stream": True},
    {"stream": True, "sampling_params": {"n": 4, "max_new_tokens": 2}},
    {"input_ids": [5] * 490},
)  # fmt: skip

CHAT_EDGES: Sequence[Mapping[str, Any]] = (
    {"n": 4}, {"n": 3, "stream": True, "stream_options": {"include_usage": True}},
    {"logprobs": True, "top_logprobs": 5},
    {"max_tokens": 2**31 - 1}, {"min_tokens": 0}, {"model": "a/b"}, {"response_format": {"type": "text"}},
    {"tools": [], "tool_choice": "none"}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "3"}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{"}}]}]},
    {"messages": [{"role": "user", "content": "1"}] * 1000},
    {"continue_final_message": False}, {"reasoning_effort": "high"}, {"reasoning_effort": "x"}, {"user": 5},
    {"temperature": None, "top_p": None}, {"return_meta_info": False, "return_token_ids": False},
)  # fmt: skip

COMPLETION_EDGES: Sequence[Mapping[str, Any]] = (
    {"echo": False, "logprobs": 2}, {"logprobs": VOCABULARY}, {"n": 3, "best_of": 3}, {"prompt": ["a", "b"], "n": 2},
    {"prompt": [[1], [2]], "stream": True}, {"max_tokens": 2**31 - 1}, {"temperature": None}, {"prompt": "\u0000"},
    {"prompt": "\U0001f600"}, {"prompt": "1" * 490}, {"prompt": "1" * 5000}, {"json_schema": ""},
)  # fmt: skip


def edge_requests() -> list[OddRequest]:
    """Return requests that the validation accepts; the engine answers or refuses them."""
    sampling = {"max_new_tokens": FEW}
    requests = [
        _odd("/generate", name, value, {"input_ids": PROMPT}, sampling)
        for name, values in EDGES.items()
        for value in values
    ]
    for path, plain, changes in (
        ("/generate", {"input_ids": PROMPT, "sampling_params": sampling}, GENERATE_EDGES),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": FEW}, CHAT_EDGES),
        ("/v1/completions", {"prompt": "3+4=", "max_tokens": FEW}, COMPLETION_EDGES),
    ):
        for change in changes:
            raw = json.dumps({**plain, **change}).encode()
            requests.append(OddRequest(path, ", ".join(change), str(change)[:60], raw))
    return requests


def odd_requests() -> list[OddRequest]:
    """Return the invalid requests of all fields and values."""
    sampling = {"max_new_tokens": FEW}
    requests = [
        _odd("/generate", name, value, {"input_ids": PROMPT}, sampling)
        for name, values in SAMPLING.items()
        for value in values
    ]
    requests += [
        _odd("/generate", name, value, {"input_ids": PROMPT, "sampling_params": sampling})
        for name, values in GENERATE.items()
        for value in values
    ]
    for path, table, plain in (
        ("/v1/chat/completions", CHAT, {"messages": QUESTION, "max_tokens": FEW}),
        ("/v1/completions", COMPLETIONS, {"prompt": "3+4=", "max_tokens": FEW}),
    ):
        requests += [_odd(path, name, value, plain) for name, values in table.items() for value in values]
    return requests


def subset(requests: Sequence[OddRequest], limit: int) -> list[OddRequest]:
    """Return a deterministic subset of about `limit` requests, with at least one of every field."""
    stride = max(1, len(requests) // limit)
    first = {(r.path, r.field): i for i, r in reversed(list(enumerate(requests)))}
    chosen = {*first.values(), *range(0, len(requests), stride)}
    return [requests[i] for i in sorted(chosen)]


def random_requests(count: int, seed: int) -> list[OddRequest]:
    """Return requests that combine several invalid or extreme values, half of them with corrupted bytes."""
    rng = random.Random(seed)
    tables = {
        "/generate": (GENERATE, {"input_ids": PROMPT}),
        "/v1/chat/completions": (CHAT, {"messages": QUESTION, "max_tokens": FEW}),
        "/v1/completions": (COMPLETIONS, {"prompt": "3+4=", "max_tokens": FEW}),
    }
    requests = []
    for number in range(count):
        path = rng.choice(sorted(tables))
        table, plain = tables[path]
        body: dict[str, Any] = dict(plain)
        if path == "/generate":
            sampling: dict[str, Any] = {"max_new_tokens": FEW}
            for name in rng.sample(sorted(EDGES), rng.randint(0, 4)):
                sampling[name] = rng.choice(EDGES[name])
            for name in rng.sample(sorted(SAMPLING), rng.randint(0, 1)):
                sampling[name] = rng.choice(SAMPLING[name])
            body["sampling_params"] = Raw(_json(sampling))
        for name in rng.sample(sorted(table), rng.randint(0, 2)):
            body[name] = rng.choice(table[name])
        raw = _json(body).encode()
        if number % 2:
            raw = _damaged(raw, rng)
        requests.append(OddRequest(path, f"random {number}", "", raw))
    return requests


def _damaged(raw: bytes, rng: random.Random) -> bytes:
    """Truncate, overwrite, repeat or re-encode a body."""
    start, end = sorted(rng.randrange(len(raw) + 1) for _ in "ab")
    changed = bytearray(raw)
    changed[rng.randrange(len(raw))] = rng.randrange(256)
    return rng.choice(
        (
            raw[:end], raw[start:], raw[:start] + raw[end:], raw[:end] + raw[start:], bytes(changed), raw + raw,
            raw.decode().encode("utf-16"), b"\xef\xbb\xbf" + raw, raw.replace(b"5", b"-5e5", 1), rng.randbytes(200),
            b"[" * rng.randint(1, 100_000), b'{"a":' * 5000, raw.replace(b"null", b"nul"), b"", b"null", b'"x"',
        )
    )  # fmt: skip


def _odd(
    path: str, name: str, value: Any, plain: Mapping[str, Any], sampling: Mapping[str, Any] | None = None
) -> OddRequest:
    if sampling is None:
        raw = _json({**plain, name: value})
    else:
        raw = _json({**plain, "sampling_params": Raw(_json({**sampling, name: value}))})
    field = name if sampling is None else f"sampling_params.{name}"
    return OddRequest(path, field, value, raw.encode())


def _json(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value)
