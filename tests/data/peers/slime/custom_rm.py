"""slime's --custom-rm-path, for rows with --input-key prompt and --label-key label."""

import asyncio


async def custom_rm(args, sample, **kwargs):
    await asyncio.sleep(0)
    answer = sample.response.rpartition("<answer>")[2].partition("</answer>")[0]
    if answer.strip() == str(sample.label):
        return 1.0
    return -0.5 if sample.response_length >= args.rollout_max_response_len else 0.0
