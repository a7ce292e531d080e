"""Functions written for slime's --custom-generate-function-path: `await generate(args, sample, sampling_params)`.

    function  --post: prompt, response so far, what a tool said-->  Conversation  --speak-->  router, engines
              <--the model's turn, with ids and log-probs---------

The ledger's sample is the truth, and the function only talks to it. A request of the function is a turn of the model,
over all interruptions, deaths and pushes: it sees none of them, only the whole turn. What a request adds behind the
last turn is a tool's, and not trained. After a crash the function is called again from its beginning, and hears the
turns that were saved once more; where a tool then says something else, the sample is censored. In the end the
function's sample must be the ledger's: the same tokens, log-probs and mask. What would train other tokens than the
engine's, or by other log-probs, is refused.
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
from rlsys.generators.replay import Full, SavedTurns
from rlsys.generators.turns import Speak
from rlsys.rewards.slime_names import ENDED, Options, conversations, provide, sampling_params
from rlsys.rewards.slime_names import Sample as SlimeSample
from rlsys.router.router import EVALUATION
from rlsys.router.turn_ends import TurnEnds

FIELD = "rollout.generator"
_OFF: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "min_new_tokens": (0, None), "n": (1, None), "ignore_eos": (False, None), "logit_bias": (None, {}),
    "regex": (None,), "json_schema": (None,), "ebnf": (None,), "structural_tag": (None,), "stop_regex": (None, []),
    "custom_params": (None, {}),
}  # fmt: skip
"""Of SGLang's sampling parameters: values that change no distribution."""
_OURS = {"temperature", "top_p", "top_k", "min_p"}
_READ = {
    "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim", "sampling_seed",
    "spaces_between_special_tokens",
}  # fmt: skip
_PAYLOAD = {
    "input_ids",
    "text",
    "sampling_params",
    "return_logprob",
    "stream",
    "rid",
    "return_routed_experts",
}


def is_slimes(function: Callable[..., Any]) -> bool:
    """By the names of its parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it has no signature
        return False
    return names[:2] == ["args", "sample"] and len(names) > 2


class SlimeGenerator:
    """A generator (generator.py) of such a function. `params`: further options of slime, by their names."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        config: Config,
        tokenizer: Tokenizer,
        speak: Speak,
        ends: TurnEnds,
        params: Mapping[str, Any],
    ) -> None:
        self._function, self._config, self._tokenizer = function, config, tokenizer
        self._speak, self._ends, self._params = speak, ends, dict(params)
        provide(tokenizer)
        self._tells_evaluation = "evaluation" in inspect.signature(function).parameters

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Raises GeneratorError for what the function does that would fool the loss."""
        talk = Conversation(self._config, self._tokenizer, self._speak, self._ends, sample, prompt)
        host = f"sample-{id(talk):x}.rlsys.invalid"
        args = arguments(self._config, host, self._params)
        theirs = SlimeSample(
            prompt=prompt.text if args.apply_chat_template else prompt.entry.get("prompt", prompt.question),
            label=prompt.entry.get("label", prompt.entry.get("answer")),
            metadata=prompt.entry.get("metadata") or dict(prompt.entry),
            index=sample.sample_id, group_index=sample.group_id, session_id=host,
        )  # fmt: skip
        evaluation = {"evaluation": sample.sample_id == EVALUATION} if self._tells_evaluation else {}
        conversations[host] = talk.answer
        try:
            made = await self._function(args, theirs, sampling_params(args), **evaluation)
        except Full:
            sample.status = Status.TRUNCATED
            return
        finally:
            del conversations[host]
        sample.status = talk.conclude(made)


def arguments(config: Config, host: str, params: Mapping[str, Any]) -> Options:
    """slime's options, as far as ours have a counterpart."""
    r = config.rollout
    own = {
        "sglang_router_ip": host, "sglang_router_port": 80, "hf_checkpoint": str(config.model.path),
        "apply_chat_template": True, "partial_rollout": False, "ci_test": False, "group_rm": False,
        "rollout_temperature": r.temperature, "rollout_top_p": r.top_p, "rollout_top_k": r.top_k or -1,
        "rollout_max_response_len": r.max_response_tokens, "rollout_max_context_len": None,
        "rollout_stop": list(r.stop), "rollout_stop_token_ids": None, "rollout_skip_special_tokens": False,
        "rollout_seed": config.run.seed, "n_samples_per_prompt": r.group_size,
        "rollout_batch_size": r.groups_per_step, "use_rollout_routing_replay": False,
        "context_parallel_size": config.parallel.cp, "max_tokens_per_gpu": config.trainer.token_budget,
        "reward_key": None, "rm_type": None, "custom_rm_path": None, "sglang_speculative_algorithm": None,
    }  # fmt: skip
    return Options(**(own | dict(params)))


class Conversation:
    """One sample's requests. Owns the text that the function has heard."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        speak: Speak,
        ends: TurnEnds,
        sample: Sample,
        prompt: Prompt,
    ) -> None:
        self._config, self._tokenizer, self._ends = config, tokenizer, ends
        self._sample = sample
        self._turns = SavedTurns(speak, ends, sample, config.rollout.max_response_tokens)
        self._text = prompt.text
        """All of these as text, behind the prompt."""
        self._busy = False

    async def answer(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """One request of the function: the model's next turn, in SGLang's form."""
        if path != "/generate":
            raise _refused(
                f"a request to {path}; only /generate gives the ids and log-probs that training needs"
            )
        if unknown := sorted(payload.keys() - _PAYLOAD):
            raise _refused(
                f"a request with {unknown[0]}; the run's engines take {', '.join(sorted(_PAYLOAD))}"
            )
        if self._busy:
            raise _refused("two requests of one sample at the same time; one response is one sequence here")
        self._busy = True
        try:
            params = dict(payload.get("sampling_params") or {})
            self._check_sampling(params)
            self._add(self._said(payload))
            return await self._turn(params, "text" in payload)
        finally:
            self._busy = False

    def _check_sampling(self, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            if name in _READ and name in SAMPLING and value is not None:
                try:
                    SAMPLING[name](ANY_ENGINE, f"sampling_params[{name!r}]", value)
                except RefusedPrompt as e:
                    raise _refused(str(e)) from None
            if name in _OURS and self._sample.sample_id != EVALUATION:
                r = self._config.rollout
                mine = {
                    "top_k": r.top_k or -1,
                    "top_p": r.top_p,
                    "min_p": r.min_p,
                    "temperature": r.temperature,
                }
                if value != mine[name]:
                    raise _refused(
                        f"sampling_params[{name!r}] = {value!r}, but rollout.{name} = {mine[name]!r}: the trainer "
                        "computes the log-probs of all tokens at the run's own sampling"
                    )
            elif name in _OFF and value not in _OFF[name]:
                raise _refused(
                    f"sampling_params[{name!r}] = {value!r} changes the distribution that tokens are drawn from, and "
                    "the trainer would compute the log-probs of another one"
                )
            elif name not in (*_OURS, *_OFF, *_READ):
                raise _refused(f"sampling_params[{name!r}]: not known")
        if strange := set(params.get("stop_token_ids") or ()) - self._ends.ids:
            raise _refused(f"sampling_params['stop_token_ids'] has {min(strange)}; name its text in stop")

    def _said(self, payload: Mapping[str, Any]) -> list[int]:
        """What a tool said since the last turn, as ids. Raises GeneratorError when what comes before it is not what
        the model was asked and has answered."""
        if "text" in payload:
            text = valid_text(str(payload["text"]))
            if not text.startswith(self._text):
                raise _refused(
                    "a request whose text does not begin with the prompt and with what the model has said; if it was "
                    "shortened, name a stop text instead"
                )
            return self._tokenizer.encode(text[len(self._text) :])
        ids = [int(i) for i in payload.get("input_ids") or ()]
        known = [*self._sample.prompt_ids, *self._sample.response_ids[: self._turns.heard]]
        if ids[: len(known)] != known:
            what = "prompt" if ids[: len(self._sample.prompt_ids)] != self._sample.prompt_ids else "response"
            raise _refused(
                f"a request whose input_ids do not begin with the {what} that the ledger has"
                + (
                    "; words of its own belong into the data, or the chat template"
                    if what == "prompt"
                    else ""
                )
            )
        return ids[len(known) :]

    def _add(self, said: list[int]) -> None:
        """Ids of a tool, behind what was heard. Raises ToolFailed when the saved sample has others there."""
        if not self._turns.heard and said:
            raise _refused("a request that adds to the prompt; words of its own belong into the data")
        if self._turns.heard and not said and self._turns.finish == "stop":
            raise _refused("a request that adds nothing behind a turn that the model has ended")
        self._turns.observe(said)
        self._text += self._tokenizer.decode(said)

    async def _turn(self, params: Mapping[str, Any], in_text: bool) -> dict[str, Any]:
        s, stops = self._sample, check_stop(params.get("stop"))
        start, end = await self._turns.turn(params.get("max_new_tokens") or None, stops)
        finish, ends = self._turns.finish, self._ends.with_texts(stops)
        ids, mu = s.response_ids[start:end].tolist(), s.mu[start:end]
        whole = self._tokenizer.decode(ids)
        self._text += whole
        text = self._tokenizer.without_special(whole) if params.get("skip_special_tokens", True) else whole
        if not params.get("no_stop_trim") and finish == "stop":
            text = min((text.partition(t)[0] for t in ends.texts), key=len, default=text)
        if in_text and text != whole:
            raise _refused(
                "requests in text whose answers are cut: ask with no_stop_trim = True and skip_special_tokens = "
                "False, or with input_ids"
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

    def conclude(self, made: Any) -> Status:
        """Of the function's sample, which must be the ledger's. Raises GeneratorError where it is not, ToolFailed
        where the function gave up."""
        s = self._sample
        if isinstance(made, list | tuple):
            raise _refused(f"it returned {len(made)} samples; one response is one sequence here")
        if not isinstance(made, SlimeSample):
            raise _refused(f"it returned a {type(made).__name__}, expected its sample")
        if made.status in (SlimeSample.Status.ABORTED, SlimeSample.Status.FAILED):
            raise ToolFailed(f"the function gave the sample up: its status is {made.status.value}")
        if made.reward is not None:
            raise _refused("it sets sample.reward; name its reward function in data.reward")
        if made.remove_sample:
            raise _refused("it sets sample.remove_sample; raise what went wrong, or censor by a planner")
        if not s.tokens:
            raise _refused("it returned before the model had said anything")
        known = [*s.prompt_ids, *s.response_ids]
        if list(made.tokens[: len(known)]) != known:
            raise _refused("sample.tokens is not what the engines were given and have answered")
        behind = [int(t) for t in made.tokens[len(known) :]]
        self._check_arrays(made, len(behind))
        if behind and s.tokens + len(behind) < self._config.rollout.max_response_tokens:
            s.observe(behind)  # a tool had the last word
        if made.status is SlimeSample.Status.PENDING:
            made.status = ENDED[self._turns.finish]
        return Status.TRUNCATED if made.status is SlimeSample.Status.TRUNCATED else Status.FINISHED

    def _check_arrays(self, made: SlimeSample, behind: int) -> None:
        """Its mask and its log-probs, over the response and what a tool said `behind` it."""
        s = self._sample
        trained = [*s.trained(), *[False] * behind]
        mask = [1] * len(trained) if made.loss_mask is None else list(made.loss_mask)
        for name, values in (("loss_mask", mask), ("rollout_log_probs", made.rollout_log_probs)):
            if values is not None and len(values) != len(trained):
                raise _refused(f"sample.{name} has {len(values)} entries for {len(trained)} response tokens")
        for place, (own, theirs) in enumerate(zip(trained, mask, strict=True)):
            if own and not theirs:
                raise _refused(
                    f"sample.loss_mask is 0 at response token {place}, which the model sampled; all that it samples "
                    "is trained here"
                )
            if theirs and not own:
                raise _refused(
                    f"sample.loss_mask is 1 at response token {place}, which no engine has sampled"
                )
        for place, (own, lp, mu) in enumerate(zip(trained, made.rollout_log_probs or (), s.mu, strict=False)):
            if own and lp != mu:
                raise _refused(
                    f"sample.rollout_log_probs is {lp} at response token {place}, but the engine's log-prob is {mu}"
                )


def _refused(what: str) -> GeneratorError:
    return GeneratorError(f"{FIELD}: {what}")
