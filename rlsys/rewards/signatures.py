"""Reward functions written for others, called as they expect it: verl's, slime's, TRL's and those of `verifiers`.

Each adapter makes `score(prompt, response)` of a function, async where the function is. Others' functions get the
text as their frameworks give it, without special tokens, and the sampled ids, which of them the model sampled, and
whether it ended the response by itself, under the names of their frameworks; verl's have them as attributes of
`solution_str` as well. Nothing is tokenised again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.config import Config
from rlsys.config.data import RewardSpec
from rlsys.config.plugins import call, expect_function
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.tokenizer import Tokenizer
from rlsys.rewards.slime_names import Options, Sample, provide

Score = Callable[[Prompt, Response], Any]
"""What it gives is read by marks.read_mark, or awaited first; None: this reward does not apply."""
Arguments = Callable[[Prompt, Response], dict[str, Any]]


def adapt(
    field_name: str, function: Callable[..., Any], spec: RewardSpec, config: Config, **further: Any
) -> Score:
    """`further`: what else the function may take. Raises UserError when nobody can tell how it is to be called."""
    signature = spec.signature if spec.signature != "auto" else guess(function)
    if signature is None:
        told = ", ".join(_names(function)) or "nothing"
        raise UserError(
            f"{field_name} = {spec.name!r}: cannot tell how to call a function of ({told}); expected (config), "
            "(data_source, solution_str, ground_truth, extra_info), (args, sample), (completions, **kwargs) or "
            "(completion, answer); or say it: data.reward=[{name: ..., signature: verl}]"
        )
    if signature == "rlsys":
        made: Score = call(field_name, function, config, **spec.params)
        field = f"{field_name} = {spec.name!r}"
        expect_function(field, function, made, "config", "a function score(prompt, text)")
        return made
    tokenizer = Tokenizer.of(config)
    provide(tokenizer)
    own = _ARGUMENTS[signature](function, spec, config)
    further = _taken(function, further)

    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        return {**further, **own(prompt, response)}

    chosen = spec.params.get("reward_key") if signature == "slime" else None
    return _called(function, arguments, tokenizer, lambda value: _one(value, chosen))


def guess(function: Callable[..., Any]) -> str | None:
    """By the names of its parameters; None where they say nothing."""
    names = _names(function)
    if "solution_str" in names and "ground_truth" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    if "completion" in names:
        return "verifiers"
    if names[:1] == ["args"] and names[1:2] in (["sample"], ["samples"]):
        return "slime"
    return "rlsys" if names[:1] == ["config"] or len(names) == 1 else None


def is_async(score: Callable[..., Any]) -> bool:
    """A function, a method, or an object that is called like one."""
    return inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(type(score).__call__)


def _called(
    function: Callable[..., Any], arguments: Arguments, tokenizer: Tokenizer, read: Callable[[Any], Any]
) -> Score:
    def plain(response: Response) -> Response:
        return response.with_text(tokenizer.without_special(response))

    if is_async(function):

        async def ask(prompt: Prompt, response: Response) -> Any:
            return read(await function(**arguments(prompt, plain(response))))

        return ask

    def score(prompt: Prompt, response: Response) -> Any:
        return read(function(**arguments(prompt, plain(response))))

    return score


def _verl(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        sampled = {"response_ids": list(response.ids), "response_mask": list(response.mask)}
        given = {
            **sampled,
            "finished": response.finished,
            "data_source": prompt.entry.get("data_source"),
            "solution_str": response,
            "ground_truth": prompt.entry["answer"],
            "extra_info": prompt.entry.get("extra_info") or {},
        }
        return _taken(function, given) | spec.params

    return arguments


def _slime(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    names = _names(function)
    args = Options(
        hf_checkpoint=str(config.model.path),
        rollout_max_response_len=config.rollout.max_response_tokens,
        rollout_temperature=config.rollout.temperature,
        n_samples_per_prompt=config.rollout.group_size,
        rollout_batch_size=config.rollout.groups_per_step,
        custom_rm_path=spec.name,
        rm_type=None,
        rm_url=None,
        reward_key=None,
        group_rm=names[1] == "samples",
    )
    vars(args).update(spec.params)

    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        ids = list(response.ids)
        entry = prompt.entry
        sample = Sample(
            prompt=entry.get("prompt", prompt.question), response=str(response),
            label=entry.get("label", entry.get("answer")), metadata=entry.get("metadata") or dict(entry),
            index=prompt.index, response_length=len(ids), loss_mask=list(response.mask),
            tokens=[*(response.prompt_ids or prompt.ids), *ids],
            status=Sample.Status.COMPLETED if response.finished else Sample.Status.TRUNCATED,
        )  # fmt: skip
        return {names[0]: args, names[1]: [sample] if names[1] == "samples" else sample}

    return arguments


def _trl(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        text = str(response)
        asked = prompt.entry.get("prompt", prompt.entry.get("messages", prompt.question))
        chat = isinstance(asked, list)
        columns = {k: [v] for k, v in prompt.entry.items() if k not in ("prompt", "completion")}
        given = {
            **columns,
            "prompts": [asked],
            "completions": [[{"role": "assistant", "content": text}] if chat else text],
            "completion_ids": [list(response.ids)],
            "completion_mask": [list(response.mask)],
            "finished": [response.finished],
            "trainer_state": None,
        }
        return _taken(function, given) | spec.params

    return arguments


def _verifiers(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        entry = prompt.entry
        asked = entry.get("prompt") or [{"role": "user", "content": prompt.question}]
        said = [{"role": "assistant", "content": str(response)}]
        row = {
            "answer": entry.get("answer", ""),
            "info": entry.get("info") or {},
            "task": entry.get("task", "default"),
        }
        state = {
            "prompt": asked,
            "completion": said,
            "completion_ids": list(response.ids),
            "completion_mask": list(response.mask),
            "is_truncated": not response.finished,
            **row,
        }
        return _taken(function, {"prompt": asked, "completion": said, "state": state, **row}) | spec.params

    return arguments


_ARGUMENTS: Mapping[str, Callable[[Callable[..., Any], RewardSpec, Config], Arguments]] = {
    "verl": _verl,
    "slime": _slime,
    "trl": _trl,
    "verifiers": _verifiers,
}


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of it the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _one(value: Any, chosen: str | None) -> Any:
    """A batched function was given a batch of one. `chosen`: slime's `reward_key`, of a dictionary."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"it gave {len(value)} rewards for 1 response")
        value = value[0]
    return value[chosen] if chosen is not None and isinstance(value, dict) else value
