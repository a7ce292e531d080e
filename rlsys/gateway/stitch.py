"""One answer out of two: what a request got before it was interrupted, and what its continuation got. Pure.

Only `/generate` speaks token ids, so only there can a request go on from its tokens. Other requests, and those whose
next token depends on more than the tokens before it, are made again with the same seed.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

DEFAULT_NEW_TOKENS = 128
"""SGLang's own, when a request does not say."""
_NEEDS_MORE_THAN_TOKENS = (
    "stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "custom_params", "beam_width",
)  # fmt: skip
_NEUTRAL = {"repetition_penalty": 1}
"""Of those, values that stand for none without being false."""
_NOT_ONLY_TOKENS = (
    "image_data", "video_data", "audio_data", "input_embeds", "session_params", "custom_logit_processor",
    "return_hidden_states", "return_sampling_mask", "return_entropy", "lora_path",
)  # fmt: skip
PER_TOKEN = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
)  # fmt: skip


def can_go_on(body: Mapping[str, Any]) -> bool:
    """Whether a /generate request is one prompt whose next token follows from its tokens and the seed."""
    sampling = body.get("sampling_params") or {}
    prompt = body.get("input_ids", body.get("text"))
    single = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    )
    return (
        single
        and isinstance(sampling, Mapping)
        and sampling.get("n", 1) == 1
        and not any((value := sampling.get(k)) and value != _NEUTRAL.get(k) for k in _NEEDS_MORE_THAN_TOKENS)
        and not any(body.get(k) for k in _NOT_ONLY_TOKENS)
    )


def continuation(body: Mapping[str, Any], prompt: list[int], made: list[int]) -> dict[str, Any]:
    """The request for the rest: prompt and made tokens, what is left of the budget, the same seed."""
    sampling = dict(body.get("sampling_params") or {})
    sampling["max_new_tokens"] = (sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS) - len(made)
    rest = {k: v for k, v in body.items() if k not in ("text", "rid", "logprob_start_len")}
    rest |= {"input_ids": prompt + made, "sampling_params": sampling}
    if body.get("return_routed_experts"):
        rest["routed_experts_start_len"] = len(prompt) + len(made) - 1
    return rest


def join(first: Mapping[str, Any], second: Mapping[str, Any], *, incremental: bool) -> dict[str, Any]:
    """`second` as if it had come after `first` in one request. incremental: chunks bring new tokens only, so those
    of `first` are with the client already. Routed experts are null unless both have them: a part is not the whole's.
    """
    meta_1, meta_2 = first["meta_info"], second["meta_info"]
    made = meta_1["completion_tokens"]
    meta = {
        **meta_2,
        **{k: v for k, v in meta_1.items() if k.startswith("input_") or k in ("id", "prompt_tokens")},
    }
    meta["completion_tokens"] = made + meta_2["completion_tokens"]
    if "cached_tokens" in meta_1:
        meta["cached_tokens"] = meta_1["cached_tokens"]
    if "output_token_logprobs_length" in meta_2:
        meta["output_token_logprobs_length"] = made + meta_2["output_token_logprobs_length"]
    spans = [
        {**s, "start": s["start"] + made, "end": s["end"] + made} for s in meta_2.get("weight_versions") or []
    ]
    if spans:
        meta["weight_versions"] = [*(meta_1.get("weight_versions") or []), *spans]
    if meta_2.get("routed_experts") is not None:
        begun = meta_1.get("routed_experts")  # absent where the engine died before it handed them over
        both = [base64.b64decode(part) for part in (begun, meta_2["routed_experts"]) if part is not None]
        meta["routed_experts"] = None if begun is None else base64.b64encode(b"".join(both)).decode()
    reason = meta_2.get("finish_reason") or {}
    if "length" in reason:
        meta["finish_reason"] = {**reason, "length": made + reason["length"]}
    out = {**second, "meta_info": meta}
    if not incremental:
        out["text"] = first.get("text", "") + second.get("text", "")
        out["output_ids"] = [*first["output_ids"], *second["output_ids"]]
        for name in PER_TOKEN:
            if meta_1.get(name) and meta_2.get(name):
                meta[name] = [*meta_1[name], *meta_2[name]]
    return out


def gather(chunks: Sequence[Mapping[str, Any]], *, incremental: bool) -> dict[str, Any]:
    """All chunks of a stream as the one answer that would have come without streaming."""
    last = dict(chunks[-1])
    if not incremental:
        return last
    meta = dict(last["meta_info"])
    for name in PER_TOKEN:
        if name in meta:
            meta[name] = [x for c in chunks for x in c["meta_info"].get(name) or []]
    ids = [i for c in chunks for i in c["output_ids"]]
    text = "".join(c.get("text") or "" for c in chunks)
    return {**last, "text": text, "output_ids": ids, "meta_info": {**meta, "completion_tokens": len(ids)}}


def finished(body: Mapping[str, Any], made: list[int], stop_ids: Collection[int]) -> dict[str, Any] | None:
    """Why there is nothing left to make, although the engine calls it aborted."""
    sampling = body.get("sampling_params") or {}
    stops = {*stop_ids, *(sampling.get("stop_token_ids") or [])}
    if made and made[-1] in stops and not sampling.get("ignore_eos"):
        return {"type": "stop", "matched": made[-1]}
    budget = sampling.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    return {"type": "length", "length": budget} if len(made) >= budget else None


def was_aborted(answer: Mapping[str, Any]) -> bool:
    """An answer or a chunk, of any of the three APIs, that an abort ended; not one that is an error."""
    reason = (answer.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, Mapping):
        return reason.get("type") == "abort" and not reason.get("status_code")
    return any(c.get("finish_reason") == "abort" for c in answer.get("choices") or [])
