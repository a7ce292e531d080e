"""What an engine answers is checked before it is stored: a bad answer is a fault of that engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlsys.config.rollout import Truncation
from rlsys.core.spans import TopLogprobs
from rlsys.core.types import Sample
from tests.helpers.router_rig import routing, sample
from tests.helpers.scripted_engine import ScriptedEngine

Change = Callable[[dict[str, Any]], None]
"""Of an event's `meta_info`."""
VOCABULARY = 128


def log_prob(value: float) -> Change:
    def change(meta: dict[str, Any]) -> None:
        for entry in meta["output_token_logprobs"]:
            entry[0] = value

    return change


def kept(extra: int, log_prob: float = -0.5) -> Change:
    """Each token drawn from itself and `extra`."""

    def change(meta: dict[str, Any]) -> None:
        ids = [entry[1] for entry in meta["output_token_logprobs"]]
        meta["output_token_sampling_mask"] = [[i, extra] for i in ids]
        meta["output_token_sampling_logprobs"] = [log_prob for _ in ids]

    return change


def tops(*places: list[Any]) -> Change:
    def change(meta: dict[str, Any]) -> None:
        meta["output_top_logprobs"] = [list(places) for _ in meta["output_token_logprobs"]]

    return change


def versions(*spans: tuple[int, int]) -> Change:
    def change(meta: dict[str, Any]) -> None:
        if meta["finish_reason"]:
            meta["weight_versions"] = [{"version": "1", "start": a, "end": b} for a, b in spans]

    return change


async def answer(
    monkeypatch: pytest.MonkeyPatch,
    change: Change,
    *,
    truncated: bool = False,
    ask: TopLogprobs | None = None,
) -> tuple[Sample, dict[str, float]]:
    """A sample of an engine whose events are changed, and the router's figures."""
    honest = ScriptedEngine._chunk

    def chunk(self: ScriptedEngine, request: Any, finish: Any) -> bytes:
        event = json.loads(honest(self, request, finish)[6:])
        event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][
            : len(event["output_ids"])
        ]
        change(event["meta_info"])
        return f"data: {json.dumps(event)}\n".encode()

    monkeypatch.setattr(ScriptedEngine, "_chunk", chunk)
    new_sample = sample()
    truncation = Truncation(top_k=4) if truncated else None
    async with routing() as rig:
        await rig.push()
        try:
            await rig.router.generate(
                new_sample, max_response_tokens=8, temperature=1.0, tops=ask, truncation=truncation
            )
        except Exception as fault:  # noqa: BLE001 - any refusal will do
            new_sample.censor_reason = str(fault)
        return new_sample, rig.router.stats()


BAD = {
    "a log-prob above 0": (log_prob(0.7), False, "log-prob"),
    "kept ids beyond the vocabulary": (kept(VOCABULARY), True, "outside the vocabulary"),
    "a log-prob among kept ids above 0": (kept(3, 0.2), True, "log-prob"),
    "an alternative beyond the vocabulary": (tops([-0.1, 5000, None]), False, "outside the vocabulary"),
    "an alternative below 0": (tops([-0.1, -2, None]), False, ""),
    "versions with a hole": (versions((0, 2), (4, 8)), False, "version"),
    "versions out of order": (versions((4, 8), (0, 4)), False, "version"),
    "versions that begin late": (versions((1, 2), (2, 8)), False, "version"),
}


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("change", "truncated", "reason"), BAD.values(), ids=BAD)
async def test_a_bad_answer_is_the_engines_fault(
    monkeypatch: pytest.MonkeyPatch, change: Change, truncated: bool, reason: str
) -> None:
    sample, _ = await answer(monkeypatch, change, truncated=truncated, ask=TopLogprobs(1))
    assert sample.censor_reason is not None, "stored without a look"
    assert reason in sample.censor_reason
    assert sample.status.name != "FINISHED"


GOOD = {
    "a log-prob of 0": (log_prob(0.0), False),
    "kept ids of the vocabulary": (kept(VOCABULARY - 1), True),
    "an alternative of probability 0": (tops([-0.1, 5, None], [None, 6, None]), False),
    "versions that tile": (versions((0, 4), (4, 8)), False),
}


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("change", "truncated"), GOOD.values(), ids=GOOD)
async def test_control_a_good_answer_is_stored(
    monkeypatch: pytest.MonkeyPatch, change: Change, truncated: bool
) -> None:
    sample, _ = await answer(monkeypatch, change, truncated=truncated, ask=TopLogprobs(2))
    assert sample.censor_reason is None
    assert sample.tokens == 8


@pytest.mark.virtual_clock
async def test_a_log_prob_rounded_above_0_is_set_to_0_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs among kept ids are quotients of sums: one of 1 may be rounded to a little more."""
    sample, figures = await answer(monkeypatch, kept(3, 1e-7), truncated=True)
    assert sample.censor_reason is None and max(sample.mu) == 0.0
    assert figures["rounded_log_probs"] == 8
