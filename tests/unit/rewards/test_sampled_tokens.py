"""Each signature of a reward function sees what was sampled: ids, which of them are the model's, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from aiohttp import web

from rlsys.config import Config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.rewards import Rewards
from rlsys.worker.assembly import build_scorer
from rlsys.worker.streams import Streams

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
TURN, OBSERVED, LAST = [20, 21], [30, 31, 32], [22, 23]
IDS = [*TURN, *OBSERVED, *LAST]
MASK = [1, 1, 0, 0, 0, 1, 1]
PROMPT = [7, 8]


async def rlsys_form(prompt: Prompt, text: Any) -> float:
    right = list(text.ids) == IDS and [int(m) for m in getattr(text, "mask", ())] == MASK
    return float(right and not text.finished and list(getattr(text, "prompt_ids", ())) == PROMPT)


def make_rlsys(config: Config) -> Any:
    return rlsys_form


async def verl_form(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    fields = [list(getattr(solution_str, k, ())) for k in ("ids", "mask")]
    return float(fields == [IDS, MASK] and not solution_str.finished and extra_info == {"split": "train"})


async def verl_named(solution_str, ground_truth, response_ids=(), response_mask=(), finished=True):  # type: ignore[no-untyped-def]
    return float((list(response_ids), list(response_mask), finished) == (IDS, MASK, False))


async def slime_form(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    right = (
        sample.loss_mask == MASK and sample.tokens == [*PROMPT, *IDS] and sample.response_length == len(IDS)
    )
    return float(
        right and sample.status is type(sample).Status.TRUNCATED and sample.effective_response_length == 4
    )


async def trl_form(completions, completion_ids, completion_mask=((),), **kwargs):  # type: ignore[no-untyped-def]
    return [
        float(
            (list(completion_ids[0]), list(completion_mask[0])) == (IDS, MASK)
            and kwargs["finished"] == [False]
        )
    ]


async def verifiers_form(completion, answer, state):  # type: ignore[no-untyped-def]
    fields = [state.get(k) for k in ("completion_ids", "completion_mask", "is_truncated")]
    return float(fields == [IDS, MASK, True])


def sample_of(turns: Sequence[list[int]] = (TURN, LAST)) -> Sample:
    sample = Sample(0, 0, 0, list(PROMPT), seed=1, own_prompt=True)
    for i, ids in enumerate(turns):
        if i:
            sample.observe(OBSERVED)
        sample.append(Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))]))
    sample.status = Status.TRUNCATED
    return sample


async def scored(reward: Any) -> float | None:
    config = Config.model_validate({"model": {"path": MODEL}, "data": {"reward": reward}})
    rewards, unused = Rewards(config), mock.Mock()
    scorer = build_scorer(config, rewards, Tokenizer(MODEL))
    streams = Streams(config, unused, scorer, unused, unused, unused, unused, flush_tokens=1)
    entry = {"answer": "3", "prompt": "1+2=", "data_source": "sums", "extra_info": {"split": "train"}}
    try:
        verdict = await streams.score(sample_of(), Prompt(0, "", [1, 2], entry, "1+2="))
    finally:
        await rewards.close()
    assert verdict.reason is None, verdict.reason
    return verdict.reward


@pytest.mark.parametrize(
    "name", ["make_rlsys", "verl_form", "verl_named", "slime_form", "trl_form", "verifiers_form"]
)
async def test_each_signature_receives_the_sampled_tokens(name: str) -> None:
    """A sample of two turns with an observation between, cut off, and with a prompt of its own."""
    assert await scored({"name": f"{Path(__file__)}:{name}"}) == 1.0


async def test_a_service_receives_the_sampled_tokens() -> None:
    requests: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(await request.json())
        return web.json_response(1.0)

    app = web.Application()
    app.add_routes([web.post("/score", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        assert await scored(f"http://127.0.0.1:{port}/score") == 1.0
    finally:
        await runner.cleanup()
    body = requests[0]
    assert [body.get(k) for k in ("response_ids", "response_mask", "finished")] == [IDS, MASK, False]


@pytest.mark.gate  # a built-in reward runs in a process of its own
async def test_the_reward_length_counts_the_models_tokens() -> None:
    """limit 10, buffer 10: a tenth for each of the four sampled tokens."""
    reward = {"name": "length", "params": {"limit": 10, "buffer": 10}}
    assert await scored(reward) == pytest.approx(-0.4)
