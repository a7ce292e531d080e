"""Functions written for slime make responses: what the ledger gets is what the engines made, whatever happens."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.rewards.slime_names import Sample as SlimeSample
from rlsys.rewards.slime_names import post
from rlsys.router.turn_ends import TurnEnds

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"
LOOKUP = f"{ROOT}/tests/data/peers/slime/lookup.py:generate"
TOKENIZER = Tokenizer(MODEL)
SAID = ["so <python>3+4</python>", "and <python>2+2</python>", "<answer>11</answer><eos>"]
WHOLE = "so <python>3+4</python>7<assistant>and <python>2+2</python>4<assistant><answer>11</answer><eos>"


def config(**rollout: Any) -> Config:
    return Config.model_validate({"model": {"path": MODEL}, "rollout": rollout})


def prompt() -> Prompt:
    text = TOKENIZER.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
    return Prompt(0, text, TOKENIZER.encode(text), {"answer": "11"}, "3+4+(2+2)")


def fresh() -> Sample:
    return Sample(5, 1, 0, prompt().ids, seed=1)


class Model:
    """It says SAID, turn by turn; of the tokens of this call, at most `at_once` before it is cancelled."""

    def __init__(self, said: Sequence[str] = SAID, budget: int = 256, at_once: int | None = None) -> None:
        self.said, self.budget, self.at_once = [TOKENIZER.encode(t) for t in said], budget, at_once
        self.version = 1

    async def __call__(
        self, sample: Sample, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        await asyncio.sleep(0)
        ends = TurnEnds({TOKENIZER.eos_id}, stop_texts, TOKENIZER.decode)
        start = sample.observed[-1].end if sample.observed else 0
        turn = self.said[len(sample.observed)]
        limit = min(self.budget, self.budget if max_tokens is None else max_tokens)
        for token in turn[sample.tokens - start :]:
            if sample.tokens >= limit:
                break
            if self.at_once == 0:
                raise asyncio.CancelledError
            self.at_once = None if self.at_once is None else self.at_once - 1
            sample.append(Segment([token], [-sample.tokens / 7], [VersionSpan(self.version, 0, 1)]))
            if ends.is_ended(sample.response_ids[start:]):
                sample.status = Status.FINISHED
                return
        sample.status = Status.TRUNCATED


async def made(sample: Sample, model: Model | None = None, *, made_for: Config) -> Sample:
    generate = build_generator(made_for, TOKENIZER, model or Model())
    await generate(sample, prompt())
    return sample


def told(s: Sample) -> tuple[object, ...]:
    return s.response_ids, s.mu, s.observed, s.status


def config_of(function: str, **rollout: Any) -> Config:
    return config(generator=function, **rollout)


async def test_the_ledger_records_tool_turns_exactly_as_the_engine_generated_them() -> None:
    s = await made(fresh(), made_for=config_of(LOOKUP))
    assert TOKENIZER.decode(s.response_ids) == WHOLE
    observed = [TOKENIZER.decode(s.response_ids[o.start : o.end]) for o in s.observed]
    assert (observed, s.status) == (["7<assistant>", "4<assistant>"], Status.FINISHED)
    assert [m for m, trained in zip(s.mu, s.trained(), strict=True) if trained] == [
        -i / 7 for i, trained in enumerate(s.trained()) if trained
    ]


async def test_each_response_reports_the_length_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, int]] = []

    async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
        slime_sample = await one_turn(args, sample, sampling_params)
        slime_sample.status = SlimeSample.Status.COMPLETED
        read = [*slime_sample.tokens, *TOKENIZER.encode("7<assistant>")]
        answer = (await ask(args, read, sampling_params))["meta_info"]
        counted.append((answer["prompt_tokens"] + answer["cached_tokens"], len(read)))
        return slime_sample

    monkeypatch.setattr("rlsys.generators.generator.find_generator", lambda name: generate)
    with suppress(UserError):  # its sample is not what the ledger has
        await made(fresh(), made_for=config_of("anything"))
    assert counted and all(input_tokens == read for input_tokens, read in counted)


async def test_a_restart_at_any_token_yields_the_same_response() -> None:
    """The function is called anew and hears again what was saved; no engine is asked for that a second time."""
    reference = await made(fresh(), made_for=config_of(LOOKUP))
    for tokens in range(sum(reference.trained())):
        s = fresh()
        with pytest.raises(asyncio.CancelledError):
            await made(s, Model(at_once=tokens), made_for=config_of(LOOKUP))
        assert sum(s.trained()) == tokens
        s.status = Status.PARKED
        await made(s, made_for=config_of(LOOKUP))
        assert told(s) == told(reference)


async def test_a_different_tool_result_after_a_restart_censors_the_sample() -> None:
    reference = await made(fresh(), made_for=config_of(LOOKUP))
    s = copy.deepcopy(reference)
    s.response_ids[s.observed[0].start] = TOKENIZER.encode("8")[0]
    s.status = Status.PARKED
    with pytest.raises(ToolFailed, match="returned another result after a restart"):
        await made(s, made_for=config_of(LOOKUP))


@pytest.mark.parametrize("budget", range(1, len(TOKENIZER.encode(WHOLE)) + 2))
async def test_no_response_exceeds_its_budget(budget: int) -> None:
    s = await made(fresh(), Model(budget=budget), made_for=config_of(LOOKUP, max_response_tokens=budget))
    assert 0 < s.tokens <= budget
    assert TOKENIZER.encode(WHOLE)[: s.tokens] == list(s.response_ids)
    assert s.status is (Status.FINISHED if s.tokens == len(TOKENIZER.encode(WHOLE)) else Status.TRUNCATED)


Body = Callable[[Any, SlimeSample, dict[str, Any]], Awaitable[Any]]


async def ask(args: Any, ids: Sequence[int], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return await post(
        url, {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, **more}
    )


def encoded(args: Any, sample: SlimeSample) -> list[int]:
    return TOKENIZER.encode(sample.prompt)


async def one_turn(args: Any, sample: SlimeSample, params: dict[str, Any], **more: Any) -> SlimeSample:
    output = await ask(args, encoded(args, sample), params, **more)
    entries = output["meta_info"]["output_token_logprobs"]
    sample.tokens = encoded(args, sample)
    ids, lps = [e[1] for e in entries], [e[0] for e in entries]
    sample.append_response_tokens(args, tokens=ids, log_probs=lps, meta_info=output["meta_info"])
    return sample


def mistake(change: Callable[[SlimeSample], Any]) -> Body:
    async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
        slime_sample = await one_turn(args, sample, sampling_params)
        return change(slime_sample) or slime_sample

    return generate


def asking(**params: Any) -> Body:
    async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
        return await one_turn(args, sample, {**sampling_params, **params})

    return generate


async def other_prompt(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    return await ask(args, TOKENIZER.encode("2+2="), sampling_params)


async def at_once(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    ids = encoded(args, sample)
    return await asyncio.gather(ask(args, ids, sampling_params), ask(args, ids, sampling_params))


async def again(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    slime_sample = await one_turn(args, sample, sampling_params)
    return await ask(args, slime_sample.tokens, sampling_params)


async def retokenised(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    slime_sample = await one_turn(args, sample, sampling_params)
    return await ask(args, [*slime_sample.tokens[:-2], 44, 45, 46], sampling_params)


async def elsewhere(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    return await post("http://127.0.0.1:1/generate", {})


async def pictures(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    return await one_turn(args, sample, sampling_params, image_data=["x"])


async def cut_text(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    params = {**sampling_params, "no_stop_trim": False, "stop": ["</python>"]}
    return await post(url, {"text": sample.prompt, "sampling_params": params})


async def unknown_option(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> Any:
    return args.rollout_numb_gpus


def set_mask(at: int, value: int) -> Callable[[SlimeSample], None]:
    def change(sample: SlimeSample) -> None:
        assert sample.loss_mask is not None
        sample.loss_mask[at] = value

    return change


def longer(sample: SlimeSample) -> None:
    sample.append_response_tokens(tokens=[44, 45], log_probs=[-1.0, -1.0])


def other_logp(sample: SlimeSample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[0] -= 1.0


def set_field(name: str, value: Any) -> Callable[[SlimeSample], None]:
    return lambda sample: setattr(sample, name, value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (mistake(set_mask(0, 0)), "loss_mask is 0 at response token 0; expected 1"),
        (mistake(longer), "loss_mask is 1 at response token 23; expected 0"),
        (
            mistake(set_field("loss_mask", [1])),
            "loss_mask has 1 entries; expected 23, one per response token",
        ),
        (
            mistake(other_logp),
            r"rollout_log_probs is -1\.0 at response token 0; expected .*, the engine's log-prob",
        ),
        (mistake(set_field("tokens", [1, 2])), "sample.tokens differs from the prompt"),
        (
            mistake(set_field("reward", 1.0)),
            "the function sets sample.reward; expected None, and a reward function",
        ),
        (mistake(set_field("remove_sample", True)), "the function sets sample.remove_sample"),
        (mistake(lambda s: [s, s]), "the function returned 2 samples; expected one"),
        (mistake(lambda s: "text"), "the function returned a str; expected its sample"),
        (
            asking(temperature=0.5),
            r"sampling_params\['temperature'\] = 0.5; expected rollout.temperature = 1.0",
        ),
        (asking(top_p=0.9), r"sampling_params\['top_p'\] = 0.9; expected rollout.top_p = 1.0"),
        (asking(repetition_penalty=1.1), "= 1.1 changes the distribution of tokens"),
        (asking(regex="[0-9]"), r"sampling_params\['regex'\] = '\[0-9\]' changes the distribution"),
        (asking(beam_width=3), r"sampling_params\['beam_width'\]: unknown parameter"),
        (
            asking(stop_token_ids=[44]),
            r"sampling_params\['stop_token_ids'\] has 44; expected the text of this id",
        ),
        (other_prompt, "do not start with the sample's prompt; to change the prompt, change the data"),
        (at_once, "two concurrent requests of one sample"),
        (again, "a request that adds no text after a turn that the model has ended"),
        (retokenised, "do not continue with the delivered response"),
        (
            elsewhere,
            r"slime.utils.http_utils.post to http://127.0.0.1:1/generate: expected http",
        ),
        (pictures, "a request with image_data; expected only"),
        (cut_text, "a request in text whose answer is trimmed; expected no_stop_trim = True"),
    ],
)
async def test_samples_that_would_corrupt_the_loss_are_refused(
    body: Body, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.generators.generator.find_generator", lambda name: body)
    model = Model([SAID[0]])
    with pytest.raises(UserError, match=why):
        await build_generator(config(stop=["</python>"]), TOKENIZER, model)(fresh(), prompt())


async def test_an_unknown_slime_option_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.generators.generator.find_generator", lambda name: unknown_option)
    with pytest.raises(
        AttributeError, match=r"args.rollout_numb_gpus: this option of slime has no value in rlsys; set it"
    ):
        await build_generator(config(), TOKENIZER, Model())(fresh(), prompt())


@pytest.mark.parametrize("status", [SlimeSample.Status.ABORTED, SlimeSample.Status.FAILED])
async def test_a_sample_that_it_gives_up_is_censored(
    status: SlimeSample.Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = mistake(set_field("status", status))
    monkeypatch.setattr("rlsys.generators.generator.find_generator", lambda name: body)
    with pytest.raises(ToolFailed, match=f"the function failed: it returned sample.status = {status.value}"):
        await build_generator(config(stop=["</python>"]), TOKENIZER, Model([SAID[0]]))(fresh(), prompt())
