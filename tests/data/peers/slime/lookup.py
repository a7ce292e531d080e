"""slime's --custom-generate-function-path: the model may look a number up once, between <python> and </python>."""

import asyncio

from lookup_table import look_up
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS = 3


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    params = {**sampling_params, "stop": ["</python>"]}
    for _ in range(TURNS):
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        token_logprobs = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in token_logprobs],
            log_probs=[entry[0] for entry in token_logprobs],
            trainable=True,
            meta_info=meta,
            text=output["text"],
        )
        if meta["finish_reason"]["type"] == "length" or not output["text"].endswith("</python>"):
            break
        await asyncio.sleep(0)
        expression = output["text"].rpartition("<python>")[2].removesuffix("</python>")
        observation_ids = state.tokenizer(f"{look_up(expression)}<assistant>", add_special_tokens=False)[
            "input_ids"
        ]
        sample.append_response_tokens(args, tokens=observation_ids, trainable=False)
    return sample
