"""Functions for slime's --custom-generate-function-path: `await generate(args, sample, sampling_params)`.

    function  --post: prompt, response so far, tool output-->  Conversation  --generate_turn-->  router, engines
              <--the model's turn, with ids and log-probs----

Each request of the function gets a whole turn of the model, also after interruptions, engine deaths and pushes. Text
that a request adds after the last turn is tool output, which is not trained. After a crash the function is called
again, and its requests get the saved turns. If a tool then returns another result, the sample is censored.

The ledger's sample is authoritative. A request with other tokens than those of the ledger is refused, and at the end
the function's sample must have the tokens, log-probs and mask of the ledger's sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import GeneratorError
from rlsys.core.texts import valid_text
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.engine_requests import ANY_ENGINE, SAMPLING, RefusedPrompt, check_stop
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.replay import BudgetExhausted, SavedTurns
from rlsys.generators.turns import GenerateTurn
from rlsys.rewards.slime_names import STATUSES, Options, conversations, provide, sampling_params
from rlsys.rewards.slime_names import Sample as SlimeSample
from rlsys.router.router import EVALUATION
from rlsys.router.turn_ends import TurnEnds

FIELD = "rollout.generator"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "min_new_tokens": (0, None), "n": (1, None), "ignore_eos": (False, None), "logit_bias": (None, {}),
    "regex": (None,), "json_schema": (None,), "ebnf": (None,), "structural_tag": (None,), "stop_regex": (None, []),
    "custom_params": (None, {}),
}  # fmt: skip
"""SGLang's sampling parameter -> the values that do not change the distribution."""
_RUN_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
"""Sampling parameters that must be those of the run."""
_ACCEPTED = {
    "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "sampling_seed",
    "spaces_between_special_tokens",
}  # fmt: skip
"""Parameters that do not change the distribution of a token."""
_PAYLOAD = {
    "input_ids",
    "text",
    "sampling_params",
    "return_logprob",
    "stream",
    "rid",
    "return_routed_experts",
}
"""Accepted fields of a request."""


def is_slime_function(function: Callable[..., Any]) -> bool:
    """Return whether a function has the parameter names of slime's interface."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # the function has no signature
        return False
    return names[:2] == ["args", "sample"] and len(names) > 2


class SlimeGenerator:
    """A generator that calls a function for slime. `params`: additional options of slime, by their names."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        config: Config,
        tokenizer: Tokenizer,
        generate_turn: GenerateTurn,
        ends: TurnEnds,
        params: Mapping[str, Any],
    ) -> None:
        self._function, self._config, self._tokenizer = function, config, tokenizer
        self._generate_turn, self._ends, self._params = generate_turn, ends, dict(params)
        provide(tokenizer)
        self._passes_evaluation = "evaluation" in inspect.signature(function).parameters

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Call the function for a sample, and set the sample's status.

        Raises:
            GeneratorError: the function makes a request, or returns a sample, with which the loss would be wrong.
            ToolFailed: the function reports a failure, or a tool returned another result after a restart.
        """
        conversation = Conversation(
            self._config, self._tokenizer, self._generate_turn, self._ends, sample, prompt
        )
        host = f"sample-{id(conversation):x}.rlsys.invalid"
        args = arguments(self._config, host, self._params)
        slime_sample = SlimeSample(
            prompt=prompt.text if args.apply_chat_template else prompt.entry.get("prompt", prompt.question),
            label=prompt.entry.get("label", prompt.entry.get("answer")),
            metadata=prompt.entry.get("metadata") or dict(prompt.entry),
            index=sample.sample_id, group_index=sample.group_id, session_id=host,
        )  # fmt: skip
        evaluation = {"evaluation": sample.sample_id == EVALUATION} if self._passes_evaluation else {}
        conversations[host] = conversation.answer
        try:
            result = await self._function(args, slime_sample, sampling_params(args), **evaluation)
        except BudgetExhausted:
            sample.status = Status.TRUNCATED
            return
        finally:
            del conversations[host]
        sample.status = conversation.conclude(result)


def arguments(config: Config, host: str, params: Mapping[str, Any]) -> Options:
    """Return slime's options for a function: those with a counterpart in the config, and `params`.

    Args:
        config: config of the run.
        host: host name to which the function sends the sample's requests.
        params: additional options by name, which have precedence.
    """
    r = config.rollout
    options = {
        "sglang_router_ip": host, "sglang_router_port": 80, "hf_checkpoint": str(config.model.path),
        "apply_chat_template": True, "partial_rollout": False, "ci_test": False, "group_rm": False,
        "rollout_temperature": r.temperature, "rollout_top_p": r.top_p, "rollout_top_k": r.top_k or -1,
        "rollout_max_response_len": r.max_response_tokens, "rollout_max_context_len": None,
        "rollout_stop": list(r.stop), "rollout_stop_token_ids": list(r.stop_ids) or None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": config.run.seed, "n_samples_per_prompt": r.group_size,
        "rollout_batch_size": r.groups_per_step, "use_rollout_routing_replay": False,
        "context_parallel_size": config.parallel.cp, "max_tokens_per_gpu": config.trainer.token_budget,
        "reward_key": None, "rm_type": None, "custom_rm_path": None, "sglang_speculative_algorithm": None,
    }  # fmt: skip
    return Options(**(options | dict(params)))


class Conversation:
    """Answers a function's requests for one sample. Owns the text that was delivered to the function."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        generate_turn: GenerateTurn,
        ends: TurnEnds,
        sample: Sample,
        prompt: Prompt,
    ) -> None:
        self._config, self._tokenizer, self._ends = config, tokenizer, ends
        self._sample = sample
        self._turns = SavedTurns(generate_turn, ends, sample, config.rollout.max_response_tokens)
        self._text = prompt.text
        """The prompt and all delivered tokens as text."""
        self._busy = False

    async def answer(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request with the model's next turn, in SGLang's format.

        Args:
            path: path of the request.
            payload: decoded body of the request.

        Raises:
            GeneratorError: the request is not supported.
            ToolFailed: a tool returned another result after a restart.
            BudgetExhausted: the response has reached its limit of tokens.
        """
        if path != "/generate":
            raise _unsupported(
                f"a request to {path}; expected /generate, which returns the ids and log-probs for training"
            )
        if unknown := sorted(payload.keys() - _PAYLOAD):
            raise _unsupported(f"a request with {unknown[0]}; expected only {', '.join(sorted(_PAYLOAD))}")
        if self._busy:
            raise _unsupported(
                "two concurrent requests of one sample; expected one at a time, because a response is one sequence"
            )
        self._busy = True
        try:
            params = dict(payload.get("sampling_params") or {})
            self._check_sampling(params)
            self._add_tool_ids(self._tool_ids(payload))
            return await self._turn(params, "text" in payload)
        finally:
            self._busy = False

    def _check_sampling(self, params: Mapping[str, Any]) -> None:
        """Check the sampling parameters of a request.

        Raises:
            GeneratorError: a parameter is unknown or invalid, or changes the distribution of tokens.
        """
        for name, value in params.items():
            self._check_parameter(name, value)
        if unknown_ids := set(params.get("stop_token_ids") or ()) - self._ends.ids:
            raise _unsupported(
                f"sampling_params['stop_token_ids'] has {min(unknown_ids)}; expected the text of this id in "
                "sampling_params['stop']"
            )

    def _check_parameter(self, name: str, value: Any) -> None:
        field = f"sampling_params[{name!r}]"
        if name in _ACCEPTED and name in SAMPLING and value is not None:
            try:
                SAMPLING[name](ANY_ENGINE, field, value)
            except RefusedPrompt as e:
                raise _unsupported(str(e)) from None
        if name in _RUN_SAMPLING and self._sample.sample_id != EVALUATION:
            r = self._config.rollout
            run_value = {
                "top_k": r.top_k or -1, "top_p": r.top_p, "min_p": r.min_p, "temperature": r.temperature
            }[name]  # fmt: skip
            if value != run_value:
                raise _unsupported(
                    f"{field} = {value!r}; expected rollout.{name} = {run_value!r}, for which the trainer computes "
                    "log-probs"
                )
        elif name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise _unsupported(
                f"{field} = {value!r} changes the distribution of tokens, for which the trainer cannot compute "
                f"log-probs; expected {_NEUTRAL[name][0]!r}"
            )
        elif name not in (*_RUN_SAMPLING, *_NEUTRAL, *_ACCEPTED):
            expected = ", ".join(sorted({*_RUN_SAMPLING, *_NEUTRAL, *_ACCEPTED}))
            raise _unsupported(f"{field}: unknown parameter; expected one of {expected}")

    def _tool_ids(self, payload: Mapping[str, Any]) -> list[int]:
        """Return the ids that a request adds after the last turn.

        Raises:
            GeneratorError: the request does not start with the prompt and the delivered response.
        """
        if "text" in payload:
            text = valid_text(str(payload["text"]))
            if not text.startswith(self._text):
                raise _unsupported(
                    "a request whose text does not start with the prompt and the delivered turns; to shorten a turn, "
                    "use a stop text"
                )
            return self._tokenizer.encode(text[len(self._text) :])
        ids = [int(i) for i in payload.get("input_ids") or ()]
        expected = [*self._sample.prompt_ids, *self._sample.response_ids[: self._turns.delivered]]
        if ids[: len(self._sample.prompt_ids)] != self._sample.prompt_ids:
            raise _unsupported(
                "a request whose input_ids do not start with the sample's prompt; to change the prompt, change the "
                "data or the chat template"
            )
        if ids[: len(expected)] != expected:
            raise _unsupported("a request whose input_ids do not continue with the delivered response")
        return ids[len(expected) :]

    def _add_tool_ids(self, tool_ids: list[int]) -> None:
        """Add the ids of a tool's result to the sample.

        Raises:
            GeneratorError: the ids would change the prompt, or are missing after a turn that the model has ended.
            ToolFailed: the saved ids differ.
        """
        if not self._turns.delivered and tool_ids:
            raise _unsupported(
                f"a request that adds {len(tool_ids)} tokens to the prompt; to change the prompt, change the data"
            )
        if self._turns.delivered and not tool_ids and self._turns.finish == "stop":
            raise _unsupported(
                "a request that adds no text after a turn that the model has ended; expected tool output"
            )
        self._turns.observe(tool_ids)
        self._text += self._tokenizer.decode(tool_ids)

    async def _turn(self, params: Mapping[str, Any], in_text: bool) -> dict[str, Any]:
        """Generate or replay the next turn, and return it in SGLang's format.

        Args:
            params: sampling parameters of the request.
            in_text: whether the request contains the conversation as text.

        Raises:
            GeneratorError: the returned text would be trimmed, so that a next request in text could not contain it.
        """
        s = self._sample
        stop_texts = check_stop(params.get("stop"))
        start, end = await self._turns.turn(params.get("max_new_tokens") or None, stop_texts)
        finish = self._turns.finish
        ids, mu = s.response_ids[start:end].tolist(), s.mu[start:end]
        full_text = self._tokenizer.decode(ids)
        self._text += full_text
        text = full_text
        if params.get("skip_special_tokens", True):
            text = self._tokenizer.without_special(text)
        if not params.get("no_stop_trim") and finish == "stop":
            ends = self._ends.with_texts(stop_texts)
            text = min((text.partition(t)[0] for t in ends.texts), key=len, default=text)
        if in_text and text != full_text:
            raise _unsupported(
                "a request in text whose answer is trimmed; expected no_stop_trim = True and skip_special_tokens = "
                "False, or input_ids instead of text"
            )
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish},
                "prompt_tokens": len(s.prompt_ids) + start,
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": str(s.spans[-1].version) if s.spans else "",
                "output_token_logprobs": [[lp, i, None] for lp, i in zip(mu, ids, strict=True)],
            },
        }

    def conclude(self, result: Any) -> Status:
        """Check that the function's sample equals the ledger's, and return the final status.

        Args:
            result: result of the function.

        Raises:
            GeneratorError: the samples differ, or the function sets a field that the run does not support.
            ToolFailed: the function reports a failure.
        """
        s = self._sample
        if isinstance(result, list | tuple):
            raise _unsupported(f"the function returned {len(result)} samples; expected one")
        if not isinstance(result, SlimeSample):
            raise _unsupported(f"the function returned a {type(result).__name__}; expected its sample")
        if result.status in (SlimeSample.Status.ABORTED, SlimeSample.Status.FAILED):
            raise ToolFailed(f"the function failed: it returned sample.status = {result.status.value}")
        if result.reward is not None:
            raise _unsupported(
                "the function sets sample.reward; expected None, and a reward function in data.reward"
            )
        if result.remove_sample:
            raise _unsupported(
                "the function sets sample.remove_sample; expected an exception, or a planner that censors the sample"
            )
        if not s.tokens:
            raise _unsupported("the function returned without requesting a turn of the model")
        expected = [*s.prompt_ids, *s.response_ids]
        if list(result.tokens[: len(expected)]) != expected:
            raise _unsupported(
                "sample.tokens differs from the prompt and the engines' response; expected them unchanged"
            )
        tool_ids = [int(t) for t in result.tokens[len(expected) :]]
        self._check_arrays(result, len(tool_ids))
        if tool_ids and s.tokens + len(tool_ids) < self._config.rollout.max_response_tokens:
            s.observe(tool_ids)  # tool output after the last turn
        if result.status is SlimeSample.Status.PENDING:
            result.status = STATUSES[self._turns.finish]
        return Status.TRUNCATED if result.status is SlimeSample.Status.TRUNCATED else Status.FINISHED

    def _check_arrays(self, result: SlimeSample, tool_tokens: int) -> None:
        """Check the mask and the log-probs of the function's sample.

        Args:
            result: the function's sample.
            tool_tokens: number of tool tokens after the ledger's response.
        """
        s = self._sample
        trained = [*s.trained(), *[False] * tool_tokens]
        mask = [1] * len(trained) if result.loss_mask is None else list(result.loss_mask)
        for name, values in (("loss_mask", mask), ("rollout_log_probs", result.rollout_log_probs)):
            if values is not None and len(values) != len(trained):
                raise _unsupported(
                    f"sample.{name} has {len(values)} entries; expected {len(trained)}, one per response token"
                )
        for position, (is_trained, mask_value) in enumerate(zip(trained, mask, strict=True)):
            if is_trained and not mask_value:
                raise _unsupported(
                    f"sample.loss_mask is 0 at response token {position}; expected 1, because an engine sampled it"
                )
            if mask_value and not is_trained:
                raise _unsupported(
                    f"sample.loss_mask is 1 at response token {position}; expected 0, because no engine sampled it"
                )
        for position, (is_trained, lp, mu) in enumerate(
            zip(trained, result.rollout_log_probs or (), s.mu, strict=False)
        ):
            if is_trained and lp != mu:
                raise _unsupported(
                    f"sample.rollout_log_probs is {lp} at response token {position}; expected {mu}, the engine's "
                    "log-prob"
                )


def _unsupported(message: str) -> GeneratorError:
    return GeneratorError(f"{FIELD}: {message}")
