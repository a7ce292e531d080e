"""Adapters of reward functions for other frameworks: verl, slime, TRL and `verifiers`.

An adapter converts a function to `score(prompt, response)`, which is async if the function is async. The function
gets these values, by its framework's names; for verl, they are also attributes of `solution_str`:

- the text without special tokens, which is not tokenised again
- the response ids
- the mask of the ids that the model sampled
- whether the model ended the response
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
"""A reward function, plain or async. Its value is parsed by results.parse_reward; None: the reward does not apply."""
Arguments = Callable[[Prompt, Response], dict[str, Any]]
"""Returns the keyword arguments of a framework's function."""


def adapt(
    field_name: str, function: Callable[..., Any], spec: RewardSpec, config: Config, **extras: Any
) -> Score:
    """Adapt a function of another framework, or create one of rlsys.

    Args:
        field_name: config field, for errors.
        function: the function.
        spec: entry of the function in the config field.
        config: config of the run.
        extras: additional keyword arguments, which are passed if the function has these parameters.

    Raises:
        UserError: the parameters of the function do not determine the framework.
    """
    signature = spec.signature if spec.signature != "auto" else infer_framework(function)
    if signature is None:
        parameters = ", ".join(_names(function)) or "nothing"
        raise UserError(
            f"{field_name} = {spec.name!r}: unknown parameters ({parameters}); expected (config), "
            "(data_source, solution_str, ground_truth, extra_info), (args, sample), (completions, **kwargs) or "
            "(completion, answer), or a signature: data.reward=[{name: ..., signature: verl}]"
        )
    if signature == "rlsys":
        score: Score = call(field_name, function, config, **spec.params)
        field = f"{field_name} = {spec.name!r}"
        expect_function(field, function, score, "config", "a function score(prompt, text)")
        return score
    tokenizer = Tokenizer.of(config)
    provide(tokenizer)
    framework_arguments = _ARGUMENTS[signature](function, spec, config)
    extras = _accepted(function, extras)

    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        return {**extras, **framework_arguments(prompt, response)}

    reward_key = spec.params.get("reward_key") if signature == "slime" else None
    return _wrap(function, arguments, tokenizer, lambda value: _unbatch(value, reward_key))


def infer_framework(function: Callable[..., Any]) -> str | None:
    """Return the framework of a function, by the names of its parameters; None if no framework has these names."""
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
    """Return whether a reward function is an async function or method, or has an async `__call__`."""
    return inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(type(score).__call__)


def _wrap(
    function: Callable[..., Any], arguments: Arguments, tokenizer: Tokenizer, parse: Callable[[Any], Any]
) -> Score:
    """Return a reward function that calls `function` with `arguments`, and parses its value with `parse`."""

    def plain(response: Response) -> Response:
        return response.with_text(tokenizer.without_special(response))

    if is_async(function):

        async def async_score(prompt: Prompt, response: Response) -> Any:
            return parse(await function(**arguments(prompt, plain(response))))

        return async_score

    def score(prompt: Prompt, response: Response) -> Any:
        return parse(function(**arguments(prompt, plain(response))))

    return score


def _verl(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        values = {
            "response_ids": list(response.ids),
            "response_mask": list(response.mask),
            "finished": response.finished,
            "data_source": prompt.entry.get("data_source"),
            "solution_str": response,
            "ground_truth": prompt.entry["answer"],
            "extra_info": prompt.entry.get("extra_info") or {},
        }
        return _accepted(function, values) | spec.params

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
        messages = prompt.entry.get("prompt", prompt.entry.get("messages", prompt.question))
        is_chat = isinstance(messages, list)
        columns = {k: [v] for k, v in prompt.entry.items() if k not in ("prompt", "completion")}
        values = {
            **columns,
            "prompts": [messages],
            "completions": [[{"role": "assistant", "content": text}] if is_chat else text],
            "completion_ids": [list(response.ids)],
            "completion_mask": [list(response.mask)],
            "finished": [response.finished],
            "trainer_state": None,
        }
        return _accepted(function, values) | spec.params

    return arguments


def _verifiers(function: Callable[..., Any], spec: RewardSpec, config: Config) -> Arguments:
    def arguments(prompt: Prompt, response: Response) -> dict[str, Any]:
        entry = prompt.entry
        messages = entry.get("prompt") or [{"role": "user", "content": prompt.question}]
        completion = [{"role": "assistant", "content": str(response)}]
        row = {
            "answer": entry.get("answer", ""),
            "info": entry.get("info") or {},
            "task": entry.get("task", "default"),
        }
        state = {
            "prompt": messages,
            "completion": completion,
            "completion_ids": list(response.ids),
            "completion_mask": list(response.mask),
            "is_truncated": not response.finished,
            **row,
        }
        values = {"prompt": messages, "completion": completion, "state": state, **row}
        return _accepted(function, values) | spec.params

    return arguments


_ARGUMENTS: Mapping[str, Callable[[Callable[..., Any], RewardSpec, Config], Arguments]] = {
    "verl": _verl,
    "slime": _slime,
    "trl": _trl,
    "verifiers": _verifiers,
}


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for which the function has parameters."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return values
    return {p.name: values[p.name] for p in parameters if p.name in values}


def _names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, except *args and **kwargs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # the function has no signature
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _unbatch(value: Any, reward_key: str | None) -> Any:
    """Return the reward of a batch with one response.

    Args:
        value: value of the function: a list with one reward, or the reward.
        reward_key: key of the reward if it is a dictionary (slime's `reward_key`); None: the whole dictionary.

    Raises:
        ValueError: the list has another length.
    """
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"the function returned {len(value)} rewards for one response; expected one")
        value = value[0]
    return value[reward_key] if reward_key is not None and isinstance(value, dict) else value
