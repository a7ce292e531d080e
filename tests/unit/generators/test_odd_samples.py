"""What a generator of the user's own may leave in a sample, and how it may end: one censored sample, never a run that
ends, a sample that waits for ever, or tokens that no trainer can read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.core.arrays import log_probs
from rlsys.core.errors import GeneratorError
from rlsys.core.spans import TokenSpan, VersionSpan
from rlsys.core.types import Sample, Segment, Status
from rlsys.engine_requests import Limits
from rlsys.generators.generator import ReceivedTokens, check_response
from rlsys.ledger.samples import SampleQuery
from tests.helpers.rollout_rig import make_config, rig

OWN = """
import asyncio
import copy
from rlsys.core.spans import TurnReward, VersionSpan
from rlsys.core.types import CensorCause, Sample, Segment, Status
def own(config, tokenizer, speak):
    async def generate(sample, prompt):
        if sample.index or prompt.index not in {1, 4}:
            await speak(sample)
            return
        DOES
    return generate
"""
ENDS = "; sample.status = Status.FINISHED"
APPEND = "sample.append(Segment([7], [-0.5], [VersionSpan(1, 0, 1)]))"
DOES = {
    "a status that is a text": "await speak(sample); sample.status = 'finished'",
    "no token": "sample.status = Status.FINISHED",
    "censored without a cause": "sample.status = Status.CENSORED",
    "a reason that is no text": "await speak(sample); sample.censor(CensorCause.EXCEPTION, b'why')",
    "an observed id beyond 32 bits": "await speak(sample); sample.observe([5, 2**70])" + ENDS,
    "an observed text behind an id": "await speak(sample); sample.observe([5, 'a'])" + ENDS,
    "a prompt with an id beyond the vocabulary": "await speak(sample.begin([10**9])); await speak(sample)",
    "a prompt that is no ids": "await speak(sample); await speak(sample.begin(['a']))",
    "a log-prob that is no number": "await speak(sample); sample.mu[0] = float('nan')",
    "a token without a log-prob": "await speak(sample); sample.mu.pop()",
    "a turn that is worth no number": "await speak(sample); sample.turn_rewards = [TurnReward(float('nan'))]",
    "another sample id": "sample.sample_id = 10**6; await speak(sample)",
    "another sample id after its turn": "await speak(sample); sample.sample_id += 1",
    "another group id": "sample.group_id += 1; await speak(sample)",
    "another index": "sample.index += 1; await speak(sample)",
    "another seed": "sample.seed += 1; await speak(sample)",
    "another prompt": "await speak(sample); sample.prompt_ids = [5]",
    "tokens of its own": f"await speak(sample); {APPEND}",
    "tokens of its own before a turn": f"{APPEND}; await speak(sample)",
    "another token": "await speak(sample); sample.response_ids[0] = 9",
    "another log-prob": "await speak(sample); sample.mu[0] = -0.25",
    "fewer tokens": (
        "await speak(sample); del sample.response_ids[1:], sample.mu[1:]; sample.spans[-1].end = 1"
    ),
    "a sequence less": "await speak(sample.begin([5])); await speak(sample); sample.extra_sequences.clear()",
    "a turn of a copy": "await speak(copy.deepcopy(sample)); await speak(sample)",
    "a turn of a sample of its own": "await speak(Sample(10**6, 10**5, 0, [5], seed=1)); await speak(sample)",
    "a turn of a sequence of its own": (
        "await speak(Sample(sample.sample_id, sample.group_id, 0, [5], seed=1, sequence=1)); await speak(sample)"
    ),
    "GeneratorExit": "raise GeneratorExit",
    "a cancellation of its own task": "asyncio.current_task().cancel(); await asyncio.sleep(0)",
    "an error after a time limit that cancels": (
        "asyncio.current_task().cancel()\n"
        "        try: await asyncio.sleep(0)\n"
        "        except asyncio.CancelledError: raise TimeoutError('3 s') from None"
    ),
}  # fmt: skip


@pytest.mark.parametrize("does", DOES)
async def test_an_odd_sample_of_a_generator_is_censored(does: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("DOES", DOES[does]))
    rollout = {
        "groups_per_step": 8, "group_size": 8, "generator": f"{tmp_path}/own.py:own", "stall_timeout": 60,
    }  # fmt: skip
    async with rig(make_config(tmp_path, rollout=rollout)) as r:
        await r.start()
        (batch,) = await asyncio.gather(r.take(1), return_exceptions=True)
        assert not isinstance(batch, BaseException), batch
        assert [g.group_id for g in batch.groups] == [0, 2, 3, 5, 6, 7, 8, 9]
        censored = r.manager.samples(SampleQuery(status="censored", limit=10))
        assert len(censored) == 2 and all(s.sample.censor_reason for s in censored)
        assert batch.metrics["censored_samples_exception"] == 2


async def test_tokens_of_a_generator_are_none_that_an_engine_sent(tmp_path: Path) -> None:
    """An interrupted sample is saved with them before it ends."""
    (tmp_path / "own.py").write_text(OWN.replace("DOES", f"{APPEND}; await speak(sample)"))
    rollout = {
        "groups_per_step": 8, "group_size": 8, "generator": f"{tmp_path}/own.py:own", "max_staleness": 2,
    }  # fmt: skip
    async with rig(make_config(tmp_path, rollout=rollout), lambda s: 6 if s.group_id in (1, 4) else 3) as r:
        await r.start()
        (batch,) = await asyncio.gather(r.take(1), return_exceptions=True)
        assert not isinstance(batch, BaseException), batch
        (pushed,) = await asyncio.gather(r.push(), return_exceptions=True)
        assert pushed is None, pushed
        (batch,) = await asyncio.gather(r.take(2), return_exceptions=True)
        assert not isinstance(batch, BaseException), batch
        assert batch.metrics["censored_samples_exception"] == 2


@pytest.mark.parametrize("observed", [[-5], [1000], [5] * 9000], ids=["below 0", "beyond", "too long"])
def test_an_odd_observation_is_refused(observed: list[int]) -> None:
    sample = Sample(1, 1, 0, [5], seed=0)
    sample.append(Segment([7], [-0.5], [VersionSpan(1, 0, 1)]))
    sample.status = Status.FINISHED
    check_response(sample, Limits(1000, 4096), 512)
    sample.observe(observed)
    with pytest.raises(GeneratorError):
        check_response(sample, Limits(1000, 4096), 512)


@pytest.mark.parametrize(
    ("mu", "why"),
    [
        (
            [-0.5, float("inf"), float("-inf")],
            "log-prob inf for token 1 of sequence 0; expected a finite number",
        ),
        ([float("nan"), -0.5, -0.5], "log-prob nan for token 0"),
    ],
    ids=["inf and -inf", "nan"],
)
def test_a_log_prob_that_is_not_finite_is_named(mu: list[float], why: str) -> None:
    sample = Sample(1, 1, 0, [5], seed=0)
    sample.append(Segment([7, 8, 9], [-0.5, -0.5, -0.5], [VersionSpan(1, 0, 3)]))
    sample.status, sample.mu = Status.FINISHED, log_probs(mu)
    with pytest.raises(GeneratorError, match=why):
        check_response(sample, Limits(1000, 4096), 512)


def test_a_sampled_token_is_no_observation() -> None:
    sample, received = Sample(1, 1, 0, [5], seed=0), ReceivedTokens()
    received.begin(sample)
    for token in (7, 8):
        sample.append(Segment([token], [-0.5], [VersionSpan(1, 0, 1)]))
        received.add(sample, 1)
        sample.observe([9])
        received.check(sample)
    sample.observed.insert(0, TokenSpan(0, 1))
    with pytest.raises(GeneratorError, match="changed sampled tokens"):
        received.check(sample)
    assert sample.received_tokens == 2
