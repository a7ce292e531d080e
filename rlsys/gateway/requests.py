"""What an HTTP request asks for, and what engines get of it: requests with a seed for each response. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.engine_requests import INERT
from rlsys.engine_requests.requests import prompt_count
from rlsys.engine_requests.sampling import MOST_CHOICES

GENERATE = "/generate"
_SEED_BITS = 31
_MOST_SEED = 2**63 - 1


def samples_of(body: Mapping[str, Any]) -> int:
    """Responses that a request asks for, prompts times `n`; no prompt is looked at. A malformed number counts as one:
    it is for check_request to refuse."""
    prompts = prompt_count(body) or 1
    sampling = body.get("sampling_params")
    params = [body, *(sampling if isinstance(sampling, list) else [sampling])]
    choices = [p.get(name) for p in params if isinstance(p, Mapping) for name in ("n", "best_of")]
    return prompts * max((c for c in choices if type(c) is int and 0 < c <= MOST_CHOICES), default=1)


def engine_bodies(path: str, body: Mapping[str, Any], *, deterministic: bool = False) -> list[dict[str, Any]]:
    """The requests to engines, of one that was checked. Each response has a seed of its own: that of the request and
    those that follow it, or a random one. A deterministic engine draws equal responses from equal seeds, and takes 42
    where a request has none.

    /generate stays one request: it has a seed for each of its prompts. OpenAI's APIs have one seed for a request, so
    each response is a request of its own, in the order of the choices: prompt by prompt.

    deterministic: an engine is, and must not draw by the `min_p` of the model's generation_config.json, which SGLang
    takes for a chat that has none.
    """
    asked = {name: value for name, value in body.items() if name not in INERT}
    if path == GENERATE:
        return [_generate(asked)]
    if deterministic and asked.get("min_p") is None:
        asked["min_p"] = 0
    responses = int(body.get("n") or 1)
    seeds = _seeds(body.get("seed"))
    prompts: list[Any] = [None]
    if prompt_count(body) is not None:
        prompts = body["prompt"]
    found = []
    for prompt in prompts:
        for _ in range(responses):
            one = {**asked, "seed": next(seeds)}
            if prompt is not None:
                one["prompt"] = prompt
            if responses > 1:
                one["n"] = 1
            found.append(one)
    return found


def _seeds(first: int | None) -> Iterator[int]:
    if first is None:
        while True:
            yield random.getrandbits(_SEED_BITS)
    while True:
        yield first
        first = first + 1 if first < _MOST_SEED else -_MOST_SEED


def _generate(body: dict[str, Any]) -> dict[str, Any]:
    """`n` becomes as many prompts in a row: SGLang would copy the seed with all else."""
    prompts, sampling = prompt_count(body), body.get("sampling_params")
    rows = [{**p} for p in (sampling if isinstance(sampling, list) else [sampling or {}])]
    responses = int(rows[0].get("n") or 1)
    for row in rows:
        row.pop("n", None)
    if prompts is None and responses == 1:
        row = rows[0]
        if row.get("sampling_seed") is None:
            row["sampling_seed"] = next(_seeds(None))
        return {**body, "sampling_params": row}
    if len(rows) == 1:
        rows *= prompts or 1
    body = {name: _repeated(name, value, prompts, responses) for name, value in body.items()}
    body["sampling_params"] = [
        {**row, "sampling_seed": seed}
        for row in rows
        for _, seed in zip(range(responses), _seeds(row.get("sampling_seed")), strict=False)
    ]
    return body


def _repeated(name: str, value: Any, prompts: int | None, responses: int) -> Any:
    """The prompt, or what is said of each prompt, `responses` times."""
    if prompts is None:
        return [value] * responses if name in ("input_ids", "text") and value is not None else value
    if (
        isinstance(value, list)
        and len(value) == prompts
        and (name != "token_ids_logprob" or isinstance(value[0], list))
    ):
        return [one for one in value for _ in range(responses)]
    return value
